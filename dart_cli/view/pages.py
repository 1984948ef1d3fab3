"""What each page shows: rows of the database -> values for its template.

    run, tasks, task, groups, group, trajectories, trajectory   a page each
    run_row       a run in the list of several
    Query         the words behind the `?` of an address, checked
    Page          which part of a long list

A page is a function of a Reader and asks it a bounded number of queries, each of which is answered
from an index or by one pass over the ledger without steps and images.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any, Literal, TypeVar, get_args

from bus.errors import StoreError, UserError
from bus.messages import Outcome
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import (
    CountersRow,
    CurvePoint,
    GroupRow,
    GroupState,
    MetricPoint,
    ProcessRow,
    TrajectoryRow,
)
from dart_cli.inspection.explain import explain_trajectory
from dart_cli.inspection.find import find_subject
from dart_cli.inspection.ls import STATES
from dart_cli.view import film
from dart_cli.view.charts import MOST_POINTS, Series, bar, line_chart, sparkline
from dart_cli.view.site import Site
from envs.registry import did_you_mean

Values = dict[str, Any]
PageOf = Callable[[Reader, Site, "Query"], Values]

ROWS = 50
"""Rows of a long list on one page."""
LIVE_S = 20.0
"""A process was heard of this lately: the run is live. `dart data` notes it every 5 s."""
REFRESH_S = 5
"""A page of a live run is loaded again after so long."""
CURVE_BUCKETS = 40
NEWEST = 12
LOOKED_AT = 500
"""Trajectories among which the newest with a verdict are looked for; the others are in play."""
RECENT = 32
"""Trajectories of a task, at least, that its success "lately" is of."""

GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
FIRST_METRICS = (  # what is looked at first, as far as the trainer sends them
    *("loss", "reward", "entropy", "mismatch_kl", "reference_kl", "ess", "grad_norm", "lr"),
    *("staleness_mean", "tokens", "step_s", "waiting_s"),
)

_Word = TypeVar("_Word", bound=str)


class QueryError(UserError):
    """The part of an address behind `?` asks for nothing that exists; the message says what does."""


class Query:
    """The words behind the `?` of an address."""

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        self._words = {key: value for key, value in (words or {}).items() if value}

    def word(self, name: str) -> str | None:
        """What was asked for, or None."""
        return self._words.get(name)

    def one_of(self, name: str, known: Sequence[_Word]) -> _Word | None:
        """One of the known words, or None. Raises QueryError."""
        asked = self._words.get(name)
        for each in known:
            if each == asked:
                return each
        if asked is None:
            return None
        raise QueryError(
            f"{name}={asked}: there is no such {name}{did_you_mean(asked, known)}; "
            f"want one of {', '.join(known)}"
        )

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """A whole number, or None. Raises QueryError."""
        asked = self._words.get(name)
        if asked is None:
            return None
        if not (asked.isascii() and asked.isdigit() and len(asked) < 16 and int(asked) >= least):
            raise QueryError(f"{name}={asked}: want a whole number from {least} on")
        return int(asked)


@dataclass(frozen=True)
class Page:
    """Part of a list of `total` rows, the newest first."""

    number: int  # from 1
    total: int

    @property
    def pages(self) -> int:
        """How many there are."""
        return max(1, ceil(self.total / ROWS))

    @property
    def offset(self) -> int:
        """Rows on the pages before."""
        return (self.number - 1) * ROWS

    @property
    def last(self) -> int:
        """Number of the last row on it."""
        return min(self.total, self.offset + ROWS)


def _page(query: Query, total: int) -> Page:
    page = Page(query.whole("page", least=1) or 1, total)
    if page.number > page.pages:
        raise QueryError(f"page={page.number}: the last page is {page.pages}")
    return page


# --- the run --------------------------------------------------------------------------------


def run(reader: Reader, site: Site, query: Query) -> Values:
    """Curves, stages, reasons of drops, processes, what is newest."""
    tallies = reader.tallies()
    curve = _curve(reader)
    newest = [row for row in reader.trajectories(limit=LOOKED_AT) if row.outcome is not None]
    return _common(reader, site, query) | {
        "facts": _facts(reader, tallies),
        "success_chart": _success_chart(curve),
        "tasks": _task_rows(tallies, curve),
        "stages": _stages(tallies),
        "drops": _drops(tallies),
        "metrics": _metric_cards(reader.metric_curves(MOST_POINTS)),
        "newest": _with_groups(reader, newest[: -NEWEST - 1 : -1]),
    }


def _facts(reader: Reader, tallies: Sequence[CountersRow]) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    version = reader.newest_version()
    judged = {
        outcome: sum(t.trajectories for t in tallies if t.outcome == outcome)
        for outcome in OUTCOMES
    }
    config = _config(reader)
    batches = reader.total("batches")
    updates = config.get("train", {}).get("updates")
    over = judged["pass"] + judged["fail"]
    return [
        ("weights", "none yet" if version is None else f"v{version.policy_version}"),
        ("batches", f"{batches}" + (f" of {updates}" if updates else "")),
        ("trajectories", f"{sum(t.trajectories for t in tallies)}"),
        ("steps", f"{sum(t.steps for t in tallies)}"),
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


def _stages(tallies: Sequence[CountersRow]) -> list[Values]:
    """How many trajectories are in which state, in the order of a life."""
    return _shares(
        (state, {"state": state}, sum(t.trajectories for t in tallies if t.state == state), state)
        for state in STATES
    )


def _drops(tallies: Sequence[CountersRow]) -> list[Values]:
    """Why trajectories were dropped, the most frequent reason first."""
    counts: dict[str, int] = {}
    for tally in tallies:
        if tally.state == "dropped":
            counts[tally.reason] = counts.get(tally.reason, 0) + tally.trajectories
    return _shares(
        (reason, {"state": "dropped", "reason": reason}, number, "dropped")
        for reason, number in sorted(counts.items(), key=lambda item: -item[1])
    )


def _shares(rows: Iterable[tuple[str, Values, int, str]]) -> list[Values]:
    """Counts with bars: (name, what the list is asked for, number, class)."""
    listed = list(rows)
    whole = sum(number for *_, number, _ in listed) or 1
    return [
        {"name": name, "query": query, "number": number, "bar": bar(number / whole, kind)}
        for name, query, number, kind in listed
    ]


def _metric_cards(points: Sequence[MetricPoint]) -> list[Values]:
    """A curve for each metric, those one looks at first in front."""
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
    """How each task fares."""
    return _common(reader, site, query) | {
        "tasks": _task_rows(reader.tallies(), _curve(reader)),
        "instructions": {task: text for (_, task), text in reader.instructions().items()},
    }


def task(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One task: its curve, fates and newest groups. Raises UserError where there is none."""
    instructions = {task: text for (_, task), text in reader.instructions().items()}
    tallies = [tally for tally in reader.tallies() if tally.task_id == name]
    if not tallies and name not in instructions:
        near = did_you_mean(name, instructions)
        raise UserError(f"no task {name} in this run{near}; the page of tasks lists them")
    curve = _curve(reader).get(name, [])
    groups = reader.newest_groups(task_id=name, limit=NEWEST)
    return _common(reader, site, query) | {
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
        "row": _task_row(name, tallies, curve),
        "stages": _stages(tallies),
        "drops": _drops(tallies),
        "groups": _group_rows(reader, groups),
        "pool": len(reader.pool(name)),
    }


def _task_rows(
    tallies: Sequence[CountersRow], curve: Mapping[str, Sequence[CurvePoint]]
) -> list[Values]:
    by_task: dict[str, list[CountersRow]] = {}
    for tally in tallies:
        by_task.setdefault(tally.task_id, []).append(tally)
    return [_task_row(name, rows, curve.get(name, [])) for name, rows in sorted(by_task.items())]


def _task_row(name: str, tallies: Sequence[CountersRow], curve: Sequence[CurvePoint]) -> Values:
    judged = {
        outcome: sum(t.trajectories for t in tallies if t.outcome == outcome)
        for outcome in OUTCOMES
    }
    over = judged["pass"] + judged["fail"]
    steps = sum(t.steps for t in tallies if t.outcome in ("pass", "fail"))
    return {
        "id": name,
        "judged": judged,
        "success": judged["pass"] / over if over else None,
        "recent": _recent(curve),
        "mean_steps": steps / over if over else None,
        "curve": sparkline(_points(curve), low=0.0, high=1.0, label=f"success of {name}"),
    }


def _recent(curve: Sequence[CurvePoint]) -> float | None:
    """Success over the newest buckets that hold `RECENT` trajectories together."""
    passed = judged = 0
    for point in reversed(curve):
        passed, judged = passed + point.passed, judged + point.trajectories
        if judged >= RECENT:
            break
    return passed / judged if judged else None


# --- groups ---------------------------------------------------------------------------------


def groups(reader: Reader, site: Site, query: Query) -> Values:
    """Groups, the newest first; by task and state."""
    state = query.one_of("state", GROUP_STATES)
    task_id = query.one_of("task", _task_ids(reader))
    page = _page(query, reader.count_groups(state=state, task_id=task_id))
    rows = reader.newest_groups(state=state, task_id=task_id, limit=ROWS, offset=page.offset)
    return _common(reader, site, query, is_list=True) | {
        "rows": _group_rows(reader, rows),
        "page": page,
        "asked": {"state": state, "task": task_id},
        "choices": {"task": _task_ids(reader), "state": GROUP_STATES},
    }


def group(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One group and its members side by side. Raises UserError where there is none."""
    row = reader.groups_by_id([name]).get(name)
    if row is None:
        newest = reader.newest_group()
        cure = (
            f"its groups go from g000001 to g{newest:06d}" if newest else "no group was opened yet"
        )
        raise UserError(f"no group {name} in this run; {cure}")
    members = reader.trajectories(group_ids=[name])
    finals = [member.final_screenshot for member in members if member.final_screenshot]
    return _common(reader, site, query, live=row.state in ("open", "ready", "batched")) | {
        "row": row,
        "members": members,
        "screens": film.screens(reader, site, finals),
        "instruction": reader.instruction(row.suite, row.task_id, [m.id for m in members]),
    }


def _group_rows(reader: Reader, rows: Sequence[GroupRow]) -> list[Values]:
    """Groups with the verdicts of their members."""
    members: dict[str, list[TrajectoryRow]] = {row.id: [] for row in rows}
    for member in reader.trajectories(group_ids=list(members)):
        members[member.group_id].append(member)
    return [{"row": row, "members": members[row.id]} for row in rows]


# --- trajectories ---------------------------------------------------------------------------


def trajectories(reader: Reader, site: Site, query: Query) -> Values:
    """Trajectories, the newest first; by task, verdict, state, reason and version."""
    tallies = reader.tallies()
    reasons = sorted({tally.reason for tally in tallies if tally.reason})
    task_ids = sorted({tally.task_id for tally in tallies})
    wanted: Values = {
        "task_id": query.one_of("task", task_ids),
        "outcome": query.one_of("outcome", OUTCOMES),
        "state": query.one_of("state", STATES),
        "reason": query.one_of("reason", reasons),
        "version": query.whole("version"),
    }
    page = _page(query, reader.count_trajectories(**wanted))
    rows = reader.trajectories(**wanted, limit=ROWS, offset=page.offset)
    return _common(reader, site, query, is_list=True) | {
        "rows": _with_groups(reader, rows[::-1]),
        "page": page,
        "asked": {"task": wanted["task_id"], **{k: wanted[k] for k in list(wanted)[1:]}},
        "choices": {"task": task_ids, "outcome": OUTCOMES, "state": STATES, "reason": reasons},
    }


def trajectory(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One trajectory as a filmstrip, with all that became of it.

    Raises UserError with the nearest id where there is none.
    """
    subject = find_subject(reader, name)
    row, group = subject.trajectory, subject.group
    members = [] if group is None else [m.id for m in reader.trajectories(group_ids=[group.id])]
    place = members.index(subject.id) if subject.id in members else -1
    live = row is not None and row.state not in ("trained", "dropped")
    return _common(reader, site, query, live=live) | {
        "subject": subject,
        "row": row,
        "group": group,
        "before": members[place - 1] if place > 0 else None,
        "after": members[place + 1] if 0 <= place < len(members) - 1 else None,
        "instruction": reader.instruction(subject.suite, subject.task_id, [subject.id]),
        "frames": film.frames(
            reader, site, reader.steps(subject.id), reader.sample_rows(subject.id)
        ),
        "final": film.final_screen(reader, site, row),
        "story": explain_trajectory(reader, subject),
    }


def _with_groups(reader: Reader, rows: Sequence[TrajectoryRow]) -> list[Values]:
    """Trajectories with their tasks; a group is filed before its members."""
    found = reader.groups_by_id(row.group_id for row in rows)
    return [{"row": row, "group": found[row.group_id]} for row in rows]


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
        "begun": _begun_at(reader),
        "live": any(time.time() - each.heard_at < LIVE_S for each in reader.processes()),
    }


# --- what all pages show --------------------------------------------------------------------


def _common(
    reader: Reader, site: Site, query: Query, *, is_list: bool = False, live: bool = True
) -> Values:
    """Header of a page: the run, who lives, whether the page is loaded again."""
    heard = reader.processes()
    now = time.time()
    alive = [process for process in heard if now - process.heard_at < LIVE_S]
    paused = query.one_of("live", ("off",)) is not None
    return {
        "run_dir": str(reader.path.parent),
        "run_id": _run_id(reader),
        "config": json.dumps(_config(reader), indent=2),
        "processes": [_process(process, now) for process in heard],
        "is_live": bool(alive),
        "silent_s": min((now - process.heard_at for process in heard), default=None),
        "refresh_s": REFRESH_S
        if alive and live and not (paused or is_list or site.exported)
        else 0,
        "paused": paused,
        "made_at": now,
    }


def _process(row: ProcessRow, now: float) -> Values:
    return {"row": row, "silent_s": now - row.heard_at, "alive": now - row.heard_at < LIVE_S}


def _begun_at(reader: Reader) -> float | None:
    try:
        return reader.run().created_at
    except StoreError:  # never started: nothing but a pool
        return None


def _run_id(reader: Reader) -> str:
    try:
        return reader.run().id
    except StoreError:  # never started: nothing but a pool
        return "not started yet"


def _config(reader: Reader) -> Values:
    """The configuration of the newest start; empty before the first."""
    try:
        found = json.loads(reader.run().config)
    except StoreError:
        return {}
    return found if isinstance(found, dict) else {}


def _task_ids(reader: Reader) -> list[str]:
    return sorted({task_id for _, task_id in reader.instructions()})


PageKind = Literal["run", "tasks", "groups", "trajectories"]
LISTS: dict[PageKind, PageOf] = {
    "run": run,
    "tasks": tasks,
    "groups": groups,
    "trajectories": trajectories,
}
ITEMS: dict[str, Callable[[Reader, Site, Query, str], Values]] = {
    "tasks": task,
    "groups": group,
    "trajectories": trajectory,
}
