"""The page that compares runs of a folder: common charts, the settings that differ, tasks, notes.

compare   the runs that a query names, or the form that chooses some
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import DartError
from dart_cli.data.store.open import open_reader
from dart_cli.inspection import curves
from dart_cli.inspection.comparison import read_note, settings_that_differ
from dart_cli.view.charts import TASK_COLOURS
from dart_cli.view.run_charts import (
    RunCurves,
    Scope,
    metric_cards,
    read_curves,
    scope_of,
    success_chart,
)
from dart_cli.view.run_pages import run_row, started
from dart_cli.view.site import Query, Values

MOST_COMPARED = TASK_COLOURS
"""So that each has a line of its own."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs of the page."""

    name: str
    kind: str  # class of its lines in view.css
    row: Values  # as in the list of runs
    drawn: RunCurves
    config: Mapping[str, Any]
    note: str

    @property
    def lately(self) -> dict[str, float | None]:
        """Task -> success over its newest trajectories."""
        return {
            name: curves.recent([each for each in self.drawn.success if each.task_id == name])
            for name in {each.task_id for each in self.drawn.success}
        }

    def line(self, task: str | None) -> curves.Series:
        """Return success of a task, or the mean over tasks, with its interval."""
        points = self.drawn.success
        if task is None:
            mean = curves.over_tasks(points)
        else:
            mean = curves.by_task(each for each in points if each.task_id == task).get(task, [])
        return curves.Series(
            f"{self.name}, n {sum(each.episodes for each in mean):,}",
            [(self.drawn.places.of_version(each.version), each.success) for each in mean],
            self.kind,
            [(each.low, each.high) for each in mean],
            self.name,
        )


def compare(runs: Sequence[Path], query: Query) -> Values:
    """Return the runs of a folder that the query names, side by side. Raises QueryError."""
    scope = scope_of(query)
    names = query.several("run", [run.name for run in runs], MOST_COMPARED)
    chosen: list[ComparedRun] = []
    faults = {}
    for run in (run for run in runs if run.name in names):
        try:
            chosen.append(_read(run, scope, f"t{len(chosen)}"))
        except DartError as error:
            faults[run.name] = str(error)
    tasks = sorted({each.task_id for run in chosen for each in run.drawn.success})
    task = query.one_of("task", tasks) if chosen else None
    return {
        "all_runs": [run.name for run in runs],
        "names": names,
        "chosen": chosen,
        "faults": faults,
        "scope": scope,
        "whole": query.address(**{"from": "", "to": ""}),
        "choices": {"task": tasks},
        "asked": {"task": task},
        "success_chart": _success(scope, chosen, task),
        "metrics": metric_cards(scope, [(run.name, run.kind, run.drawn) for run in chosen]),
        "settings": settings_that_differ([run.config for run in chosen]),
        "tasks": [(name, [run.lately.get(name) for run in chosen]) for name in tasks],
    }


def _read(run: Path, scope: Scope, kind: str) -> ComparedRun:
    """Return what is compared of a run. Raises DartError where it cannot be read."""
    with open_reader(run) as reader:
        begun = started(reader)
        return ComparedRun(
            name=run.name,
            kind=kind,
            row=run_row(reader),
            drawn=read_curves(reader, scope.axis),
            config=json.loads(begun.config) if begun else {},
            note=read_note(run),
        )


def _success(scope: Scope, runs: Sequence[ComparedRun], task: str | None) -> Any:
    lines = [run.line(task) for run in runs]
    return success_chart(scope, lines, lines, 300)
