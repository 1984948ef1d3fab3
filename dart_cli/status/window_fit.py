"""Which sections of a page fit a window, and which are left out.

Section   a part of a page, which may be cut to its first rows
Fitted    the lines of the sections that fit, and the names of the parts that are left out
fit       chooses the sections that fit a number of lines, the most important ones first
narrowed  builds a table without the columns that do not fit the width
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
    """A part of a page, which may be cut to its first rows, down to `least` of them."""

    draw: Callable[[int], RenderableType]  # number of rows -> the section with its first rows
    missing: Callable[[int], str]  # number of rows -> the name of the part that is left out
    rows: int = 1
    least: int = 1
    lacking: Sequence[str] = ()  # columns that do not fit the width
    slim: Section | None = None  # a smaller form, used before anything else is left out


def whole(name: str, content: RenderableType, lacking: Sequence[str] = ()) -> Section:
    """Return a section that is shown whole or not at all."""
    return Section(draw=lambda _: content, missing=lambda _: name, lacking=lacking)


@dataclass(frozen=True)
class Fitted:
    """The lines of a page, and the names of the parts that are left out."""

    lines: Lines
    missing: list[str]  # sections and rows
    lacking: list[str]  # columns of the sections that are shown


Draw = Callable[[Section, int], Lines]


def fit(sections: Sequence[Section], room: int | None, draw: Draw) -> Fitted:
    """Return the sections that fit `room` lines: each in turn, whole if it fits, else its first rows.

    If `room` is None, everything fits. `draw` returns the lines of a section with a number of rows.
    """
    fitted = _fit(sections, room, draw)
    if fitted.missing:
        fitted = _fit([section.slim or section for section in sections], room, draw)
    return fitted


def _fit(sections: Sequence[Section], room: int | None, draw: Draw) -> Fitted:
    """Do the same as `fit`, but without the smaller forms of sections."""
    fitted = Fitted([], [], [])
    for section in sections:
        remaining = None if room is None else room - len(fitted.lines)
        rows = _rows_that_fit(section, remaining, draw)
        if rows < section.rows:
            fitted.missing.append(section.missing(rows))
        if rows:
            fitted.lines.extend(draw(section, rows))
            fitted.lacking.extend(section.lacking)
    return fitted


def _rows_that_fit(section: Section, room: int | None, draw: Draw) -> int:
    """Return the largest number of rows whose lines fit `room`; 0 if not even `section.least` rows fit."""
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
    """Return a table that fits the width, and the columns that it lacks for that.

    Columns are left out in the order of `optional`, no more than necessary.
    """
    for count in range(len(optional) + 1):
        table = build(frozenset(optional[:count]))
        width = Measurement.get(console, options.update(max_width=1000), table).maximum
        if width <= options.max_width:
            break
    return table, optional[:count]
