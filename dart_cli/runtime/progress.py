"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere.

progress  shows it while inside
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""


@contextlib.contextmanager
def progress(what: str, count: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show on stderr how much of `count` is done; gives a function to call with each part's number."""
    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=count)
            yield lambda number: bar.advance(task, number)
        return
    done, last = 0, time.monotonic()

    def advance(number: int) -> None:
        nonlocal done, last
        done += number
        if number and (done == count or time.monotonic() - last > EVERY_S):
            last = time.monotonic()
            sys.stderr.write(f"progress: {what} {done}/{count} {unit}\n")
            sys.stderr.flush()

    yield advance
