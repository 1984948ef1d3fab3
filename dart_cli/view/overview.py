"""Pages that count and average: the run, its tasks, one task.

run, tasks, task    a page each
run_row             a run in the list of several
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean

from bus.errors import UserError
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CountersRow, CurvePoint, MetricPoint
from dart_cli.inspection.ls import CANCELLED, STATES
from dart_cli.inspection.stats import reward_of_counted, success_of
from dart_cli.view.charts import MOST_POINTS, Series, bar, line_chart
from dart_cli.view.header import LIVE_S, Values, begun_at, config_of, header
from dart_cli.view.query import Query
from dart_cli.view.records import OUTCOMES, group_rows, with_groups
from dart_cli.view.site import Site
from dart_cli.view.success import curve_of, recent, run_chart, run_spark, task_chart, task_spark
from envs.own_code import did_you_mean

NEWEST = 12
LOOKED_AT = 500
"""The newest trajectories, among which those with a verdict are searched; the others are in play."""

FIRST_METRICS = (  # shown first, as far as the trainer sends them
    *("loss", "reward", "entropy", "mismatch_kl", "reference_kl", "ess"),
    *("replay_ess", "replay_gradient_agreement", "grad_norm", "lr"),
    *("staleness_mean", "tokens", "step_s", "waiting_s"),
)

# --- the run --------------------------------------------------------------------------------


def run(reader: Reader, site: Site, query: Query) -> Values:
    """Curves, trajectories by state, reasons of drops, processes, the newest verdicts."""
    counters = reader.counters()
    curve = curve_of(reader)
    judged = reader.trajectories(limit=LOOKED_AT, but_reason=CANCELLED)
    newest = [row for row in judged if row.outcome is not None]
    return header(reader, site, query) | {
        "facts": _facts(reader, counters),
        "success_chart": run_chart(reader, curve),
        "tasks": _task_rows(counters, curve),
        "stages": _stages(counters),
        "drops": _drops(counters),
        "metrics": _metric_cards(reader.metric_curves(MOST_POINTS)),
        "newest": with_groups(reader, newest[: -NEWEST - 1 : -1]),
    }


def _facts(reader: Reader, counters: Sequence[CountersRow]) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    version = reader.newest_version()
    judged = _judged(counters)
    config = config_of(reader)
    batches = reader.total("batches")
    train = config.get("train", {})
    updates, budget = train.get("updates"), train.get("max_trajectories")
    success, reward = success_of(counters), reward_of_counted(counters)
    return [
        ("weights", "none yet" if version is None else f"v{version.policy_version}"),
        ("batches", f"{batches}" + (f" of {updates}" if updates else "")),
        *([("updates on a batch again", again)] if (again := _replays(reader)) else []),
        (
            "trajectories",
            f"{sum(t.trajectories for t in counters)}" + (f" of {budget}" if budget else ""),
        ),
        ("steps", f"{sum(t.steps for t in counters)}"),
        ("success so far", "-" if success is None else f"{success:.2f}"),
        *([("mean reward", f"{reward:.2f}")] if reward is not None and reward != success else []),
        ("invalid", f"{judged['invalid']}"),
        *([("cancelled", f"{cancelled}")] if (cancelled := _cancelled(counters)) else []),
        ("on disk", f"{reader.bytes_on_disk() / 2**20:.1f} MiB"),
    ]


def _replays(reader: Reader) -> str:
    """How many updates trained on a batch again, and why others were not; empty without any."""
    counts = reader.replay_counts()
    if not (counts.replays or counts.refused):
        return ""
    return "; ".join(filter(None, [f"{counts.replays}", counts.refused_words]))


def _judged(counters: Sequence[CountersRow]) -> dict[str, int]:
    """Trajectories by outcome; one that the run's end cancelled tells nothing about its environment."""
    return {
        outcome: sum(row.trajectories for row in counters if row.verdict == outcome)
        for outcome in OUTCOMES
    }


def _cancelled(counters: Sequence[CountersRow]) -> int:
    return sum(row.trajectories for row in counters if row.reason == "cancelled")


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
        "tasks": _task_rows(reader.counters(), curve_of(reader)),
        "instructions": {task: text for (_, task), text in reader.instructions().items()},
    }


def task(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One task: its curve, outcomes and newest groups. Raises UserError for an unknown task."""
    instructions = {task: text for (_, task), text in reader.instructions().items()}
    counters = [row for row in reader.counters() if row.task_id == name]
    if not counters and name not in instructions:
        near = did_you_mean(name, instructions)
        raise UserError(f"no task {name} in this run{near}; the page of tasks lists them")
    curve = [point for point in curve_of(reader) if point.task_id == name]
    groups = reader.newest_groups(task_id=name, limit=NEWEST)
    return header(reader, site, query) | {
        "task_id": name,
        "instruction": instructions.get(name, ""),
        "chart": task_chart(name, curve),
        "row": _task_row(name, counters, curve),
        "stages": _stages(counters),
        "drops": _drops(counters),
        "groups": group_rows(reader, groups),
        "pool": len(reader.pool(name)),
    }


def _task_rows(counters: Sequence[CountersRow], curve: Sequence[CurvePoint]) -> list[Values]:
    rows: dict[str, list[CountersRow]] = {}
    for row in counters:
        rows.setdefault(row.task_id, []).append(row)
    points: dict[str, list[CurvePoint]] = {name: [] for name in rows}
    for point in curve:
        points[point.task_id].append(point)
    return [_task_row(name, rows[name], points[name]) for name in sorted(rows)]


def _task_row(name: str, counters: Sequence[CountersRow], curve: Sequence[CurvePoint]) -> Values:
    judged = _judged(counters)
    over = judged["pass"] + judged["fail"]
    steps = sum(t.steps for t in counters if t.outcome in ("pass", "fail"))
    return {
        "id": name,
        "judged": judged,
        "success": success_of(counters),
        "mean_reward": reward_of_counted(counters),
        "recent": recent(curve),
        "mean_steps": steps / over if over else None,
        "curve": task_spark(name, curve),
    }


# --- several runs ---------------------------------------------------------------------------


def run_row(reader: Reader) -> Values:
    """A run in a few numbers, for the list of several."""
    curve = curve_of(reader)
    version = reader.newest_version()
    tasks = {point.task_id for point in curve}
    lately = [recent([point for point in curve if point.task_id == name]) for name in tasks]
    known = [value for value in lately if value is not None]
    return {
        "curve": run_spark(curve),
        "lately": fmean(known) if known else None,
        "version": None if version is None else version.policy_version,
        "batches": reader.total("batches"),
        "trajectories": reader.count_trajectories(),
        "begun": begun_at(reader),
        "live": any(time.time() - each.heard_at < LIVE_S for each in reader.processes()),
    }
