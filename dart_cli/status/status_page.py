"""The page of a run, whole or as much of it as fits the window.

StatusPage   the page that `dart status` and `dart up` show

The sections stand in the order of their importance: progress, problems, success by task, processes, settings
that differ, training, throughput, pipeline, utilisation, weights, judges. The last ones are left out first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from bus.snapshot import Snapshot
from dart_cli.status.judges import judge_lines
from dart_cli.status.process_sections import SYNC_COLUMNS, processes, utilisation, weights_taken
from dart_cli.status.run_sections import (
    TASK_COLUMNS,
    header,
    pipeline,
    problems,
    task_results,
    throughput,
    training,
)
from dart_cli.status.window_fit import Lines, Section, fit, narrowed, whole

LOAD_WIDTH = 80
"""Columns of a window from which on the load of the processes is shown."""
_LEAST_ROWS = 3
"""Rows that a table keeps at least when it is cut."""
_CURVES = (30, 20, 10)
"""Points of a task's curve that are tried in turn until the table fits the width."""


class StatusPage:
    """A page of a snapshot, which rich can print. With `is_live` it is no higher than the window."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        is_live: bool = False,
        is_old: bool = False,
        above: Sequence[RenderableType] = (),
        below: Sequence[RenderableType] = (),
    ) -> None:
        """Make a page. `is_old` says that the data service has not answered since the snapshot.

        `above` and `below` are always shown whole.
        """
        self._snapshot = snapshot
        self._is_live = is_live
        self._top = [*above, header(snapshot, is_old=is_old)]
        self._below = below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the page."""
        options = options.update(height=None)  # a panel would fill the height of the window

        def lines(part: RenderableType) -> Lines:
            return console.render_lines(part, options, pad=False)

        top = [line for part in self._top for line in lines(part)]
        below = [line for part in self._below for line in lines(part)]
        room = options.size.height - len(top) - len(below) if self._is_live else None
        draw = cache(lambda section, rows: lines(section.draw(rows)))
        sections = _sections(self._snapshot, console, options)
        # The note names what is left out, and has lines itself: repeat until everything fits.
        note_lines = 0
        while True:
            fitted = fit(sections, None if room is None else room - note_lines, draw)
            left_out = [*fitted.lacking, *fitted.missing]
            note = lines(_note(left_out, is_live=self._is_live)) if left_out else []
            if len(note) <= note_lines or room is None:
                break
            note_lines = len(note)
        for line in (*top, *fitted.lines, *note, *below):
            yield from line
            yield Segment.line()


def _note(left_out: Sequence[str], *, is_live: bool) -> Text:
    """Return a line that names the parts that a page lacks, and says where they are shown."""
    where = "a larger window, dart status --once or dart view shows it"
    text = f"left out: {', '.join(left_out)}; {where if is_live else 'a wider window shows it'}"
    return Text(text, "bright_black")


def _sections(snapshot: Snapshot, console: Console, options: ConsoleOptions) -> list[Section]:
    """Return the sections of the page, the most important one first."""
    texts = problems(snapshot)
    sections = [_attention(texts)] if texts else []
    if snapshot.tasks:
        sections.append(_tasks(snapshot, console, options))
    if snapshot.processes:
        slim = _processes(snapshot, has_load=False)
        has_room = options.max_width >= LOAD_WIDTH
        sections.append(
            replace(_processes(snapshot, has_load=True), slim=slim) if has_room else slim
        )
    if snapshot.settings:
        lines = [Text(line, "yellow") for line in snapshot.settings]
        sections.append(whole("settings that differ", Group(*lines)))
    sections.append(_numbers(snapshot))
    if snapshot.usage:
        sections.append(whole("utilisation", utilisation(snapshot)))
    if snapshot.syncs:
        table, lacking = narrowed(partial(weights_taken, snapshot), SYNC_COLUMNS, console, options)
        sections.append(whole("weights taken", table, lacking))
    if judge_texts := [Text(line) for judge in snapshot.judges for line in judge_lines(judge)]:
        sections.append(whole("judges", Group(*judge_texts)))
    return sections


def _attention(texts: Sequence[str]) -> Section:
    """Return the section of the problems, which may be cut to the first ones."""

    def draw(rows: int) -> Panel:
        return Panel("\n".join(texts[:rows]), title="needs attention", style="red", box=box.ROUNDED)

    return Section(draw=draw, missing=_missing("problems", len(texts)), rows=len(texts))


def _tasks(snapshot: Snapshot, console: Console, options: ConsoleOptions) -> Section:
    """Return the section of the tasks, with curves as long as the width allows."""
    for points in _CURVES:
        build = partial(task_results, snapshot, points=points)
        _, lacking = narrowed(build, TASK_COLUMNS, console, options)
        if not lacking:
            break
    count = len(snapshot.tasks)
    return Section(
        draw=lambda rows: build(frozenset(lacking), rows),
        missing=_missing("tasks", count),
        rows=count,
        least=min(_LEAST_ROWS, count),
        lacking=lacking,
    )


def _processes(snapshot: Snapshot, *, has_load: bool) -> Section:
    """Return the section of the processes, with or without their load."""
    count = len(snapshot.processes)
    return Section(
        draw=lambda rows: processes(snapshot, rows, has_load=has_load),
        missing=_missing("processes", count),
        rows=count,
        least=min(_LEAST_ROWS, count),
        lacking=() if has_load else ("load",),
    )


def _numbers(snapshot: Snapshot) -> Section:
    """Return a section of three tables of names and numbers, side by side if the width allows it."""
    tables = {
        "training": training(snapshot),
        "throughput": throughput(snapshot),
        "pipeline": pipeline(snapshot),
    }
    return Section(
        draw=lambda rows: Columns([*tables.values()][:rows], padding=(0, 2)),
        missing=lambda rows: ", ".join([*tables][rows:]),
        rows=len(tables),
    )


def _missing(things: str, count: int) -> Callable[[int], str]:
    """Return a function: number of rows that are shown -> the name of the rows that are missing."""
    return lambda rows: f"{count - rows} of {count} {things}" if rows else things
