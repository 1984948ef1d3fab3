"""The page that compares runs of a folder: common charts, the settings that differ, tasks, notes.

compare       the values of the page: the runs that a query names, or the form to choose some
ComparedRun   one of these runs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bus.errors import DartError, UserError
from dart_cli.data.store.open import open_reader
from dart_cli.inspection.comparison import read_note, settings_that_differ
from dart_cli.inspection.curves import Series, by_task, over_tasks, recent_by_task
from dart_cli.view.charts import TASK_COLOURS
from dart_cli.view.run_charts import (
    RunCurves,
    Scope,
    metric_cards,
    read_curves,
    scope_of,
    success_chart,
)
from dart_cli.view.run_pages import run_of, run_row
from dart_cli.view.site import Query, QueryError, Values

MOST_COMPARED = TASK_COLOURS
"""Runs that are compared, at most, so that each line has another colour."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs of the page."""

    name: str
    kind: str  # class of its lines in view.css
    row: Values  # its row in the list of runs
    curves: RunCurves
    config: Mapping[str, Any]
    note: str

    @property
    def lately(self) -> dict[str, float | None]:
        """Task id -> success over the newest trajectories of the task."""
        return recent_by_task(self.curves.success)

    def line(self, task: str | None) -> Series:
        """Return the success of a task, or the mean over tasks, with its interval."""
        points = self.curves.success
        if task is None:
            line = over_tasks(points)
        else:
            line = by_task(point for point in points if point.task_id == task).get(task, [])
        return Series(
            name=f"{self.name}, n {sum(point.episodes for point in line):,}",
            points=[
                (self.curves.places.of_version(point.version), point.success) for point in line
            ],
            kind=self.kind,
            band=[(point.low, point.high) for point in line],
            short=self.name,
        )


def compare(folder: Sequence[Path], query: Query) -> Values:
    """Return the values of the page that compares the runs that the query names.

    Raises QueryError for an invalid query, UserError for an unknown task.
    """
    scope = scope_of(query)
    names = query.several("run", [path.name for path in folder], MOST_COMPARED)
    runs: list[ComparedRun] = []
    faults = {}
    for path in (path for path in folder if path.name in names):
        try:
            runs.append(_read(path, scope, f"t{len(runs)}"))
        except DartError as error:
            faults[path.name] = str(error)
    tasks = sorted({point.task_id for run in runs for point in run.curves.success})
    task = _task_of(query, tasks) if runs else None
    lately = [run.lately for run in runs]
    return {
        "all_runs": [path.name for path in folder],
        "names": names,
        "runs": runs,
        "faults": faults,
        "scope": scope,
        "whole": query.address(**{"from": "", "to": ""}),
        "choices": {"task": tasks},
        "task": task,
        "success_chart": _success_chart(scope, runs, task),
        "metrics": metric_cards(scope, [(run.name, run.kind, run.curves) for run in runs]),
        "settings": settings_that_differ([run.config for run in runs]),
        "tasks": [(name, [success.get(name) for success in lately]) for name in tasks],
    }


def _task_of(query: Query, tasks: Sequence[str]) -> str | None:
    """Return the task that the query names, None without one. Raises UserError for an unknown task."""
    try:
        return query.one_of("task", tasks)
    except QueryError as error:
        raise UserError(str(error)) from None


def _read(path: Path, scope: Scope, kind: str) -> ComparedRun:
    """Read the parts of a run that are compared. Raises DartError if it cannot be read."""
    with open_reader(path) as reader:
        row = run_of(reader)
        return ComparedRun(
            name=path.name,
            kind=kind,
            row=run_row(reader),
            curves=read_curves(reader, scope.axis),
            config=json.loads(row.config) if row else {},
            note=read_note(path),
        )


def _success_chart(scope: Scope, runs: Sequence[ComparedRun], task: str | None) -> Markup:
    """Return a chart of the success of all runs: of a task, or of the mean over tasks."""
    lines = [run.line(task) for run in runs]
    return success_chart(scope, lines, lines, 300)
