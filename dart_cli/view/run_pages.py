"""The pages of a run: each function reads the run and returns the values for a template.

run, tasks, groups, trajectories   the pages of the run, and of lists
task, group, trajectory            the pages of one task, group or trajectory
run_row                            the row of a run in a list of runs
run_of                             the run as the database records it
evaluated_page                     the values that all pages of evaluations share

A page makes a bounded number of queries to a Reader; each is answered from an index, or by one pass over the
ledger without steps and images.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import get_args

from markupsafe import Markup

from bus.error_texts import did_you_mean
from bus.errors import StoreError, UserError
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint, GroupRow, GroupState, RunRow, TrajectoryRow
from dart_cli.evaluation.results import BEFORE, read_evaluation
from dart_cli.inspection import curves
from dart_cli.inspection.axes import Places
from dart_cli.inspection.comparison import read_note
from dart_cli.inspection.run_counts import OUTCOMES, RunCounts, count, counts_of
from dart_cli.inspection.run_lookup import find_subject, nearest, process_ends
from dart_cli.inspection.trajectories import (
    CANCELLED,
    STATES,
    Step,
    TrajectoryFilter,
    read_trajectory,
    subjects_of,
    why_left_out,
)
from dart_cli.inspection.trajectory_history import explain_trajectory
from dart_cli.view import charts
from dart_cli.view.run_charts import (
    SUCCESS,
    RunCurves,
    Scope,
    metric_cards,
    read_curves,
    scope_of,
    success_chart,
)
from dart_cli.view.screenshot_svg import action_marks, heat_marks, image_size, screenshot
from dart_cli.view.site import LIVE_S, ROWS, Query, Site, Values, page_of, page_values

NEWEST = 12
"""Rows of the short lists of a page: the newest verdicts, the newest groups."""
SEARCHED = 500
"""The newest trajectories in which those with a verdict are searched, because others are in play."""
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
_ACTION_WORD = "Action:"


def _page(reader: Reader, site: Site, query: Query, *, reload: bool = True) -> Values:
    """Return the values that all pages of a run share; the browser reloads a page of a live run."""
    now, run = time.time(), run_of(reader)
    silent_s = min((now - process.heard_at for process in reader.processes()), default=None)
    run_id = "not started yet" if run is None else run.id
    place = reader.path.parent
    return page_values(site, query, place, run_id=run_id, silent_s=silent_s, reload=reload)


def evaluated_page(run_dir: Path, site: Site, query: Query) -> Values:
    """Return the values that every page of evaluations shows. The directory need not be a run."""
    if not (run_dir / DATABASE).is_file():
        return page_values(site, query, run_dir)
    with open_reader(run_dir) as reader:
        return _page(reader, site, query, reload=False)


def run_of(reader: Reader) -> RunRow | None:
    """Return the run as the database records it; None if the database holds only a pool."""
    try:
        return reader.run()
    except StoreError:
        return None


# --- the run --------------------------------------------------------------------------------


def run(reader: Reader, site: Site, query: Query) -> Values:
    """Return the values of the run's page: curves, counts, processes, the newest verdicts."""
    scope, counts, now = scope_of(query), count(reader), time.time()
    run_curves = read_curves(reader, scope.axis)
    candidates = reader.trajectories(limit=SEARCHED, but_reason=CANCELLED)
    newest = [row for row in candidates if row.outcome is not None]
    started = run_of(reader)
    config = json.loads(started.config) if started else {}
    return _page(reader, site, query) | {
        "counts": counts,
        "version": reader.newest_version(),
        "disk_bytes": reader.bytes_on_disk(),
        "scope": scope,
        "success_chart": _success_chart(reader, scope, run_curves),
        "tasks": _task_rows(counts, run_curves.success),
        "metrics": metric_cards(scope, [("", "line", run_curves)]),
        "note": read_note(reader.path.parent),
        "newest": subjects_of(reader, newest[: -NEWEST - 1 : -1]),
        "processes": _processes(reader, now),
        "config": config,
        "config_text": json.dumps(config, indent=2),
    }


def _processes(reader: Reader, now: float) -> list[Values]:
    """Return each process with the age of its newest heartbeat and, if that is old, how it ended."""
    rows = reader.processes()
    ends = process_ends(reader, [row for row in rows if now - row.heard_at >= LIVE_S])
    return [
        {"row": row, "silent_s": now - row.heard_at, "end": ends.get(row.worker, "")}
        for row in rows
    ]


def run_row(reader: Reader) -> Values:
    """Return the row of a run in a list of runs: a few numbers."""
    curve, started, version = curves.read_curve(reader), run_of(reader), reader.newest_version()
    mean = [(point.version, point.success) for point in curves.over_tasks(curve)]
    by_task = curves.recent_by_task(curve).values()
    successes = [success for success in by_task if success is not None]
    return {
        "curve": charts.sparkline(mean, "mean over tasks"),
        "lately": fmean(successes) if successes else None,
        "version": None if version is None else version.policy_version,
        "batches": reader.total("batches"),
        "trajectories": reader.count_trajectories(),
        "started_at": started and started.created_at,
        "note": read_note(reader.path.parent),
        "live": any(time.time() - row.heard_at < LIVE_S for row in reader.processes()),
    }


def _success_chart(reader: Reader, scope: Scope, run: RunCurves) -> Markup:
    """Return a chart of the success of all tasks; the tasks that are played most have their own colours."""
    before = read_evaluation(reader.path.parent, BEFORE)
    lines = [line.over(run.places.of_version) for line in curves.success_lines(run.success, before)]
    tasks = [line for line in lines if line.kind == "task"]
    most_played, others = tasks[: charts.TASK_COLOURS], tasks[charts.TASK_COLOURS :]
    coloured = [replace(line, kind=f"t{index}") for index, line in enumerate(most_played)]
    thin = [replace(line, kind="thin") for line in others]
    means = [line for line in lines if line.kind != "task"]
    thin_key = [curves.Series(f"{len(others)} other tasks", [], "thin")] if others else []
    return success_chart(
        scope, [*thin, *coloured, *means], [*means, *coloured, *thin_key], height=300
    )


# --- tasks ----------------------------------------------------------------------------------


def tasks(reader: Reader, site: Site, query: Query) -> Values:
    """Return the values of the list of tasks: success, verdicts and mean steps of each."""
    return _page(reader, site, query) | {
        "tasks": _task_rows(count(reader), curves.read_curve(reader))
    }


def task(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """Return the values of one task: its curve, outcomes and newest groups.

    Raises UserError for an unknown task.
    """
    instructions = {task: text for (_, task), text in reader.instructions().items()}
    counts = count(reader).tasks.get(name)
    if counts is None and name not in instructions:
        near = did_you_mean(name, instructions)
        raise UserError(f"no task {name} in this run{near}; the page of tasks lists its tasks")
    counts = counts or counts_of([])
    scope = scope_of(query)
    places = Places(scope.axis, reader.batches())
    curve = [point for point in curves.read_curve(reader) if point.task_id == name]
    lines = [
        curves.task_line(name, points, "mean").over(places.of_version)
        for points in curves.by_task(curve).values()
    ]
    return _page(reader, site, query) | {
        "task_id": name,
        "instruction": instructions.get(name, ""),
        "scope": scope,
        "chart": scope.chart(lines, SUCCESS, 240, 0.0, 1.0),
        "counts": counts,
        "recent": curves.recent(curve),
        "groups": _with_members(reader, reader.newest_groups(task_id=name, limit=NEWEST)),
        "pool": len(reader.pool(name)),
    }


def _task_rows(counts: RunCounts, curve: Sequence[CurvePoint]) -> list[Values]:
    """Return a row for each task: its counts, its newest success and its curve."""
    rows = []
    points, recent = curves.by_task(curve), curves.recent_by_task(curve)
    for name, task_counts in counts.tasks.items():
        line = [(point.version, point.success) for point in points.get(name, ())]
        rows.append(
            {
                "id": name,
                "counts": task_counts,
                "recent": recent.get(name),
                "curve": charts.sparkline(line, f"success of {name}"),
            }
        )
    return rows


# --- groups ---------------------------------------------------------------------------------


def groups(reader: Reader, site: Site, query: Query) -> Values:
    """Return the values of the list of groups, the newest first, filtered by task and state."""
    task_ids = sorted({task_id for _, task_id in reader.instructions()})
    state, task_id = query.one_of("state", GROUP_STATES), query.one_of("task", task_ids)
    page = page_of(query, reader.count_groups(state=state, task_id=task_id))
    rows = reader.newest_groups(state=state, task_id=task_id, limit=ROWS, offset=page.offset)
    return _page(reader, site, query, reload=False) | {
        "rows": _with_members(reader, rows),
        "page": page,
        "filters": {"state": state, "task": task_id},
        "choices": {"task": task_ids, "state": GROUP_STATES},
    }


def group(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """Return the values of one group and its members. Raises UserError for an unknown group."""
    row = reader.groups_by_id([name]).get(name)
    if row is None:
        raise UserError(f"no group {name} in this run; {nearest(reader, name)}")
    members = reader.trajectories(group_ids=[name])
    finals = _screens(reader, [member.final_screenshot for member in members])
    reload = row.state in ("open", "ready", "batched")
    return _page(reader, site, query, reload=reload) | {
        "row": row,
        "members": [(member, _final(site, finals, member)) for member in members],
        "instruction": reader.instruction(row.suite, row.task_id, [m.id for m in members]),
    }


def _with_members(
    reader: Reader, rows: Sequence[GroupRow]
) -> list[tuple[GroupRow, list[TrajectoryRow]]]:
    """Return the groups, each with its trajectories."""
    members: dict[str, list[TrajectoryRow]] = {row.id: [] for row in rows}
    for member in reader.trajectories(group_ids=list(members)):
        members[member.group_id].append(member)
    return [(row, members[row.id]) for row in rows]


# --- trajectories ---------------------------------------------------------------------------


def trajectories(reader: Reader, site: Site, query: Query) -> Values:
    """Return the values of the list of trajectories, the newest first, with its filters."""
    counts = count(reader)
    choices: dict[str, Sequence[str]] = {
        "task": list(counts.tasks),
        "outcome": OUTCOMES,
        "state": STATES,
        "reason": sorted({row.reason for row in counts.all.states if row.reason}),
    }
    filters: Values = {key: query.one_of(key, words) for key, words in choices.items()}
    filters["version"] = query.whole("version")
    trajectory_filter = TrajectoryFilter(
        task_id=filters["task"],
        outcome=filters["outcome"],
        state=filters["state"],
        reason=filters["reason"],
        version=filters["version"],
    )
    conditions = trajectory_filter.conditions
    page = page_of(query, reader.count_trajectories(**conditions))
    rows = reader.trajectories(**conditions, limit=ROWS, offset=page.offset)
    return _page(reader, site, query, reload=False) | {
        "rows": subjects_of(reader, rows[::-1]),
        "page": page,
        "left_out": trajectory_filter.count_hidden(reader),
        "filters": filters,
        "choices": choices,
    }


def trajectory(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """Return the values of one trajectory: a filmstrip, and its history in the run.

    Raises UserError with a hint on ids that exist for an unknown trajectory.
    """
    subject = find_subject(reader, name)
    details, row, group = read_trajectory(reader, subject), subject.trajectory, subject.group
    rows = [] if group is None else reader.trajectories(group_ids=[group.id])
    members = [member.id for member in rows]
    place = members.index(subject.id) if subject.id in members else -1
    versions = sorted({version for step in details.steps for version in step.versions})
    colours = {
        version: f"v{index % charts.VERSION_COLOURS}" for index, version in enumerate(versions)
    }
    screens = _screens(
        reader,
        [*(step.screenshot for step in details.steps), row.final_screenshot if row else None],
    )
    reload = row is not None and row.state not in ("trained", "dropped")
    return _page(reader, site, query, reload=reload) | {
        "details": details,
        "subject": subject,
        "row": row,
        "before": members[place - 1] if place > 0 else None,
        "after": members[place + 1] if 0 <= place < len(members) - 1 else None,
        "frames": [_frame(site, step, screens, colours) for step in details.steps],
        "final": _final(site, screens, row) if row else "",
        "history": explain_trajectory(reader, details),
        "why_left_out": why_left_out,
    }


_Sizes = Mapping[str, tuple[int, int]]


def _screens(reader: Reader, keys: Iterable[str | None]) -> _Sizes:
    """Return content hash -> width and height, for each image that exists and can be shown."""
    images = reader.screenshots(filter(None, keys))
    sizes = {key: image_size(image) for key, image in images.items()}
    return {key: size for key, size in sizes.items() if size is not None}


def _final(site: Site, screens: _Sizes, row: TrajectoryRow) -> Markup:
    """Return the screen after the last action; empty if there is none."""
    key = row.final_screenshot or ""
    if key not in screens:
        return Markup("")
    alt = "screen after the last action"
    return screenshot(site.picture(key, *screens[key]), *screens[key], alt=alt)


def _frame(site: Site, step: Step, screens: _Sizes, colours: Mapping[int, str]) -> Values:
    """Return the values of a step: its screen, its text, and its tokens as bars coloured by version."""
    kinds = ["v0"] * len(step.sampled.token_ids)
    for span in step.spans:
        kinds[span.start : span.end] = [colours.get(span.version, "v0")] * (span.end - span.start)
    thought, action_word, rest = step.text.rpartition(_ACTION_WORD)
    size = screens.get(step.screenshot)
    picture, candidates = Markup(""), []
    if size is not None:
        over = heat_marks(step.pointed, *size) + action_marks(step.actions, size[0])
        alt = f"screen before step {step.step}"
        picture = screenshot(site.picture(step.screenshot, *size), *size, over, alt)
        candidates = [
            (number, int(place.x * size[0]), int(place.y * size[1]), place.score)
            for pointer_map in step.pointed
            for number, place in enumerate(pointer_map.candidates, 1)
        ]
    return {
        "step": step,
        "picture": picture,
        "candidates": candidates,
        "thought": thought.strip() if action_word else "",
        "action_text": f"{action_word} {rest.strip()}".strip(),
        "kinds": [colours.get(span.version, "v0") for span in step.spans],
        "bars": _bars(step.sampled.behaviour_logprobs, kinds, "log-probability of each token, nats")
        + _bars(step.sampled.entropies, kinds, "entropy of each token, nats"),
    }


def _bars(values: Sequence[float], kinds: Sequence[str], label: str) -> Markup:
    return charts.token_bars(values, kinds[: len(values)], label=label)
