"""Success over policy versions, with the number of episodes behind each point.

read_curve  each task's success over buckets of the run's versions
Point       success at some versions, its episodes and its 95 % interval
by_task     task -> its points, neighbours joined until each has enough episodes
over_tasks  the mean over tasks, where at least half of them have a point
ends        the same over the first fifth of the versions and over the last
recent      success of one task over its newest buckets
Series      one line of a chart; success_lines, those of a run's success
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from dart_cli.algo.statistics import Z_95, wilson
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint
from dart_cli.evaluation.results import Evaluation

BUCKETS = 40
"""Of versions, at most."""
RECENT = 32
"""The least number of a task's trajectories over which its success "lately" is computed."""
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


def read_curve(reader: Reader) -> list[CurvePoint]:
    """Success of each task over at most BUCKETS buckets of versions."""
    version = reader.newest_version()
    newest = 0 if version is None else version.policy_version
    return reader.success_curve(bucket=max(1, ceil((newest + 1) / BUCKETS)))


def by_task(points: Iterable[CurvePoint], least: int = LEAST_EPISODES) -> dict[str, list[Point]]:
    """Each task's success over versions, by name; a point has at least `least` episodes.

    Only a task with fewer in all has one point with less.
    """
    found = _of_tasks(points)
    return {task: [_joined(part) for part in _parts(found[task], least)] for task in sorted(found)}


def _of_tasks(points: Iterable[CurvePoint]) -> dict[str, list[CurvePoint]]:
    found: dict[str, list[CurvePoint]] = defaultdict(list)
    for point in points:
        found[point.task_id].append(point)
    return found


def _parts(points: Sequence[CurvePoint], least: int) -> list[list[CurvePoint]]:
    """Neighbours together until there are `least` episodes; a short rest joins the last part."""
    parts: list[list[CurvePoint]] = []
    part: list[CurvePoint] = []
    for point in points:
        part.append(point)
        if sum(each.trajectories for each in part) >= least:
            parts.append(part)
            part = []
    if parts:
        parts[-1] += part
    elif part:
        parts.append(part)
    return parts


def _joined(part: Sequence[CurvePoint]) -> Point:
    whole = _merged(part)
    low, high = wilson(whole.passed, whole.trajectories)
    versions = sum(point.policy_version * point.trajectories for point in part)
    return Point(
        version=versions / whole.trajectories,
        success=whole.success,
        episodes=whole.trajectories,
        low=low,
        high=high,
        ended_at=whole.ended_at,
    )


def _merged(part: Sequence[CurvePoint]) -> CurvePoint:
    """All episodes of these points of one task."""
    return CurvePoint(
        part[0].task_id,
        part[0].policy_version,
        sum(point.trajectories for point in part),
        sum(point.passed for point in part),
        max(point.ended_at for point in part),
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
        _of_tasks(point for point in found if point.policy_version in part)
        for part in (versions[:fifth], versions[-fifth:])
    )
    tasks = sorted(first.keys() & last.keys())
    if len(versions) < 2 or not tasks:
        return None
    begin, end = ([_merged(part[task]) for task in tasks] for part in (first, last))
    return _mean(versions[0], begin), _mean(versions[-1], end)


@dataclass(frozen=True)
class Series:
    """One line of a chart, and its name in the legend."""

    name: str
    points: Sequence[tuple[float, float]]  # in the order of x
    kind: str = "line"
    band: Sequence[tuple[float, float]] = ()  # lower and upper bound of each point, if known
    short: str = ""  # the name beside a value; empty: `name`

    def over(self, place: Callable[[float], float]) -> Series:
        """Return the same line over another x axis, on which `place` says where each point stands."""
        return replace(self, points=[(place(x), y) for x, y in self.points])


def task_line(name: str, points: Sequence[Point], kind: str = "task", note: str = "") -> Series:
    """Return success over versions, with a note and the number of episodes in its name; a mean has a band."""
    return Series(
        f"{name}{note}, n {sum(point.episodes for point in points):,}",
        [(point.version, point.success) for point in points],
        kind,
        [(point.low, point.high) for point in points] if kind == "mean" else (),
        name,
    )


def success_lines(points: Sequence[CurvePoint], before: Evaluation | None) -> list[Series]:
    """Return a line for each task, the most played first; for their mean; for what random clicks passed `before` the run."""
    tasks = by_task(points)
    often = sorted(tasks, key=lambda name: -sum(each.episodes for each in tasks[name]))
    lines = [task_line(name, tasks[name]) for name in often]
    lines.append(task_line("mean over tasks", over_tasks(points), "mean", ", 95 % interval"))
    mode = before.modes.get("random") if before else None
    guess = mode.overall if mode else None
    if points and guess and guess.success is not None:
        versions = [point.policy_version for point in points]
        level = [(min(versions), guess.success), (max(versions), guess.success)]
        name = f"random clicks {guess.success:.2f}, n {guess.episodes}"
        lines.append(Series(name, level, "guess", short="random clicks"))
    return lines


def recent(curve: Sequence[CurvePoint]) -> float | None:
    """One task's success over its newest buckets that together hold at least RECENT trajectories."""
    part: list[CurvePoint] = []
    for point in reversed(curve):
        part.append(point)
        if sum(each.trajectories for each in part) >= RECENT:
            break
    return _merged(part).success if part else None


def recent_by_task(points: Iterable[CurvePoint]) -> dict[str, float | None]:
    """Return `recent` of each task, by its id."""
    return {task: recent(curve) for task, curve in _of_tasks(points).items()}


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
