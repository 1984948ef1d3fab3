"""Success over policy versions, with the number of episodes behind each point.

read_curve      reads each task's success over buckets of the run's versions
Point           success at some versions, with its episodes and its 95 % interval
by_task         task -> its points, joined with their neighbours until each has enough episodes
over_tasks      the mean over tasks at each version at which at least half of the tasks have a point
ends            the mean over tasks in the first fifth of the versions, and in the last fifth
recent          success of one task over its newest buckets; recent_by_task returns it for each task
Series          a line of a chart
success_lines   the lines of a run's success
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
"""Number of buckets of versions, at most."""
RECENT = 32
"""Trajectories of a task over which its success "lately" is computed, at least."""
LEAST_EPISODES = 16
"""Episodes of a point, at least: a rate over fewer may look like a drop or a peak by chance."""


@dataclass(frozen=True)
class Point:
    """Success of the episodes that some policy versions played."""

    version: float  # mean over the episodes
    success: float
    episodes: int
    low: float  # of the 95 % interval of `success`
    high: float
    ended_at: float  # unix seconds of the last episode


def read_curve(reader: Reader) -> list[CurvePoint]:
    """Return the success of each task over at most BUCKETS buckets of versions."""
    version = reader.newest_version()
    newest = 0 if version is None else version.policy_version
    return reader.success_curve(bucket=max(1, ceil((newest + 1) / BUCKETS)))


def by_task(points: Iterable[CurvePoint], least: int = LEAST_EPISODES) -> dict[str, list[Point]]:
    """Return task -> its success over versions, sorted by task; a point has at least `least` episodes.

    A task with fewer episodes in all has one point.
    """
    curves = _split_by_task(points)
    return {
        task: [_joined(part) for part in _parts(curves[task], least)] for task in sorted(curves)
    }


def _split_by_task(points: Iterable[CurvePoint]) -> dict[str, list[CurvePoint]]:
    """Return task -> its points, in their order."""
    curves: dict[str, list[CurvePoint]] = defaultdict(list)
    for point in points:
        curves[point.task_id].append(point)
    return curves


def _parts(points: Sequence[CurvePoint], least: int) -> list[list[CurvePoint]]:
    """Return neighbours grouped until each part has `least` episodes; a shorter rest joins the last part."""
    parts: list[list[CurvePoint]] = []
    part: list[CurvePoint] = []
    for point in points:
        part.append(point)
        if sum(bucket.trajectories for bucket in part) >= least:
            parts.append(part)
            part = []
    if parts:
        parts[-1] += part
    elif part:
        parts.append(part)
    return parts


def _joined(part: Sequence[CurvePoint]) -> Point:
    """Return several points of one task as one point with its 95 % interval."""
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
    """Return all episodes of several points of one task as one point."""
    return CurvePoint(
        task_id=part[0].task_id,
        policy_version=part[0].policy_version,
        trajectories=sum(point.trajectories for point in part),
        passed=sum(point.passed for point in part),
        ended_at=max(point.ended_at for point in part),
    )


def over_tasks(points: Iterable[CurvePoint]) -> list[Point]:
    """Return the mean over tasks at each version at which at least half of the tasks have a point.

    The mean over a few tasks would be another quantity, and a mean over episodes would show which tasks the
    scheduler plays. The interval is the normal one of a stratified mean; two passes and two failures are
    added to each task for its variance (Agresti and Coull 1998).
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
    """Return the mean over tasks in the first fifth of the versions, and in the last fifth.

    Only tasks that were played in both count. Returns None if there is no such task.
    """
    points = list(points)
    versions = sorted({point.policy_version for point in points})
    fifth = max(1, len(versions) // 5)
    first, last = (
        _split_by_task(point for point in points if point.policy_version in part)
        for part in (versions[:fifth], versions[-fifth:])
    )
    tasks = sorted(first.keys() & last.keys())
    if len(versions) < 2 or not tasks:
        return None
    begin, end = ([_merged(part[task]) for task in tasks] for part in (first, last))
    return _mean(versions[0], begin), _mean(versions[-1], end)


@dataclass(frozen=True)
class Series:
    """A line of a chart, with its name in the legend."""

    name: str
    points: Sequence[tuple[float, float]]  # in the order of x
    kind: str = "line"
    band: Sequence[tuple[float, float]] = ()  # lower and upper bound of each point; empty: unknown
    short: str = ""  # the name beside a value; empty: `name`

    def over(self, place: Callable[[float], float]) -> Series:
        """Return the same line over another x axis: `place` maps an x of this line to that axis."""
        return replace(self, points=[(place(x), y) for x, y in self.points])


def task_line(name: str, points: Sequence[Point], kind: str = "task", note: str = "") -> Series:
    """Return a line of success over versions, named with a note and its number of episodes.

    Only a line of the kind "mean" has a band.
    """
    return Series(
        name=f"{name}{note}, n {sum(point.episodes for point in points):,}",
        points=[(point.version, point.success) for point in points],
        kind=kind,
        band=[(point.low, point.high) for point in points] if kind == "mean" else (),
        short=name,
    )


def success_lines(points: Sequence[CurvePoint], before: Evaluation | None) -> list[Series]:
    """Return a line for each task, the most played first, one for their mean, and one for random clicks.

    The success of random clicks is taken from the evaluation `before` the run, if it has that mode.
    """
    tasks = by_task(points)
    most_played = sorted(tasks, key=lambda task: -sum(point.episodes for point in tasks[task]))
    lines = [task_line(task, tasks[task]) for task in most_played]
    lines.append(task_line("mean over tasks", over_tasks(points), "mean", ", 95 % interval"))
    mode = before.modes.get("random") if before else None
    random_clicks = mode.overall if mode else None
    if points and random_clicks and random_clicks.success is not None:
        versions = [point.policy_version for point in points]
        success = random_clicks.success
        level = [(min(versions), success), (max(versions), success)]
        name = f"random clicks {success:.2f}, n {random_clicks.episodes}"
        lines.append(Series(name, level, "guess", short="random clicks"))
    return lines


def recent(curve: Sequence[CurvePoint]) -> float | None:
    """Return one task's success over its newest buckets that together hold at least RECENT trajectories.

    Returns None if the curve is empty.
    """
    part: list[CurvePoint] = []
    for point in reversed(curve):
        part.append(point)
        if sum(bucket.trajectories for bucket in part) >= RECENT:
            break
    return _merged(part).success if part else None


def recent_by_task(points: Iterable[CurvePoint]) -> dict[str, float | None]:
    """Return task -> its success over its newest buckets, as `recent` computes it."""
    return {task: recent(curve) for task, curve in _split_by_task(points).items()}


def _mean(version: int, tasks: Sequence[CurvePoint]) -> Point:
    """Return the mean over tasks at one version, with its 95 % interval; `tasks` has a point of each."""
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
    """Return the variance of the success of one task at one version."""
    episodes = point.trajectories + 4
    share = (point.passed + 2) / episodes
    return share * (1 - share) / episodes
