"""The settings of the loss, and what the loss is a mean over; without torch.

Objective      the settings of [train] that choose the formula and its numbers
loss_weights   the weight of each sample's tokens in the batch's loss

The loss is `sum over samples of weight * (sum over its tokens of their loss) / divisor`. Weights and
divisor are computed from the whole batch, not from a pack, so that gradients accumulated over packs of any
size, on any number of ranks, equal the gradient of one big batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

ImportanceSampling = Literal["truncated", "none", "ratio"]
"""Values of train.correction; the table in loss.py has their formulas."""
Normalise = Literal["tokens", "samples", "trajectories"]
"""Values of train.normalise, which `loss_weights` explains."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20, since float32 can still square and sum e^20."""

K3_LIMIT = 10.0
"""A token's KL to the reference is clamped to 10 nats, as in verl, slime and DART's release."""


@dataclass(frozen=True)
class Objective:
    """The settings of the loss, with the names and defaults of the keys of [train] (docs/objective.md)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: ImportanceSampling = "truncated"
    kl_beta: float = 0.0
    teacher_weight: float = 0.0
    """Share of a token's advantage that is the teacher's, 0 to 1; the rest is the reward's."""
    importance_cap: float = 1.0
    """C of truncated importance sampling; it is no key of [train]. At 1 an older token never weighs more than
    a fresh one (arXiv 2509.23866 section 3)."""


@dataclass(frozen=True)
class LossWeights:
    """The weights of tokens in the loss of their batch."""

    normalise: Normalise
    divisor: float
    trajectory_tokens: Mapping[Hashable, int]

    def of(self, trajectory: Hashable, tokens: int) -> float:
        """Return the weight of each of the `tokens` tokens of a sample, before the division by `divisor`."""
        if self.normalise == "samples":
            return 1.0 / tokens
        if self.normalise == "trajectories":
            return 1.0 / self.trajectory_tokens[trajectory]
        return 1.0


def loss_weights(
    samples: Iterable[tuple[Hashable, int]], normalise: Normalise = "tokens"
) -> LossWeights:
    """Return the weights in a batch of these samples, each given as (trajectory, completion tokens).

    Pass only samples that are trained on. A trajectory is named by its group and its id: one from the pool
    that joined two groups of the batch is compared in each of them, so it counts as two.

    A sample is one step's completion. A token of sample i with |i| tokens, of trajectory k with
    |k| tokens in all its samples, weighs

    - `tokens`: 1 / (all tokens). Every token weighs the same, so a long trajectory weighs more than
      a short one (DAPO, arXiv 2503.14476, eq. 8).
    - `samples`: 1 / (samples * |i|). Every step weighs the same (GRPO, arXiv 2402.03300, eq. 3, with
      a step as the sequence).
    - `trajectories`: 1 / (trajectories * |k|). Every trajectory weighs the same, however long.
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
