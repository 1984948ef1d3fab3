"""Format values in the same way on every page and in every table, and show the progress of a long command.

page_table        makes an empty table with title and columns
table_of          makes a table with a row for each object
verdict_words     formats an outcome, with its reward if that is not obvious
or_dash           formats a number, or a dash for None
fraction          formats a number with two digits
count             formats a number, which may be large, without a power of ten
minutes           formats a duration in minutes and seconds
moment, clock     format a time in UTC, with and without its date
versions          formats the range of weight versions that sampled a trajectory
progress          shows how far a long command is: a bar on a terminal, else a line every few seconds
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table

from bus.messages import Outcome
from envs.contract.base import reward_of

_Row = TypeVar("_Row")


def page_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table in the style of all pages. The columns in `right` hold numbers."""
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def table_of(
    title: str,
    rows: Iterable[_Row],
    columns: Mapping[str, Callable[[_Row], RenderableType]],
    style: Callable[[_Row], str] = lambda _: "",
) -> Table:
    """Return a table with a line for each of `rows`. The name of a column with numbers begins with `>`."""
    names = [name.removeprefix(">") for name in columns]
    right = [name[1:] for name in columns if name.startswith(">")]
    table = page_table(title, *names, right=right)
    for row in rows:
        table.add_row(*(value(row) for value in columns.values()), style=style(row))
    return table


def verdict_words(outcome: Outcome, reward: float | None) -> str:
    """Return `pass`, or `fail (reward 0.4)` if the reward does not follow from the outcome."""
    if reward is None or reward == reward_of(outcome):
        return outcome
    return f"{outcome} (reward {reward:.3g})"


def or_dash(value: float | None, form: str = "") -> str:
    """Return a number in the format `form`; a dash for None."""
    return "-" if value is None else format(value, form)


def fraction(value: float | None) -> str:
    """Return a number with two digits; a dash for None."""
    return or_dash(value, ".2f")


def count(value: float) -> str:
    """Return a number as `30,540`; from a million on as `1.23M`; a small one with four digits."""
    if abs(value) < 1e4:
        return f"{value:.4g}"
    for size, unit in ((1e12, "T"), (1e9, "B"), (999_500, "M")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else size):.3g}{unit}"
    return f"{value:,.0f}"


def minutes(seconds: float) -> str:
    """Return a duration as `3:05`; from an hour on as `1:03:05`."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def moment(at: float | None) -> str:
    """Return a moment in UTC, to the second, e.g. `2026-11-28 09:30:00Z`; a dash for None.

    The log files use UTC, too. Local time would repeat an hour when summer time ends, and would differ by
    host.
    """
    if at is None:
        return "-"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def clock(at: float | None = None) -> str:
    """Return the time of day in UTC, e.g. `09:30:00Z`; `at` is by default now."""
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime("%H:%M:%SZ")


def versions(oldest: int | None, newest: int | None) -> str:
    """Return `3`, `3-5`, or a dash if there are no versions."""
    if oldest is None or newest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


# --- progress ----------------------------------------------------------------------------


EVERY_S = 5.0
"""Seconds between two lines of progress if there is no terminal."""


class Advance(Protocol):
    """A function that reports `number` more finished parts; `note` adds intermediate results."""

    def __call__(self, number: int, note: str = "", /) -> None:
        """Show the progress."""
        ...


@contextlib.contextmanager
def progress(what: str, count: int, unit: str) -> Iterator[Advance]:
    """Show on stderr how many of `count` parts are finished.

    Yield a function that takes the number of parts that have been finished since its last call.
    """
    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=count)

            def move(number: int, note: str = "", /) -> None:
                bar.update(task, advance=number, description=f"{what}: {note}" if note else what)

            yield move
        return
    finished, last = 0, time.monotonic()

    def advance(number: int, note: str = "", /) -> None:
        nonlocal finished, last
        finished += number
        if number and (finished == count or time.monotonic() - last > EVERY_S):
            last = time.monotonic()
            so_far = f", {note}" if note else ""
            sys.stderr.write(f"progress: {what} {finished}/{count} {unit}{so_far}\n")
            sys.stderr.flush()

    yield advance
