"""Compares how fast a run with kills learned with a run without them.

    LearningCurve    success over batches, and when each batch was in the weights
    learning_curve   reads it from a run's database
    pace_ratio       the share of an undisturbed run's pace that a disturbed run kept
    draw             both learning curves in one PNG

A batch counts when it went into the weights that hold it: one that was trained again from an older
checkpoint counts once, at its last time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.run_times import outcomes
from dart_cli.data.store.reader import Reader

POINTS = 30
"""Most points of a learning curve."""


@dataclass(frozen=True)
class LearningCurve:
    """One run's progress over time."""

    trained_at: list[float]  # of each batch in order, seconds since all processes worked
    success: list[tuple[int, float]]  # (batches trained, success of the episodes they played)


def learning_curve(reader: Reader, began: float) -> LearningCurve:
    """Return the learning curve of a run that is over; `began` is in unix seconds."""
    batches = [row for row in reader.batches() if row.state == "trained"]
    times = [max(0.0, row.trained_at - began) for row in batches if row.trained_at is not None]
    return LearningCurve(sorted(times), _success(reader, len(batches)))


def _success(reader: Reader, batches: int) -> list[tuple[int, float]]:
    """Return success by number of batches in the weights that played: means over tasks, where most have data."""
    marks = [
        (row.trained_version, row.id)
        for row in reader.batches()
        if row.state == "trained" and row.trained_version is not None
    ]
    versions = [version for version, _ in sorted(marks)]
    numbers = [number for _, number in sorted(marks)]
    bucket = max(1, -(-batches // POINTS))
    passes: dict[int, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for task_id, row in outcomes(reader):
        if row.counted and row.oldest_version is not None:
            at = bisect_right(versions, row.oldest_version)
            trajectories = numbers[at - 1] if at else 0
            passes[trajectories // bucket][task_id].append(row.outcome == "pass")
    most = max((len(tasks) for tasks in passes.values()), default=0)
    return [
        (place * bucket, sum(sum(passed) / len(passed) for passed in tasks.values()) / len(tasks))
        for place, tasks in sorted(passes.items())
        if 2 * len(tasks) >= most
    ]


def pace_ratio(disturbed: Sequence[float], undisturbed: Sequence[float]) -> float | None:
    """Return the undisturbed run's time to equally many batches divided by the other's; None if too few.

    Compared at the largest number of batches that both reached, so at the same point of learning. The arguments are
    `LearningCurve.trained_at`.
    """
    both = min(len(disturbed), len(undisturbed))
    if both < 2 or not disturbed[both - 1]:
        return None
    return undisturbed[both - 1] / disturbed[both - 1]


def draw(
    path: Path, disturbed: LearningCurve, undisturbed: LearningCurve, kills_at: Sequence[float]
) -> None:
    """Draw success over batches beside batches over minutes; `kills_at` is in seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = (
        (undisturbed, "undisturbed", "#2563eb"),
        (disturbed, f"{len(kills_at)} kills", "#b91c1c"),
    )
    for course, label, colour in arms:
        left.plot(
            [batch for batch, _ in course.success],
            [success for _, success in course.success],
            color=colour,
            label=label,
        )
        right.plot(
            [seconds / 60 for seconds in course.trained_at],
            range(1, len(course.trained_at) + 1),
            color=colour,
            label=label,
        )
    right.plot(
        [seconds / 60 for seconds in kills_at],
        [0] * len(kills_at),
        "|",
        color="#111827",
        markersize=7,
        alpha=0.5,
        label="a kill",
    )
    left.set(xlabel="batches trained", ylabel="success, mean over tasks", ylim=(0, 1.02))
    right.set(xlabel="minutes", ylabel="batches in the weights", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.legend(fontsize=9, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
