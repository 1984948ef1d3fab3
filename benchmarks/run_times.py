"""Reads when the episodes and steps of a run were played, for timelines and counts of benchmarks.

episode_times   each trajectory
step_times      each step
outcomes        each judged trajectory with its task, in the order they ended
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bus.messages import Outcome
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import TrajectoryRow, TrajectoryState


@dataclass(frozen=True, slots=True)
class EpisodeTimes:
    """The times of one trajectory, and the worker that played it."""

    id: str
    worker: str  # the environment process
    slot: int
    state: TrajectoryState
    reason: str  # why dropped; else empty
    outcome: Outcome | None
    steps: int | None  # submitted; None while it is played
    leased_at: float
    ended_at: float | None  # None while it is played
    reset_s: float | None
    wall_s: float | None  # from the lease to the verdict, as the slot measured


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time of one step's submission, and what its seconds went into."""

    trajectory_id: str
    step: int
    worker: str  # the rollout worker
    at: float  # submitted, after the action was carried out
    model_s: float
    env_s: float


def episode_times(reader: Reader) -> list[EpisodeTimes]:
    """Return when each trajectory was played, in order of lease."""
    return [
        EpisodeTimes(
            id=row.id,
            worker=row.worker,
            slot=row.slot,
            state=row.state,
            reason=row.reason,
            outcome=row.outcome,
            steps=row.steps,
            leased_at=row.leased_at,
            ended_at=row.ended_at,
            reset_s=row.reset_s,
            wall_s=row.wall_s,
        )
        for row in reader.trajectories()
    ]


def step_times(reader: Reader) -> list[StepTimes]:
    """Return when each step was played, in order of submission."""
    times = [
        StepTimes(step.trajectory_id, step.step, step.worker, step.at, step.model_s, step.env_s)
        for row in reader.trajectories()
        for step in reader.steps(row.id)
    ]
    return sorted(times, key=lambda step: step.at)


def outcomes(reader: Reader) -> Iterator[tuple[str, TrajectoryRow]]:
    """Return each judged trajectory with its task's id, in the order they ended."""
    tasks = {group.id: group.task_id for group in reader.groups()}
    judged = [row for row in reader.trajectories() if row.outcome is not None]
    for row in sorted(judged, key=lambda row: (row.ended_at or 0.0, row.id)):
        yield tasks[row.group_id], row
