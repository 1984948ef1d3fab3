"""What the batch's loss is a mean over: the weight of each sample's tokens.

The loss is `sum over samples of share * (sum over its tokens of their loss) / divisor`. Shares and
divisor are the whole batch's, not a pack's, so that gradients accumulated over packs of any size, on
any number of ranks, are those of one big batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Normalise = Literal["tokens", "samples", "trajectories", "constant"]


@dataclass(frozen=True)
class LossShares:
    """The weight of a token in its batch."""

    normalise: Normalise
    divisor: float
    trajectory_tokens: Mapping[Hashable, int]

    def of(self, trajectory: Hashable, tokens: int) -> float:
        """Weight of each of the `tokens` tokens of a sample, before the division."""
        if self.normalise == "samples":
            return 1.0 / tokens
        if self.normalise == "trajectories":
            return 1.0 / self.trajectory_tokens[trajectory]
        return 1.0


def loss_shares(
    samples: Iterable[tuple[Hashable, int]],
    normalise: Normalise = "tokens",
    constant_tokens: float = 0.0,
) -> LossShares:
    """The shares in a batch of these samples, each (trajectory, completion tokens).

    A trajectory is named by its group and its id: one of the pool that joined two groups of the batch
    is compared in each, so it counts as two.

    A sample is one step's completion. A token of sample i with |i| tokens, of trajectory k with
    |k| tokens in all its samples, weighs

    - `tokens`: 1 / (all tokens). Every token weighs the same, so a long trajectory more than a
      short one (DAPO, arXiv 2503.14476, eq. 8).
    - `samples`: 1 / (samples * |i|). Every step weighs the same (GRPO, arXiv 2402.03300, eq. 3, and
      GSPO, with a step as the sequence).
    - `trajectories`: 1 / (trajectories * |k|). Every trajectory weighs the same, however long.
    - `constant`: 1 / (trajectories * constant_tokens). A token's weight depends on no length, neither
      its trajectory's nor the batch's: the unbiased policy gradient (Dr. GRPO, arXiv
      2503.20783, section 3.2).

    Pass only samples that are trained on. Raises ValueError for `constant` without `constant_tokens`.
    """
    trajectory_tokens: Counter[Hashable] = Counter()
    count = 0
    for trajectory, tokens in samples:
        trajectory_tokens[trajectory] += tokens
        count += 1
    if normalise == "tokens":
        divisor = float(trajectory_tokens.total())
    elif normalise == "samples":
        divisor = float(count)
    elif normalise == "trajectories":
        divisor = float(len(trajectory_tokens))
    elif constant_tokens > 0:
        divisor = len(trajectory_tokens) * constant_tokens
    else:
        raise ValueError(f"constant_tokens must be > 0, got {constant_tokens}")
    return LossShares(normalise, divisor, trajectory_tokens)
