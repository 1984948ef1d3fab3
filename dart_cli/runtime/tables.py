"""How values read, the same on every page and in every table; how far a long command is.

page_table       an empty table with its title and columns; table_of, a row for each of some things
verdict_words    an outcome, with its reward where that says more
or_dash          a number; fraction, with two digits; count, a large one without a power of ten
minutes, moment  a duration, a moment
versions         which weights sampled a trajectory
progress         how far a long command is: a bar on a terminal, a line every few seconds elsewhere
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
    """Return a table as all pages show it; the columns named in `right` hold numbers."""
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
    """Return a row for each thing; a column's name begins with `>` where it holds numbers."""
    names = [name.removeprefix(">") for name in columns]
    right = [name[1:] for name in columns if name.startswith(">")]
    table = page_table(title, *names, right=right)
    for row in rows:
        table.add_row(*(value(row) for value in columns.values()), style=style(row))
    return table


def verdict_words(outcome: Outcome, reward: float | None) -> str:
    """`pass`, or `fail (reward 0.4)` where the reward does not follow from the outcome."""
    if reward is None or reward == reward_of(outcome):
        return outcome
    return f"{outcome} (reward {reward:.3g})"


def or_dash(value: float | None, form: str = "") -> str:
    """Return a number in the format `form`; a dash for None."""
    return "-" if value is None else format(value, form)


def fraction(value: float | None) -> str:
    """Two digits, or a dash for None."""
    return or_dash(value, ".2f")


def count(value: float) -> str:
    """Return `30,540`, from a million on `1.23M`, of small numbers four digits."""
    if abs(value) < 1e4:
        return f"{value:.4g}"
    for size, unit in ((1e12, "T"), (1e9, "B"), (999_500, "M")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else size):.3g}{unit}"
    return f"{value:,.0f}"


def minutes(seconds: float) -> str:
    """`3:05`, or `1:03:05` from an hour on."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def moment(at: float | None) -> str:
    """Return a moment in UTC, to the second, e.g. `2026-11-28 09:30:00Z`; a dash for None.

    The log files have the same clock. Local time would repeat an hour when summer ends, and differ by host.
    """
    if at is None:
        return "-"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def clock(at: float | None = None) -> str:
    """Return the time of day in UTC at a moment, by default now, e.g. `09:30:00Z`."""
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime("%H:%M:%SZ")


def versions(oldest: int | None, newest: int | None) -> str:
    """`3`, `3-5`, or a dash."""
    if oldest is None or newest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


# --- progress ----------------------------------------------------------------------------


EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""


class Advance(Protocol):
    """So many more parts are done; `note` says what came of them so far."""

    def __call__(self, number: int, note: str = "", /) -> None:
        """Show it."""
        ...


@contextlib.contextmanager
def progress(what: str, count: int, unit: str) -> Iterator[Advance]:
    """Show on stderr how much of `count` is done; gives a function to call with each part's number."""
    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=count)

            def move(number: int, note: str = "", /) -> None:
                bar.update(task, advance=number, description=f"{what}: {note}" if note else what)

            yield move
        return
    done, last = 0, time.monotonic()

    def advance(number: int, note: str = "", /) -> None:
        nonlocal done, last
        done += number
        if number and (done == count or time.monotonic() - last > EVERY_S):
            last = time.monotonic()
            so_far = f", {note}" if note else ""
            sys.stderr.write(f"progress: {what} {done}/{count} {unit}{so_far}\n")
            sys.stderr.flush()

    yield advance
