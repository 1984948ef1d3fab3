"""Success over policy versions, with the number of episodes behind each point.

Point       success at some versions, its episodes and its 95 % interval
by_task     task -> its points, neighbours joined until each has enough episodes
over_tasks  the mean over tasks, where at least half of them have a point
ends        the same over the first fifth of the versions and over the last
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from dart_cli.algo.proportion import Z_95, wilson
from dart_cli.data.store.rows import CurvePoint

LEAST_EPISODES = 16
"""Of a point: a rate over fewer looks like a drop or a peak and is chance."""


@dataclass(frozen=True)
class Point:
    """Success of the episodes of some versions."""

    version: float  # mean over the episodes
    success: float
    episodes: int
    low: float  # of the 95 % interval of `success`
    high: float
    ended_at: float  # unix seconds of the last episode


def by_task(points: Iterable[CurvePoint], least: int = LEAST_EPISODES) -> dict[str, list[Point]]:
    """Each task's success over versions, by name; a point has at least `least` episodes.

    Only a task with fewer in all has one point with less.
    """
    found: dict[str, list[CurvePoint]] = {}
    for point in points:
        found.setdefault(point.task_id, []).append(point)
    return {
        task_id: [_joined(part) for part in _parts(found[task_id], least)]
        for task_id in sorted(found)
    }


def _parts(points: Sequence[CurvePoint], least: int) -> list[list[CurvePoint]]:
    """Neighbours together until there are `least` episodes; a short rest joins the last part."""
    parts: list[list[CurvePoint]] = []
    part: list[CurvePoint] = []
    for point in points:
        part.append(point)
        if sum(each.trajectories for each in part) >= least:
            parts.append(part)
            part = []
    if part and parts:
        parts[-1] += part
    elif part:
        parts.append(part)
    return parts


def _joined(part: Sequence[CurvePoint]) -> Point:
    episodes = sum(point.trajectories for point in part)
    passed = sum(point.passed for point in part)
    low, high = wilson(passed, episodes)
    return Point(
        version=sum(point.policy_version * point.trajectories for point in part) / episodes,
        success=passed / episodes,
        episodes=episodes,
        low=low,
        high=high,
        ended_at=max(point.ended_at for point in part),
    )


def over_tasks(points: Iterable[CurvePoint]) -> list[Point]:
    """Mean over tasks by version, where at least half of them have a point.

    The mean over a few of them is another quantity, and a mean over episodes would show what the
    scheduler plays. The interval is the normal one of a stratified mean, each task's variance with two
    passes and two failures added (Agresti and Coull 1998).
    """
    buckets: dict[int, dict[str, CurvePoint]] = {}
    names = set()
    for point in points:
        buckets.setdefault(point.policy_version, {})[point.task_id] = point
        names.add(point.task_id)
    return [
        _mean(version, list(bucket.values()))
        for version, bucket in sorted(buckets.items())
        if 2 * len(bucket) >= len(names)
    ]


def ends(points: Iterable[CurvePoint]) -> tuple[Point, Point] | None:
    """Mean over tasks in the first fifth of the versions and in the last, of tasks that were played in both.

    None where there is no such task.
    """
    found = list(points)
    versions = sorted({point.policy_version for point in found})
    fifth = max(1, len(versions) // 5)
    first, last = (
        _by_task(point for point in found if point.policy_version in part)
        for part in (versions[:fifth], versions[-fifth:])
    )
    tasks = first.keys() & last.keys()
    if len(versions) < 2 or not tasks:
        return None
    begin, end = ([part[task] for task in sorted(tasks)] for part in (first, last))
    return _mean(versions[0], begin), _mean(versions[-1], end)


def _by_task(points: Iterable[CurvePoint]) -> dict[str, CurvePoint]:
    """One point for each task, of all its episodes."""
    found: dict[str, CurvePoint] = {}
    for point in points:
        was = found.get(point.task_id)
        found[point.task_id] = (
            point
            if was is None
            else replace(
                point,
                trajectories=was.trajectories + point.trajectories,
                passed=was.passed + point.passed,
            )
        )
    return found


def _mean(version: int, tasks: Sequence[CurvePoint]) -> Point:
    success = sum(point.success for point in tasks) / len(tasks)
    half = Z_95 * sqrt(sum(map(_variance, tasks))) / len(tasks)
    return Point(
        version=version,
        success=success,
        episodes=sum(point.trajectories for point in tasks),
        low=max(0.0, success - half),
        high=min(1.0, success + half),
        ended_at=max(point.ended_at for point in tasks),
    )


def _variance(point: CurvePoint) -> float:
    """Of the success of one task at one version."""
    episodes = point.trajectories + 4
    share = (point.passed + 2) / episodes
    return share * (1 - share) / episodes
