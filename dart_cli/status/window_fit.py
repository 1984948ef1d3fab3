"""A page that fits a window: sections by importance, and what is missing of them.

Section   one part of a page, which may be cut to its first rows
Fitted    what was chosen, and the names of what is missing
fit       chooses the sections that fit so many lines, the most important ones first
narrowed  a table without the columns that the width has no room for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

Lines = list[list[Segment]]


@dataclass(frozen=True, eq=False)
class Section:
    """One part of a page. It may be cut to its first rows, down to `least` of them."""

    page: Callable[[int], RenderableType]  # the section with its first so many rows
    missing: Callable[[int], str]  # names what is missing then
    rows: int = 1
    least: int = 1
    lacking: Sequence[str] = ()  # columns that the width has no room for
    slim: Section | None = None  # what it becomes before anything else is left out


def whole(name: str, page: RenderableType, lacking: Sequence[str] = ()) -> Section:
    """Return a section that is shown whole or not at all."""
    return Section(lambda _: page, lambda _: name, lacking=lacking)


@dataclass(frozen=True)
class Fitted:
    """The lines of a page, and what is missing of it."""

    lines: Lines
    missing: list[str]  # sections and rows
    lacking: list[str]  # columns of the sections that are shown


Draw = Callable[[Section, int], Lines]


def fit(sections: Sequence[Section], room: int | None, draw: Draw) -> Fitted:
    """Choose what fits `room` lines: each section in turn that still fits, else its first rows.

    Without `room` everything is chosen. `draw` returns the lines of a section with its first rows.
    """
    fitted = _fit(sections, room, draw)
    if fitted.missing:
        fitted = _fit([each.slim or each for each in sections], room, draw)
    return fitted


def _fit(sections: Sequence[Section], room: int | None, draw: Draw) -> Fitted:
    fitted = Fitted([], [], [])
    for section in sections:
        left = None if room is None else room - len(fitted.lines)
        rows = _rows_that_fit(section, left, draw)
        if rows < section.rows:
            fitted.missing.append(section.missing(rows))
        if rows:
            fitted.lines.extend(draw(section, rows))
            fitted.lacking.extend(section.lacking)
    return fitted


def _rows_that_fit(section: Section, room: int | None, draw: Draw) -> int:
    """Return the most rows whose lines fit; 0 where even the least do not."""
    if room is None or len(draw(section, section.rows)) <= room:
        return section.rows
    fits, too_many = section.least - 1, section.rows
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(draw(section, middle)) <= room:
            fits = middle
        else:
            too_many = middle
    return fits if fits >= section.least else 0


def narrowed(
    build: Callable[[frozenset[str]], Table],
    optional: Sequence[str],
    console: Console,
    options: ConsoleOptions,
) -> tuple[Table, Sequence[str]]:
    """Build a table without the first of its `optional` columns, as many as the width has no room for.

    Returns the table and the columns that it lacks.
    """
    for count in range(len(optional) + 1):
        table = build(frozenset(optional[:count]))
        wanted = Measurement.get(console, options.update(max_width=1000), table).maximum
        if wanted <= options.max_width:
            break
    return table, optional[:count]
