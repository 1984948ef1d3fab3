"""What `dart up` shows while it runs: a live page on a terminal, short lines elsewhere.

LiveDisplay  shows the newest snapshot of the run, and below it the latest notices
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from bus.errors import BusError
from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.runtime.tables import clock
from dart_cli.status.run_sections import progress_line
from dart_cli.status.status_page import StatusPage
from dart_cli.status.watch import Watcher

logger = logging.getLogger(__name__)

_PAGE_S = 1.0
_LINE_S = 5.0
_NOTICES = 6  # on the page: the latest ones


class LiveDisplay:
    """The live page, or the lines in its place, while the run goes on."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._notices: deque[str] = deque(maxlen=_NOTICES)
        self._snapshot: Snapshot | None = None
        self._live: Live | None = None
        self._stalls: dict[tuple[str, str], str] = {}  # the reported ones: (kind, who) -> text

    @property
    def is_over(self) -> bool:
        """Whether the data service has reported that the run is over."""
        return self._snapshot is not None and self._snapshot.stopping

    def notice(self, text: str) -> None:
        """Log a line and show it to the user."""
        logger.info("%s", text)
        self._notices.append(text)
        if self._live is not None:
            self._live.update(self._page(), refresh=True)
        else:
            self._line(text)

    def leave(self) -> None:
        """Show the terminal's cursor again, before an end by os._exit, which runs no `finally` blocks."""
        if self._live is not None:
            self._console.show_cursor()

    @contextlib.asynccontextmanager
    async def live_page(self) -> AsyncIterator[None]:
        """Show a live page inside the context, if there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self._page(), console=self._console, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextlib.asynccontextmanager
    async def watching(self, config: Config) -> AsyncIterator[None]:
        """Ask the data service for snapshots and show them, inside the context."""
        task = asyncio.create_task(self._watch(config))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, config: Config) -> None:
        """Show a new snapshot at intervals, until it is cancelled; report stalls."""
        async with Watcher(config) as watcher:
            while True:
                try:
                    self._snapshot = await watcher.snapshot()
                except BusError as error:  # the data service starts, or restarts
                    logger.info("%s", error)
                    await asyncio.sleep(_PAGE_S)
                    continue
                self.report_stalls(self._snapshot)
                if self._live is not None:
                    self._live.update(self._page(), refresh=True)
                    await asyncio.sleep(_PAGE_S)
                else:
                    self._line(progress_line(self._snapshot))
                    await asyncio.sleep(_LINE_S)

    def report_stalls(self, snapshot: Snapshot) -> None:
        """Report each stall once when it begins and once when it is over.

        The page itself shows the present stalls in full.
        """
        stalls = {} if snapshot.stopping else {(s.kind, s.who): s.text for s in snapshot.stalls}
        for key in stalls.keys() - self._stalls.keys():
            self._report(f"needs attention: {stalls[key]}")
        for key in self._stalls.keys() - stalls.keys():
            if not snapshot.stopping:
                self._report(f"over: {self._stalls[key]}")
        self._stalls = stalls

    def _report(self, text: str) -> None:
        """Log a line, and print it where there is no page."""
        logger.info("%s", text)
        if self._live is None:
            self._line(text)

    def _page(self) -> RenderableType:
        """Return the live page: the newest snapshot, and the notices below it."""
        notices = [Text(text, "bright_black") for text in self._notices]
        if self._snapshot is None:
            return Group(*notices)
        return StatusPage(self._snapshot, is_live=True, below=notices)

    def _line(self, text: str) -> None:
        sys.stderr.write(f"{clock()} {text}\n")
        sys.stderr.flush()
