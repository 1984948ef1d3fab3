"""Advantages of one group's trajectories from their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Normalise = Literal["group_std", "group_mean"]

EPSILON = 1e-6
"""Added to the standard deviation, as in DART (arXiv 2509.23866)."""


def group_advantages(rewards: Sequence[float], normalise: Normalise = "group_std") -> list[float]:
    """Centre, and with `group_std` scale, the rewards [G] of one group.

    `group_std`: A_i = (R_i - mean) / (std + 1e-6), GRPO (arXiv 2402.03300, section 4.1.2), over
    the group's *trajectories*, so that a long one weighs no more than a short one. `std` is the
    population's (divided by G): any group size gives advantages of mean 0 and variance 1.
    `group_mean`: A_i = R_i - mean, without the division (Dr. GRPO, arXiv 2503.20783).

    Equal rewards, and a group of one, give exactly 0. Raises ValueError for a reward that is not
    finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if normalise == "group_mean":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return [value / (std + EPSILON) for value in centred]
