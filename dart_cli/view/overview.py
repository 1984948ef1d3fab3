"""Pages that count and average: the run, its tasks, one task.

run, tasks, task    a page each
run_row             a run in the list of several
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

from bus.errors import UserError
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CountersRow, CurvePoint, MetricPoint
from dart_cli.inspection.ls import STATES
from dart_cli.view.charts import MOST_POINTS, Series, bar, line_chart, sparkline
from dart_cli.view.header import LIVE_S, Values, begun_at, config_of, header
from dart_cli.view.query import Query
from dart_cli.view.records import OUTCOMES, group_rows, with_groups
from dart_cli.view.site import Site
from envs.registry import did_you_mean

CURVE_BUCKETS = 40
NEWEST = 12
LOOKED_AT = 500
"""The newest trajectories, among which those with a verdict are searched; the others are in play."""
RECENT = 32
"""The least number of a task's trajectories over which its success "lately" is computed."""

FIRST_METRICS = (  # shown first, as far as the trainer sends them
    *("loss", "reward", "entropy", "mismatch_kl", "reference_kl", "ess", "grad_norm", "lr"),
    *("staleness_mean", "tokens", "step_s", "waiting_s"),
)

# --- the run --------------------------------------------------------------------------------


def run(reader: Reader, site: Site, query: Query) -> Values:
    """Curves, trajectories by state, reasons of drops, processes, the newest verdicts."""
    counters = reader.counters()
    curve = _curve(reader)
    newest = [row for row in reader.trajectories(limit=LOOKED_AT) if row.outcome is not None]
    return header(reader, site, query) | {
        "facts": _facts(reader, counters),
        "success_chart": _success_chart(curve),
        "tasks": _task_rows(counters, curve),
        "stages": _stages(counters),
        "drops": _drops(counters),
        "metrics": _metric_cards(reader.metric_curves(MOST_POINTS)),
        "newest": with_groups(reader, newest[: -NEWEST - 1 : -1]),
    }


def _facts(reader: Reader, counters: Sequence[CountersRow]) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    version = reader.newest_version()
    judged = {
        outcome: sum(t.trajectories for t in counters if t.outcome == outcome)
        for outcome in OUTCOMES
    }
    config = config_of(reader)
    batches = reader.total("batches")
    updates = config.get("train", {}).get("updates")
    over = judged["pass"] + judged["fail"]
    return [
        ("weights", "none yet" if version is None else f"v{version.policy_version}"),
        ("batches", f"{batches}" + (f" of {updates}" if updates else "")),
        ("trajectories", f"{sum(t.trajectories for t in counters)}"),
        ("steps", f"{sum(t.steps for t in counters)}"),
        ("success so far", f"{judged['pass'] / over:.2f}" if over else "-"),
        ("invalid", f"{judged['invalid']}"),
        ("on disk", f"{reader.bytes_on_disk() / 2**20:.1f} MiB"),
    ]


def _success_chart(curve: Mapping[str, Sequence[CurvePoint]]) -> Any:
    """Success by version: a thin line for each task, a thick one for the mean over tasks."""
    lines = [Series(task, _points(points), "thin") for task, points in curve.items()]
    return line_chart(
        [*lines, Series("mean over tasks", _mean_curve(curve), "mean")],
        width=900,
        height=260,
        low=0.0,
        high=1.0,
        label="success by policy version",
    )


def _mean_curve(curve: Mapping[str, Sequence[CurvePoint]]) -> list[tuple[float, float]]:
    """Mean over tasks by version, where at least half of them have a point.

    The mean over a few of them is another quantity.
    """
    by_version: dict[int, list[float]] = {}
    for points in curve.values():
        for point in points:
            by_version.setdefault(point.policy_version, []).append(point.success)
    return [
        (float(version), fmean(values))
        for version, values in sorted(by_version.items())
        if 2 * len(values) >= len(curve)
    ]


def _curve(reader: Reader) -> dict[str, list[CurvePoint]]:
    """Task -> its success over buckets of versions."""
    version = reader.newest_version()
    newest = 0 if version is None else version.policy_version
    found: dict[str, list[CurvePoint]] = {}
    for point in reader.success_curve(bucket=max(1, ceil((newest + 1) / CURVE_BUCKETS))):
        found.setdefault(point.task_id, []).append(point)
    return found


def _points(curve: Iterable[CurvePoint]) -> list[tuple[float, float]]:
    return [(float(point.policy_version), point.success) for point in curve]


def _stages(counters: Sequence[CountersRow]) -> list[Values]:
    """How many trajectories are in which state, in the order of their life cycle."""
    return _shares(
        (state, {"state": state}, sum(t.trajectories for t in counters if t.state == state), state)
        for state in STATES
    )


def _drops(counters: Sequence[CountersRow]) -> list[Values]:
    """Why trajectories were dropped, the most frequent reason first."""
    counts: dict[str, int] = {}
    for row in counters:
        if row.state == "dropped":
            counts[row.reason] = counts.get(row.reason, 0) + row.trajectories
    return _shares(
        (reason, {"state": "dropped", "reason": reason}, number, "dropped")
        for reason, number in sorted(counts.items(), key=lambda item: -item[1])
    )


def _shares(rows: Iterable[tuple[str, Values, int, str]]) -> list[Values]:
    """Counts with bars; a row is (name, query of the list, number, class of view.css)."""
    listed = list(rows)
    whole = sum(number for *_, number, _ in listed) or 1
    return [
        {"name": name, "query": query, "number": number, "bar": bar(number / whole, kind)}
        for name, query, number, kind in listed
    ]


def _metric_cards(points: Sequence[MetricPoint]) -> list[Values]:
    """A curve for each metric, `FIRST_METRICS` in front."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        curves.setdefault(point.name, []).append((float(point.step), point.value))
    order = [name for name in FIRST_METRICS if name in curves]
    return [
        {
            "name": name,
            "newest": curves[name][-1][1],
            "first": name in order,
            "chart": line_chart(
                [Series(name, curves[name])], width=300, height=120, label=f"{name} by batch"
            ),
        }
        for name in [*order, *sorted(curves.keys() - set(order))]
    ]


# --- tasks ----------------------------------------------------------------------------------


def tasks(reader: Reader, site: Site, query: Query) -> Values:
    """Success, verdicts and mean steps of each task."""
    return header(reader, site, query) | {
        "tasks": _task_rows(reader.counters(), _curve(reader)),
        "instructions": {task: text for (_, task), text in reader.instructions().items()},
    }


def task(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One task: its curve, outcomes and newest groups. Raises UserError for an unknown task."""
    instructions = {task: text for (_, task), text in reader.instructions().items()}
    counters = [row for row in reader.counters() if row.task_id == name]
    if not counters and name not in instructions:
        near = did_you_mean(name, instructions)
        raise UserError(f"no task {name} in this run{near}; the page of tasks lists them")
    curve = _curve(reader).get(name, [])
    groups = reader.newest_groups(task_id=name, limit=NEWEST)
    return header(reader, site, query) | {
        "task_id": name,
        "instruction": instructions.get(name, ""),
        "chart": line_chart(
            [Series(name, _points(curve), "mean")],
            width=900,
            height=220,
            low=0.0,
            high=1.0,
            label=f"success of {name} by policy version",
        ),
        "row": _task_row(name, counters, curve),
        "stages": _stages(counters),
        "drops": _drops(counters),
        "groups": group_rows(reader, groups),
        "pool": len(reader.pool(name)),
    }


def _task_rows(
    counters: Sequence[CountersRow], curve: Mapping[str, Sequence[CurvePoint]]
) -> list[Values]:
    by_task: dict[str, list[CountersRow]] = {}
    for row in counters:
        by_task.setdefault(row.task_id, []).append(row)
    return [_task_row(name, rows, curve.get(name, [])) for name, rows in sorted(by_task.items())]


def _task_row(name: str, counters: Sequence[CountersRow], curve: Sequence[CurvePoint]) -> Values:
    judged = {
        outcome: sum(t.trajectories for t in counters if t.outcome == outcome)
        for outcome in OUTCOMES
    }
    over = judged["pass"] + judged["fail"]
    steps = sum(t.steps for t in counters if t.outcome in ("pass", "fail"))
    return {
        "id": name,
        "judged": judged,
        "success": judged["pass"] / over if over else None,
        "recent": _recent(curve),
        "mean_steps": steps / over if over else None,
        "curve": sparkline(_points(curve), low=0.0, high=1.0, label=f"success of {name}"),
    }


def _recent(curve: Sequence[CurvePoint]) -> float | None:
    """Success over the newest buckets that together hold at least `RECENT` trajectories."""
    passed = judged = 0
    for point in reversed(curve):
        passed, judged = passed + point.passed, judged + point.trajectories
        if judged >= RECENT:
            break
    return passed / judged if judged else None


# --- several runs ---------------------------------------------------------------------------


def run_row(reader: Reader) -> Values:
    """A run in a few numbers, for the list of several."""
    curve = _curve(reader)
    version = reader.newest_version()
    recent = [value for points in curve.values() if (value := _recent(points)) is not None]
    return {
        "curve": sparkline(_mean_curve(curve), low=0.0, high=1.0, label="mean over tasks"),
        "lately": fmean(recent) if recent else None,
        "version": None if version is None else version.policy_version,
        "batches": reader.total("batches"),
        "trajectories": reader.count_trajectories(),
        "begun": begun_at(reader),
        "live": any(time.time() - each.heard_at < LIVE_S for each in reader.processes()),
    }
