"""Which formula the trainer optimises, its numbers, and what it is a mean over; torch-free.

Objective     the fields of [train] that choose the formula
loss_weights   the weight of each sample's tokens in the batch's loss

The loss is `sum over samples of share * (sum over its tokens of their loss) / divisor`. Shares and
divisor are the whole batch's, not a pack's, so that gradients accumulated over packs of any size, on
any number of ranks, are those of one big batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CorrectionName = Literal["truncated", "none", "ratio"]
Normalise = Literal["tokens", "samples", "trajectories"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20: float32 can still square and sum e^20."""

K3_LIMIT = 10.0
"""A token's KL to the reference is clamped to 10 nats, as in verl, slime and DART's release."""


@dataclass(frozen=True)
class Objective:
    """Each field is that of the same name in [train], with the same default (docs/objective.md)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: CorrectionName = "truncated"
    kl_beta: float = 0.0
    importance_cap: float = 1.0
    """C of truncated importance sampling, no key of [train]: at 1 an older token never weighs more than a
    fresh one (arXiv 2509.23866 section 3)."""


@dataclass(frozen=True)
class LossWeights:
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


def loss_weights(
    samples: Iterable[tuple[Hashable, int]], normalise: Normalise = "tokens"
) -> LossWeights:
    """Return the shares in a batch of these samples, each (trajectory, completion tokens).

    A trajectory is named by its group and its id: one of the pool that joined two groups of the batch
    is compared in each, so it counts as two.

    A sample is one step's completion. A token of sample i with |i| tokens, of trajectory k with
    |k| tokens in all its samples, weighs

    - `tokens`: 1 / (all tokens). Every token weighs the same, so a long trajectory more than a
      short one (DAPO, arXiv 2503.14476, eq. 8).
    - `samples`: 1 / (samples * |i|). Every step weighs the same (GRPO, arXiv 2402.03300, eq. 3, with
      a step as the sequence).
    - `trajectories`: 1 / (trajectories * |k|). Every trajectory weighs the same, however long.

    Pass only samples that are trained on.
    """
    trajectory_tokens: Counter[Hashable] = Counter()
    count = 0
    for trajectory, tokens in samples:
        trajectory_tokens[trajectory] += tokens
        count += 1
    divisors = {
        "tokens": trajectory_tokens.total(),
        "samples": count,
        "trajectories": len(trajectory_tokens),
    }
    return LossWeights(normalise, float(divisors[normalise]), trajectory_tokens)
