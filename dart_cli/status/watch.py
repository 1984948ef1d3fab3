"""`dart status`: asks the data service of a run for snapshots, and shows them.

Watcher     a connection to the data service, which returns snapshots
snapshots   the snapshots of a run at intervals, until the run ends
run_status  shows the run once, as lines of JSON, or as a live page
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
"""Seconds within which the data service must answer; after them it counts as absent."""


class Watcher(AbstractAsyncContextManager["Watcher"]):
    """A connection to the data service of one run. Create it inside a running loop."""

    def __init__(self, config: Config) -> None:
        self._run_dir = config.run.dir
        self._over_tcp = config.bus.transport == "tcp"
        self._newest: Snapshot | None = None
        if _is_missing(config):
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
        """Return a snapshot of the run; if the run has ended normally, its last one, marked as stopping.

        Raises DeadlineError with the reason if the data service does not answer in time.
        """
        try:
            reply = await self._requester.request(StatusRequest(), ANSWER_S)
        except DeadlineError:
            if self._newest is not None and (reason := ended_well(self._run_dir)):
                return self._newest.model_copy(update={"stopping": True, "reason": reason})
            raise DeadlineError(
                f"{self._run_dir}: no data service answers (waited {ANSWER_S:.0f} s); "
                + why_absent(self._run_dir, tcp=self._over_tcp)
            ) from None
        assert isinstance(reply, StatusReply)
        self._newest = Snapshot.model_validate(reply.snapshot)
        return self._newest


async def snapshots(config: Config, every_s: float) -> AsyncIterator[Snapshot | DeadlineError]:
    """Yield a snapshot every `every_s` seconds until the run ends, or the error if there is no answer."""
    async with Watcher(config) as watcher:
        while True:
            answer: Snapshot | DeadlineError
            try:
                answer = await watcher.snapshot()
            except DeadlineError as error:  # the data service may still start, or restart
                answer = error
            yield answer
            if isinstance(answer, Snapshot) and answer.stopping:
                return
            await asyncio.sleep(every_s)


async def run_status(config: Config, *, once: bool, as_json: bool, every_s: float) -> int:
    """Show the run once, or every `every_s` seconds until it ends; return the exit code.

    The code is 0 if the run is healthy or has ended normally, 1 if it needs attention. The live page waits
    for a run that has not started; the other forms raise RunDirectoryError then. If the data service does not
    answer, its last page is shown, and DeadlineError is raised unless the run has ended normally. Lines of
    JSON, once begun, wait for the next data service.
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
    """Show the run as its data service last reported it, and return 0 if the run has ended normally.

    Raises `error` if it has not. Then no JSON is printed, because a script would take it as current.
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
    """Print a line of JSON for each snapshot until the run ends, and return the last one.

    Once the first line is printed, it waits while the data service is absent.
    """
    last: Snapshot | None = None
    is_reported = False
    async for answer in snapshots(config, every_s):
        if isinstance(answer, Snapshot):
            last, is_reported = answer, False
            _print_line(answer.model_dump_json())
        elif last is None or ended_badly(config.run.dir):
            raise answer
        elif not is_reported:
            sys.stderr.write(f"{answer}; keeps trying\n")
            is_reported = True
    assert last is not None
    return last


async def _live(config: Config, console: Console, every_s: float) -> Snapshot:
    """Redraw the page until the run ends, and return the last snapshot. It may start before the run does."""
    last: Snapshot | None = None
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while _is_missing(config):
            live.update(Text(_no_such_run(config), "red"), refresh=True)
            await asyncio.sleep(every_s)
        # Until the data service answers for the first time.
        live.update(Text(f"waits for {data_awaited(config)}"), refresh=True)
        async for answer in snapshots(config, every_s):
            if isinstance(answer, Snapshot):
                last = answer
                live.update(StatusPage(answer, is_live=True), refresh=True)
            elif last is None and over(config.run.dir):
                raise answer
            else:
                reason, newest = Text(str(answer), "red"), last or last_snapshot(config.run.dir)
                page = newest and StatusPage(newest, is_live=True, is_old=True, above=[reason])
                live.update(page or reason, refresh=True)
    assert last is not None
    return last


def _is_missing(config: Config) -> bool:
    """Return True if the run directory, which has the sockets of one host, does not exist."""
    return config.bus.transport == "ipc" and not config.run.dir.is_dir()


def _no_such_run(config: Config) -> str:
    return f"{config.run.dir}: no such run; `dart up` or `dart data` starts it"


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
