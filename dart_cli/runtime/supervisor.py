"""Run child processes that belong together: start them, restart them when they die, end them together.

    Supervisor   runs named commands until its leaders have ended, a command cannot be kept alive, or
                 `stop` is set; then it ends all of them with their process groups
    Child        one command and its current process
    Process      the protocol of a process that is supervised, on this host or another
    start_here   starts a command as a process of this host (see StartProcess)
    Progress     counts finished work of a command, which has recovered from its deaths if the count has grown
    Restarts     counts how often one process was restarted within a day
    ChildError   the error for a command that cannot be kept alive

Each child leads its own process group, so that Ctrl-C reaches only this process, and a signal to the group
reaches all that the child started, including re-parented processes (psutil has no process groups). Output
goes line by line to one log file, each line with the child's name in front.

Deaths are counted in a row. A child that has lived for `HEALTHY_S` has recovered, and the count begins anew.
A child with a Progress has recovered when that has grown, no matter how long it lived. So a run that makes
progress goes on however often its children die, and each notice tells how often that was within a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from bus.errors import AttentionError, DartError, UserError
from dart_cli.runtime.logs import cut_log
from dart_cli.runtime.role import GRACE_S, LAST_WORK_S, PARENT_VARIABLE

FOLLOW_S = 20.0
"""Seconds for which the other children may go on once one leader has ended cleanly."""

FINAL_CODES = (UserError.exit_code, AttentionError.exit_code)
"""Exit codes of errors that a restart cannot fix."""
_BACKOFF_S = 0.5
RESTARTS = 3
"""How often in a row a process that died is restarted. Its next death ends the run."""
HEALTHY_S = 3600.0
"""Seconds after which a process has recovered from its earlier deaths."""
DAY_S = 24 * 3600.0
"""Seconds over which restarts are counted for reports."""
MOST_COUNTED = 10_000
"""Most restarts of one process that are counted. With the longest pause there are at most 8,640 a day."""
_MAX_BACKOFF_S = 10.0
_CHUNK_BYTES = 65536
_NOTICED = re.compile(r"(WARNING|ERROR|progress:|\S+: http://)")
"""Lines of a child that a person should see: warnings and errors, progress, the address of `dart serve`."""


@contextlib.contextmanager
def _append_to(path: Path) -> Iterator[TextIO]:
    """Open a file for appending while the block runs. Lines that cannot be written by then are lost."""
    file = path.open("a", encoding="utf-8")
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


class ChildError(DartError):
    """The error for a child that ended with an error and is not restarted. The message names its log."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Output(Protocol):
    """The output of a process, standard output and standard error together."""

    async def read(self, n: int = -1, /) -> bytes:
        """Return at most `n` more bytes as soon as there are any; no bytes at the end."""
        ...


class Process(Protocol):
    """A command of `dart` that was started."""

    @property
    def output(self) -> Output:
        """The output, which must be read as long as the process runs."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, the negative number of the signal that ended it, or None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended, and return the exit code."""
        ...

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started."""
        ...

    def how_it_ended(self, code: int) -> str:
        """Return how the process ended with `code`, to complete a sentence that begins with its name."""
        ...


StartProcess = Callable[[str, Sequence[str], asyncio.Event], Awaitable[Process | None]]
"""(name, arguments of `dart`, event `ending`) -> the process; None if `ending` was set before it started."""


@dataclass(frozen=True)
class Progress:
    """Work of a child that its death does not undo. Only more of this work counts as a recovery."""

    unit: str  # the unit of the work, for errors: "checkpoint"
    amount: Callable[[], int]  # returns how much is finished; it never falls


class LocalProcess:
    """A process of this host that leads its own process group. See Process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.output: asyncio.StreamReader = process.stdout
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the process has ended, and return the exit code."""
        return await self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def how_it_ended(self, code: int) -> str:
        """Return `was ended by SIGKILL` or `ended with 1`."""
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


async def start_here(
    _name: str, arguments: Sequence[str], _ending: asyncio.Event, **how: Any
) -> LocalProcess:
    """Start `dart ARGUMENTS` on this host. The process ends when this one is gone.

    `how` has further arguments for create_subprocess_exec.
    """
    environment = how.pop("env", os.environ)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dart_cli",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**environment, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        **how,
    )
    return LocalProcess(process)


class Restarts:
    """The times of the last day at which one process was restarted, at most the newest MOST_COUNTED."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=MOST_COUNTED)

    def add(self, now: float) -> None:
        """Add a restart at the time `now`, in monotonic seconds."""
        self._at.append(now)

    def within_day(self, now: float) -> int:
        """Return the number of restarts in the day before `now`."""
        while self._at and self._at[0] <= now - DAY_S:
            self._at.popleft()
        return len(self._at)


@dataclass
class Child:
    """One command and its current process."""

    name: str
    arguments: Sequence[str]
    progress: Progress | None = None
    process: Process | None = None
    deaths: int = 0  # deaths in a row without a recovery
    reached: int = 0  # the largest amount of `progress` so far
    began_at: float = 0.0  # the time of the loop when `process` was started
    restarts: Restarts = field(default_factory=Restarts)
    last_line: str = ""  # the last line of its output, to report why it ended
    last_notice: str = ""  # the last line of this process that was shown to a person
    output_at: float = 0.0  # the time of the loop at its last output
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # for good
    is_asked_to_end: bool = False

    @property
    def running(self) -> bool:
        """Whether the child has a living process."""
        return self.process is not None and self.process.returncode is None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the child and everything it started."""
        if self.process is not None:
            self.process.signal_group(number)

    def has_recovered(self, now: float) -> bool:
        """Return True if the process that has just ended had recovered from the deaths before."""
        if self.progress is None:
            return now - self.began_at >= HEALTHY_S
        before, self.reached = self.reached, max(self.reached, self.progress.amount())
        return self.reached > before

    def in_vain(self) -> str:
        """Return, for an error message, how often the child was restarted in vain; empty if it never was."""
        if not self.deaths:
            return ""
        times = f"restarted {self.deaths} times"
        if self.progress is not None:
            return f"{times} without a new {self.progress.unit}, "
        return f"{times}, and it never lived for {HEALTHY_S:.0f} s, "


class Supervisor:
    """Runs named `dart` commands together. It is created and used inside one running event loop."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        leaders: Collection[str],
        restarts: int,
        log_file: Path,
        notice: Callable[[str], None],
        start: StartProcess = start_here,
        progress: Mapping[str, Progress] | None = None,
        follow_s: float | None = FOLLOW_S,
        on_kill: Callable[[str, int], None] = lambda _name, _number: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to run `commands`: name -> arguments of `dart`. The last command is ended after all others.

        `leaders` are names: the work is done when all of them have ended with 0, or `follow_s` seconds after
        the first one; None means no limit. `restarts` is how often in a row a child is restarted. `notice` is
        called with each line that a person should see. `start` starts a command on this host or another.
        `progress` has the Progress of some children by name. `on_kill` is called with a child's name and the
        number of the signal that killed it. A child that dies while `is_over` returns True is not restarted,
        because there is nothing left for it to do. The last command still is, because the others need it.
        """
        progress_of = progress or {}
        self._children = {
            name: Child(name, arguments, progress_of.get(name))
            for name, arguments in commands.items()
        }
        self._leaders = [self._children[name] for name in leaders]
        self._follow_s = follow_s
        self._restarts = restarts
        self._log_file = log_file
        self._notice = notice
        self._start = start
        self._on_kill = on_kill
        self._last = list(self._children.values())[-1]
        self._is_over = is_over
        self._ending = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the children running until the work is done or `stop` is set, then end them all.

        Raises ChildError, after all children have ended, if a child cannot be kept alive.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with _append_to(self._log_file) as log:
            keeping = [
                asyncio.create_task(self._keep(child, log)) for child in self._children.values()
            ]
            leaders = asyncio.create_task(self._wait_for_leaders())
            stopping = asyncio.create_task(stop.wait())
            try:
                watched = {leaders, stopping, *keeping}
                while not (leaders.done() or stopping.done() or any(map(_failed, keeping))):
                    _, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._end()
                leaders.cancel()
                stopping.cancel()
                results = await asyncio.gather(*keeping, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def kill(self) -> None:
        """Kill all children at once."""
        self._ending.set()
        for child in self._children.values():
            if child.running:  # another process may have the pid of a child that has ended
                child.is_asked_to_end = True
                child.signal_group(signal.SIGKILL)

    async def _keep(self, child: Child, log: TextIO) -> None:
        """Start the child, and restart it when it dies.

        Return when it has ended cleanly or is not restarted.
        """
        loop = asyncio.get_running_loop()
        try:
            if child.progress is not None:
                child.reached = child.progress.amount()
            while not self._ending.is_set():
                code = await self._run_once(child, log)
                child.signal_group(signal.SIGKILL)  # what it left behind
                if code == 0 or child.is_asked_to_end:
                    return
                assert child.process is not None
                if code < 0:
                    self._on_kill(child.name, -code)
                what = f"{child.name} {child.process.how_it_ended(code)}"
                why = f": {child.last_line}" if child.last_line else ""
                if child.has_recovered(loop.time()):
                    child.deaths = 0
                if code not in FINAL_CODES and child is not self._last and self._is_over():
                    self._notice(f"{what}{why}; the run is over, so it is not started again")
                    return
                if self._ending.is_set():
                    self._notice(f"{what}{why}")
                    return
                if code in FINAL_CODES or child.deaths >= self._restarts:
                    raise ChildError(
                        f"{what}{why or ' without output'}; {child.in_vain()}its log is {self._log_file}",
                        code if code in FINAL_CODES else DartError.exit_code,
                    )
                child.deaths += 1
                child.restarts.add(loop.time())
                today = child.restarts.within_day(loop.time())
                often = f", {today} times within a day" if today > child.deaths else ""
                self._notice(
                    f"{what}{why}; starting it again ({child.deaths}/{self._restarts}{often})"
                )
                pause_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2**child.deaths)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), pause_s)
        finally:
            child.has_ended.set()

    async def _run_once(self, child: Child, log: TextIO) -> int:
        """Start the child's process, copy its output, and return its exit code when it has ended."""
        process = await self._start(child.name, child.arguments, self._ending)
        if process is None:
            return 0
        child.process = process
        child.last_notice = ""
        child.began_at = asyncio.get_running_loop().time()
        if self._ending.is_set():  # `kill` or `_end` was called while it started
            child.is_asked_to_end = True
            child.signal_group(signal.SIGTERM)
        reading = asyncio.create_task(self._read(child, process.output, log))
        code = await process.wait()
        # A grandchild may hold the pipe open forever; it is killed with the group after this.
        await asyncio.wait([reading], timeout=1.0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return code

    async def _read(self, child: Child, stream: Output, log: TextIO) -> None:
        """Copy output to the log line by line. A carriage return and the end of the output end a line, too.

        If the log cannot be written, e.g. because its disk is full, reading goes on: a child whose output is
        not read would block.
        """
        decoder = getincrementaldecoder("utf-8")("replace")
        rest, is_at_end = "", False
        while not is_at_end:
            chunk = await stream.read(_CHUNK_BYTES)
            is_at_end = not chunk
            child.output_at = asyncio.get_running_loop().time()
            *lines, rest = re.split(r"[\r\n]+", rest + decoder.decode(chunk, final=is_at_end))
            for line in filter(str.strip, [*lines, rest] if is_at_end else lines):
                with contextlib.suppress(OSError):
                    log.write(f"{child.name} | {line}\n")
                child.last_line = line.strip().removeprefix("error: ")[:300]
                # A process that finishes its work repeats the same line.
                if _NOTICED.match(line) and child.last_line != child.last_notice:
                    child.last_notice = child.last_line
                    self._notice(f"{child.name}: {child.last_line.removeprefix(f'{child.name}: ')}")
            with contextlib.suppress(OSError):
                log.flush()
                cut_log(self._log_file)
            rest = rest[-_CHUNK_BYTES:]

    async def _wait_for_leaders(self) -> None:
        """Return when all leaders have ended, or `follow_s` after the first of them."""
        waits = [asyncio.create_task(child.has_ended.wait()) for child in self._leaders]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waits, timeout=self._follow_s)
        finally:
            for wait in waits:
                wait.cancel()

    async def _end(self) -> None:
        """End all children: first all but the last command, which the others need until they end."""
        self._ending.set()
        others = [child for child in self._children.values() if child is not self._last]
        for part in (others, [self._last]):
            for child in part:
                if child.running:
                    child.is_asked_to_end = True
                    child.signal_group(signal.SIGTERM)
            await asyncio.gather(*(self._see_end(child) for child in part))

    async def _see_end(self, child: Child) -> None:
        """Wait for the end of a child. Kill it if it neither ends nor prints that it is still working."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not child.has_ended.is_set():
            until = min(max(began, child.output_at), began + LAST_WORK_S) + GRACE_S + 2
            left = until - loop.time()
            if left <= 0:
                self._notice(f"{child.name} did not end in time; killed")
                child.signal_group(signal.SIGKILL)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await child.has_ended.wait()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
