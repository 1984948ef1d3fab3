"""The learning rate of an update, from its place in the run: it rises, then falls.

LearningRateSchedule   the settings of [train] that decide the rate, by their names there
RunPoint               where the run was when the update's batch was formed
share_of_run           how much of the run was over at that point
learning_rate          the rate of the update

Everything that decides a rate is stored with its batch, so a batch that is trained on again after a
restart has the same rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """The settings of [train] that decide the rate, with their names there and in its units.

    dart_cli/config/schema/train.py has their ranges.
    """

    lr: float
    lr_end: float = 1.0
    warmup: int = 0
    updates: int = 0
    max_minutes: float = 0.0
    max_trajectories: int = 0


@dataclass(frozen=True)
class RunPoint:
    """Where the run was when a batch was formed. It is stored with the batch."""

    updates: int  # updates before the one on this batch, both applied and skipped ones
    run_s: float = 0.0  # seconds for which the data service had served the run
    trajectories: int = 0  # trajectories that had ended


def share_of_run(schedule: LearningRateSchedule, at: RunPoint) -> float:
    """Return the share in [0, 1] of the run that is over.

    A run ends with its updates, minutes or trajectories, whichever comes first, so the furthest of
    them counts. Updates count from the end of the warm-up, and the last of them is at 1.
    """
    span = schedule.updates - 1 - schedule.warmup
    shares = [(at.updates - schedule.warmup) / span if span > 0 else 0.0]
    if schedule.max_minutes:
        shares.append(at.run_s / (60 * schedule.max_minutes))
    if schedule.max_trajectories:
        shares.append(at.trajectories / schedule.max_trajectories)
    return min(max(0.0, *shares), 1.0)


def learning_rate(schedule: LearningRateSchedule, at: RunPoint) -> float:
    """Return the rate of the update on a batch: it rises over `warmup` updates, then falls linearly.

    With s in [0, 1], the share of the run that is over:

        lr * min(rise, 1 - (1 - lr_end) s)
    """
    rise = (at.updates + 1) / (schedule.warmup + 1)
    return schedule.lr * min(rise, 1.0 - (1.0 - schedule.lr_end) * share_of_run(schedule, at))
