"""Which task to play next, and how often: success rates -> probabilities, group sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = 0.1
"""Least weight of a task under `frontier`, as a fraction of the greatest possible."""

EXPLORATION = 0.05
"""SPO's epsilon: what a task's deviation is raised by, so that none is never played."""

DECAY = 0.95
"""Weight of an outcome relative to the next one: the average covers about 20 trajectories."""


@dataclass(frozen=True)
class MovingAverage:
    """Exponential moving average of outcomes in [0, 1], without the bias of its start.

    The weights of the outcomes seen always add up to one, so that the first outcomes give their
    plain mean rather than a pull towards an initial value (as Adam corrects its moments,
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
    """Equal probability for each of `tasks` tasks; sums to 1."""
    return [1.0 / tasks] * tasks


@dataclass(frozen=True)
class TaskEstimate:
    """What is known of one task, by moving averages over its recent episodes."""

    variance: float | None = None
    """Of the rewards that advantages are computed from, in [0, 1 / 4]: p (1 - p) of outcomes. None
    before the first verdict."""
    invalid_share: float = 0.0  # of its episodes


UNKNOWN = TaskEstimate()
"""Of a task before its first episode."""


def frontier_weights(
    variances: Sequence[float | None], invalid_shares: Sequence[float] = (), floor: float = FLOOR
) -> list[float]:
    """Probability [T] of each task to be played next, from the variance of its rewards in [0, 1 / 4].

    Proportional to max(4 v, floor): no reward in [0, 1] has a variance above 1 / 4. Of outcomes it is
    p (1 - p), so the expected size of the group's advantages before scaling: greatest at 50 % success, 0
    where a task always or never succeeds. The floor keeps such tasks in play, so that a forgotten or newly
    solvable one is noticed; a task without a verdict (None) has 1 / 4. All that times
    max(1 - share, floor), with the task's share in `invalid_shares` [T], 0 where they are left out:
    without it a task whose episodes are always invalid would be played most of all.

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
    """Probability [T] of each task to be played next, from the variance of its rewards in [0, 1 / 4].

    Proportional to sqrt(v) + 0.05, with v = p (1 - p) where rewards are 0 or 1 (SPO, arXiv 2509.13232):
    the expected size of a trajectory's advantage. A task without a verdict (None) has v = 1 / 4. All that
    times max(1 - share, FLOOR), as in `frontier_weights`.

    Raises ValueError for a variance outside [0, 1 / 4].
    """
    _check_variances(variances)
    raw = [math.sqrt(0.25 if each is None else each) + EXPLORATION for each in variances]
    return _shares(raw, invalid_shares, FLOOR)


def group_size(success: float | None, full: int, least: int = 2) -> int:
    """Trajectories of a task's next group, from its success rate in [0, 1]: the easier, the fewer.

    DART's dynamic rollout number (arXiv 2509.23866) and its release's table. Up to 0.6, and for a
    task without a success rate (None), `full`; above that the share

        (9 / success - 7) / 8

    of it, which falls from 1 at 0.6 to 1 / 4 at 1.0, rounded down, and at least `least`. With `full` = 8
    that is max(least, floor(9 / success - 7)), the table itself: 0.65 -> 6, 0.7 -> 5, 0.8 -> 4,
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
    fewer = math.floor(
        round(share * full, 9)
    )  # a whole number must not be missed by a rounding error
    return min(full, max(least, fewer))


def _check_variances(variances: Sequence[float | None]) -> None:
    for variance in variances:
        if variance is not None and not 0 <= variance <= 0.25 + 1e-9:
            raise ValueError(f"a variance must be in [0, 0.25], got {variance}")


def _shares(raw: Sequence[float], invalid_shares: Sequence[float], floor: float) -> list[float]:
    """Weights [T] that sum to 1, each first times the valid share of its task's episodes."""
    if invalid_shares:
        raw = [
            weight * max(1 - share, floor)
            for weight, share in zip(raw, invalid_shares, strict=True)
        ]
    total = sum(raw)
    return [weight / total for weight in raw]
