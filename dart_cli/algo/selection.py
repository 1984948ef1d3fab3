"""Which steps of a group are trained on: those of high entropy, where the policy had a choice."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def mean_entropy(entropies: Sequence[float]) -> float:
    """H of one step, nats: the mean over its completion's tokens [A], at least one.

    Of the distributions sampled from, so at the sampling temperature (arXiv 2509.23866).
    """
    return sum(entropies) / len(entropies)


def high_entropy_steps(entropies: Sequence[float], share: float) -> list[bool]:
    """Which of a group's steps [T] are among the `share` of highest mean entropy.

    The threshold is the k-th largest of the T entropies, k = ceil(share T), so at least one step
    is kept; steps that equal it are all kept. `share` = 0.8 is the paper's 20th
    percentile (arXiv 2509.23866). Whether a step is kept depends on its value alone, not on its
    position. Raises ValueError for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if not entropies:
        return []
    kept = ceil(round(share * len(entropies), 9))  # 0.7 x 10 is 7.000000000000001 as floats
    threshold = sorted(entropies, reverse=True)[max(kept, 1) - 1]
    return [value >= threshold for value in entropies]
