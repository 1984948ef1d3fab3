"""Which task is played next, and how often: success rates -> probabilities and group sizes.

MovingAverage      the average of a task's recent outcomes
TaskEstimate       what is estimated of a task from its recent episodes
uniform_weights    the same probability for each task
frontier_weights   probabilities of tasks in proportion to the variance of their rewards
deviation_weights  probabilities of tasks in proportion to the standard deviation of their rewards
group_size         how many trajectories a task's next group has
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = 0.1
"""Least weight of a task under `frontier`, as a fraction of the greatest possible."""

ADDED_DEVIATION = 0.05
"""SPO's epsilon: it is added to each task's standard deviation, so that every task is played sometimes."""

DECAY = 0.95
"""Weight of an outcome relative to the next one: the average covers about 20 trajectories."""


@dataclass(frozen=True)
class MovingAverage:
    """An exponential moving average of outcomes in [0, 1], without the bias of its start.

    The weights of the outcomes always add up to one, so that after few outcomes it is about their
    plain mean and is not pulled towards an initial value (Adam corrects its moments in the same way,
    arXiv 1412.6980 section 3).
    """

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The average; None before the first outcome."""
        return self.total / self.weight if self.weight else None

    def add(self, outcome: float) -> MovingAverage:
        """Return the average after one more outcome."""
        return MovingAverage(self.total * DECAY + outcome, self.weight * DECAY + 1.0)


def uniform_weights(tasks: int) -> list[float]:
    """Return the same probability for each of `tasks` tasks; they sum to 1."""
    return [1.0 / tasks] * tasks


@dataclass(frozen=True)
class TaskEstimate:
    """An estimate of one task, from moving averages over its recent episodes."""

    variance: float | None = None
    """Variance of the rewards that advantages are computed from, in [0, 1 / 4]; p (1 - p) if these are
    outcomes. None before the first verdict."""
    invalid_share: float = 0.0  # share of its episodes that were invalid


UNKNOWN = TaskEstimate()
"""The estimate of a task before its first episode."""


def frontier_weights(
    variances: Sequence[float | None], invalid_shares: Sequence[float] = (), floor: float = FLOOR
) -> list[float]:
    """Return the probability [T] of each task to be played next, from the variance v of its rewards.

    It is proportional to max(4 v, floor). A reward in [0, 1] has a variance in [0, 1 / 4]. The variance of
    outcomes is p (1 - p), the expected size of the group's advantages before scaling: it is greatest at 50 %
    success, and 0 where a task always or never succeeds. The floor keeps such tasks in play, so that it is
    noticed when one is forgotten or becomes solvable. A task without a verdict (None) counts as 1 / 4.

    The weight is multiplied by max(1 - share, floor), where the share of invalid episodes is the task's in
    `invalid_shares` [T] (0 where these are left out). Without that, a task whose episodes are always invalid
    would be played most of all.

    Raises ValueError for a variance outside [0, 1 / 4] or a floor outside (0, 1].
    """
    if not 0 < floor <= 1:
        raise ValueError(f"floor must be in (0, 1], got {floor}")
    _check_variances(variances)
    raw = [1.0 if value is None else max(4 * value, floor) for value in variances]
    return _shares(raw, invalid_shares, floor)


def deviation_weights(
    variances: Sequence[float | None], invalid_shares: Sequence[float] = ()
) -> list[float]:
    """Return the probability [T] of each task to be played next, from the standard deviation of its rewards.

    It is proportional to sqrt(v) + 0.05, where v is the variance of the rewards, p (1 - p) if these are 0
    or 1 (SPO, arXiv 2509.13232): the expected size of a trajectory's advantage. A task without a verdict
    (None) has v = 1 / 4. The weight is multiplied by max(1 - share, FLOOR), as in `frontier_weights`.

    Raises ValueError for a variance outside [0, 1 / 4].
    """
    _check_variances(variances)
    raw = [
        math.sqrt(0.25 if variance is None else variance) + ADDED_DEVIATION
        for variance in variances
    ]
    return _shares(raw, invalid_shares, FLOOR)


def group_size(success: float | None, full: int, least: int = 2) -> int:
    """Return how many trajectories a task's next group has, from its success rate: easier tasks have fewer.

    This is DART's dynamic rollout number (arXiv 2509.23866, and the table in its release). Up to a rate of
    0.6, and for a task without a success rate (None), it is `full`. Above that it is the share

        (9 / success - 7) / 8

    of `full`, rounded down, and at least `least`. The share falls from 1 at 0.6 to 1 / 4 at 1.0. With
    `full` = 8 that is max(least, floor(9 / success - 7)), the table itself: 0.65 -> 6, 0.7 -> 5, 0.8 -> 4,
    0.9 -> 3, 1.0 -> 2. Where almost every trajectory passes, more of them add little: p (1 - p),
    the variance of the reward, goes to 0.

    Raises ValueError for a rate outside [0, 1].
    """
    if success is None:
        return full
    if not 0 <= success <= 1:
        raise ValueError(f"a success rate must be in [0, 1], got {success}")
    if success <= 0.6:
        return full
    share = (9 / success - 7) / 8
    # Rounded first, so that a rounding error does not turn a whole number into the one below.
    fewer = math.floor(round(share * full, 9))
    return min(full, max(least, fewer))


def _check_variances(variances: Sequence[float | None]) -> None:
    for variance in variances:
        if variance is not None and not 0 <= variance <= 0.25 + 1e-9:
            raise ValueError(f"a variance must be in [0, 0.25], got {variance}")


def _shares(raw: Sequence[float], invalid_shares: Sequence[float], floor: float) -> list[float]:
    """Return the weights `raw` [T], each times the share of its task's valid episodes, scaled to sum 1.

    A share below `floor` counts as `floor`.
    """
    if invalid_shares:
        raw = [
            weight * max(1 - share, floor)
            for weight, share in zip(raw, invalid_shares, strict=True)
        ]
    total = sum(raw)
    return [weight / total for weight in raw]
