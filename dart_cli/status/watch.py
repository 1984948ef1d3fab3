"""Asks the data service of a run for snapshots and shows them: the `dart status` verb.

Watcher     an open connection that gives snapshots; looks, these until the run ends
run_status  shows them: once, as lines of JSON, or as a live page; returns the exit code
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bus.endpoints import DATA
from bus.errors import DeadlineError, RunDirectoryError
from bus.messages import StatusReply, StatusRequest
from bus.requests import Requester
from bus.snapshot import Snapshot
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.runtime.run_dir import last_snapshot
from dart_cli.runtime.waits import data_awaited
from dart_cli.status.host_processes import ended_badly, ended_well, over, why_absent
from dart_cli.status.run_sections import problems
from dart_cli.status.status_page import StatusPage

ANSWER_S = 5.0
"""Seconds a data process may take to answer before it counts as absent."""


class Watcher(AbstractAsyncContextManager["Watcher"]):
    """Gives snapshots of one run; made inside a running loop."""

    def __init__(self, config: Config) -> None:
        self._run_dir = config.run.dir
        self._over_tcp = config.bus.transport == "tcp"
        self._seen: Snapshot | None = None
        if _has_no_place(config):
            raise RunDirectoryError(_no_such_run(config))
        self._requester = Requester(
            run_endpoints(config).address(DATA),
            name="status",
            peer="dart data",
            curve=run_curve(config),
        )

    async def __aexit__(self, *_: object) -> None:
        await self._requester.close()

    async def snapshot(self) -> Snapshot:
        """Return the run now; if it has ended normally since the last call, the last snapshot, as stopping.

        Raises DeadlineError, which says why, where no data process answers in time.
        """
        try:
            reply = await self._requester.request(StatusRequest(), ANSWER_S)
        except DeadlineError:
            if self._seen is not None and (reason := ended_well(self._run_dir)):
                return self._seen.model_copy(update={"stopping": True, "reason": reason})
            raise DeadlineError(
                f"{self._run_dir}: no data process answers (waited {ANSWER_S:.0f} s); "
                + why_absent(self._run_dir, tcp=self._over_tcp)
            ) from None
        assert isinstance(reply, StatusReply)
        self._seen = Snapshot.model_validate(reply.snapshot)
        return self._seen


async def looks(config: Config, every_s: float) -> AsyncIterator[Snapshot | DeadlineError]:
    """Yield the run every `every_s` seconds until it ends, or why no data process answers."""
    async with Watcher(config) as watcher:
        while True:
            seen: Snapshot | DeadlineError
            try:
                seen = await watcher.snapshot()
            except DeadlineError as error:  # data may still start, or restart
                seen = error
            yield seen
            if isinstance(seen, Snapshot) and seen.stopping:
                return
            await asyncio.sleep(every_s)


async def run_status(config: Config, *, once: bool, as_json: bool, every_s: float) -> int:
    """Show the run once or until interrupted, every `every_s` seconds; returns the exit code.

    0 where the run is healthy or has ended normally, 1 where it needs attention. The live page waits
    for a run that has not started; the other forms raise RunDirectoryError then. Where no data service
    answers, the page is the last one that it left; of a run that has not ended normally, DeadlineError is raised,
    too. Lines of JSON that have begun wait for its successor.
    """
    console = Console(markup=False, highlight=False)
    try:
        if not (once or as_json) and sys.stdout.isatty():
            snapshot = await _live(config, console, every_s)
        elif as_json and not once:
            snapshot = await _lines(config, every_s)
        else:
            async with Watcher(config) as watcher:
                snapshot = await watcher.snapshot()
            if as_json:
                _print_line(snapshot.model_dump_json())
        if not as_json:
            console.print(StatusPage(snapshot))
    except DeadlineError as error:
        return _without_data(config, console, error, as_json=as_json)
    return 1 if problems(snapshot) else 0


def _without_data(config: Config, console: Console, error: DeadlineError, *, as_json: bool) -> int:
    """Show the run as its data service last reported it; return 0 where the run has ended normally.

    Raises `error` where it has not. Then nothing is printed as JSON: a script would take it for the run as it is.
    """
    last, reason = last_snapshot(config.run.dir), ended_well(config.run.dir)
    if last and reason:
        last = last.model_copy(update={"stopping": True, "reason": reason})
    if last and not as_json:
        console.print(StatusPage(last, is_old=True))
    if not reason:
        raise error
    if last and as_json:
        _print_line(last.model_dump_json())
    sys.stderr.write(f"{config.run.dir}: {over(config.run.dir)}\n")
    return 0


async def _lines(config: Config, every_s: float) -> Snapshot:
    """Return a line of JSON for each snapshot until the run ends; once begun, it waits while data is absent."""
    last: Snapshot | None = None
    is_told = False
    async for seen in looks(config, every_s):
        if isinstance(seen, Snapshot):
            last, is_told = seen, False
            _print_line(seen.model_dump_json())
        elif last is None or ended_badly(config.run.dir):
            raise seen
        elif not is_told:
            sys.stderr.write(f"{seen}; keeps trying\n")
            is_told = True
    assert last is not None
    return last


async def _live(config: Config, console: Console, every_s: float) -> Snapshot:
    """Return a page that is redrawn until the run ends; it may start before the run does."""
    last: Snapshot | None = None
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while _has_no_place(config):
            live.update(Text(_no_such_run(config), "red"), refresh=True)
            await asyncio.sleep(every_s)
        live.update(Text(f"waits for {data_awaited(config)}"), refresh=True)  # until it answers
        async for seen in looks(config, every_s):
            if isinstance(seen, Snapshot):
                last = seen
                live.update(StatusPage(seen, is_live=True), refresh=True)
            elif last is None and over(config.run.dir):
                raise seen
            else:
                why, newest = Text(str(seen), "red"), last or last_snapshot(config.run.dir)
                page = newest and StatusPage(newest, is_live=True, is_old=True, above=[why])
                live.update(page or why, refresh=True)
    assert last is not None
    return last


def _has_no_place(config: Config) -> bool:
    """Whether the run directory, where processes of one host meet, does not exist."""
    return config.bus.transport == "ipc" and not config.run.dir.is_dir()


def _no_such_run(config: Config) -> str:
    return f"{config.run.dir}: no such run; `dart up` or `dart data` starts it"


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
