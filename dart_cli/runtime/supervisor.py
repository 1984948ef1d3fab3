"""Child processes that belong together: started, restarted when they die, ended as one.

    Supervisor   runs named commands until its leaders have ended, a command cannot be kept alive, or
                 `stop` is set; then ends all of them, process groups included
    Child        one command and its present process
    Process      what the supervisor needs of that process, on whichever host it is
    start_here   starts a command as a process of this host; see StartProcess
    Progress     work of a command by which it recovers from its deaths
    Restarts     how often one process was started again within a day
    ChildError   a command that could not be kept alive

Each child leads its own process group, so that Ctrl-C reaches only this process, and a signal to the
group reaches all that the child started, re-parented processes too (psutil has no process groups).
Output goes line by line to one log file, each line with the child's name in front.

Deaths are counted in a row: a child that lived for `HEALTHY_S` has recovered, and the count begins anew. Where
the child's Progress is known, it has recovered once that has risen, however long it lived. So a run that makes
progress goes on however often its children die, and each notice says how often that was within a day.
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
"""Seconds the other children may go on once one leader has ended cleanly."""

FINAL_CODES = (UserError.exit_code, AttentionError.exit_code)
"""Exit codes of errors that no restart mends."""
_BACKOFF_S = 0.5
RESTARTS = 3
"""Times in a row that a process which died is started again; its next death ends the run."""
HEALTHY_S = 3600.0
"""A process that has lived so long has recovered from the deaths before."""
DAY_S = 24 * 3600.0
"""The time over which restarts are counted to be reported."""
MOST_COUNTED = 10_000
"""Restarts of one process in a day, at most as far as they are counted: with the longest pause it can have 8,640."""
_MAX_BACKOFF_S = 10.0
_CHUNK_BYTES = 65536
_NOTICED = re.compile(r"(WARNING|ERROR|progress:|\S+: http://)")
"""Lines of a child that a person should see: what goes wrong, how far it is, the address of `dart serve`."""


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[TextIO]:
    """Yield the file, open for appending; lines that cannot be written by its end are lost."""
    file = path.open("a", encoding="utf-8")
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


class ChildError(DartError):
    """A child ended with an error and is not started again; the message names its log."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Output(Protocol):
    """What a process prints, standard output and errors together."""

    async def read(self, n: int = -1, /) -> bytes:
        """At most `n` more bytes, as soon as there are any; empty at the end."""
        ...


class Process(Protocol):
    """A command of `dart` that was started."""

    @property
    def output(self) -> Output:
        """To be read as long as it runs."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None as long as it runs."""
        ...

    async def wait(self) -> int:
        """Return the exit code, once it has ended."""
        ...

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started."""
        ...

    def how_it_ended(self, code: int) -> str:
        """Return the rest of a sentence that begins with its name."""
        ...


StartProcess = Callable[[str, Sequence[str], asyncio.Event], Awaitable[Process | None]]
"""(name, arguments of `dart`, ending) -> its process; None where `ending` was set before it started."""


@dataclass(frozen=True)
class Progress:
    """Work of a child that its death does not undo: by more of it the child recovers, and by nothing else."""

    unit: str  # of the work, for an error: "checkpoint"
    done: Callable[[], int]  # how far the work is, a number that rises


class LocalProcess:
    """A process of this host, which leads its own process group. See Process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.output: asyncio.StreamReader = process.stdout
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Its exit code; None as long as it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return the exit code, once it has ended."""
        return await self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def how_it_ended(self, code: int) -> str:
        """`was ended by SIGKILL`, `ended with 1`."""
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


async def start_here(
    _name: str, arguments: Sequence[str], _ending: asyncio.Event, **how: Any
) -> LocalProcess:
    """Start `dart ARGUMENTS` here; it ends when this process is gone. `how` is for create_subprocess_exec."""
    environment = how.pop("env", os.environ)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dart_cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={**environment, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        **how,
    )
    return LocalProcess(process)


class Restarts:
    """The times at which one process was started again, of the last day; the newest MOST_COUNTED of them."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=MOST_COUNTED)

    def add(self, now: float) -> None:
        """Note a restart, at monotonic seconds."""
        self._at.append(now)

    def within_day(self, now: float) -> int:
        """Return how many there were in the day before `now`."""
        while self._at and self._at[0] <= now - DAY_S:
            self._at.popleft()
        return len(self._at)


@dataclass
class Child:
    """One command and its present process."""

    name: str
    arguments: Sequence[str]
    progress: Progress | None = None
    process: Process | None = None
    deaths: int = 0  # in a row
    reached: int = 0  # the most that `progress` has reported
    began_at: float = 0.0  # the loop's seconds when `process` was started
    restarts: Restarts = field(default_factory=Restarts)
    last_line: str = ""  # of its output, to report why it ended
    noticed: str = ""  # the newest line of this process that a person saw
    heard_at: float = 0.0  # the loop's seconds of its last output
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # for good
    is_asked_to_end: bool = False

    @property
    def running(self) -> bool:
        """Whether it has a living process."""
        return self.process is not None and self.process.returncode is None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the child and everything it started."""
        if self.process is not None:
            self.process.signal_group(number)

    def has_recovered(self, now: float) -> bool:
        """Return True if the process that has just ended did well: the deaths before it count no more."""
        if self.progress is None:
            return now - self.began_at >= HEALTHY_S
        before, self.reached = self.reached, max(self.reached, self.progress.done())
        return self.reached > before

    def in_vain(self) -> str:
        """Return how often it was started again in vain, for an error; empty if it never was."""
        if not self.deaths:
            return ""
        times = f"restarted {self.deaths} times"
        if self.progress is not None:
            return f"{times} without a new {self.progress.unit}, "
        return f"{times}, and it never lived for {HEALTHY_S:.0f} s, "


class Supervisor:
    """Named `dart` commands that run together; made and used inside one running loop."""

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
        """`commands` is name -> arguments of `dart`, the last ones ended last.

        The supervisor is done when all `leaders` ended with 0, or `follow_s` seconds after the first of them, which
        ends the others; None lets each take its time. `restarts` bounds how often in a row each child
        is started again; `notice` is called with each line that a person should see. `start` says where they
        run. `progress` has the Progress of children by name. `on_kill` is called with a child's name and the
        number of the signal that killed it. A child that dies while `is_over` is not started again, as there is
        nothing left to do for it; but the last command is, which the others still talk to.
        """
        known = progress or {}
        self._children = {
            name: Child(name, arguments, known.get(name)) for name, arguments in commands.items()
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

        Raises ChildError, once all have ended, if one could not be kept alive.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with _appended(self._log_file) as log:
            keeping = [
                asyncio.create_task(self._keep(child, log)) for child in self._children.values()
            ]
            done = asyncio.create_task(self._leaders_done())
            stopped = asyncio.create_task(stop.wait())
            try:
                watched = {done, stopped, *keeping}
                while not (done.done() or stopped.done() or any(map(_failed, keeping))):
                    _, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._end()
                done.cancel()
                stopped.cancel()
                results = await asyncio.gather(*keeping, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def kill(self) -> None:
        """End everything at once."""
        self._ending.set()
        for child in self._children.values():
            if child.running:  # the pid of a child that ended may be another process's by now
                child.is_asked_to_end = True
                child.signal_group(signal.SIGKILL)

    async def _keep(self, child: Child, log: TextIO) -> None:
        """Start the child, and again when it dies; return when it ended cleanly."""
        loop = asyncio.get_running_loop()
        try:
            if child.progress is not None:
                child.reached = child.progress.done()
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
            child.ended.set()

    async def _run_once(self, child: Child, log: TextIO) -> int:
        process = await self._start(child.name, child.arguments, self._ending)
        if process is None:
            return 0
        child.process = process
        child.noticed = ""
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
        """Copy output to the log by lines; a carriage return ends a line too, and so does the end.

        Where the log cannot be written, e.g. as its disk is full, reading goes on: a child whose output
        is not read blocks.
        """
        decoder = getincrementaldecoder("utf-8")("replace")
        rest, ended = "", False
        while not ended:
            chunk = await stream.read(_CHUNK_BYTES)
            ended = not chunk
            child.heard_at = asyncio.get_running_loop().time()
            *lines, rest = re.split(r"[\r\n]+", rest + decoder.decode(chunk, final=ended))
            for line in filter(str.strip, [*lines, rest] if ended else lines):
                with contextlib.suppress(OSError):
                    log.write(f"{child.name} | {line}\n")
                child.last_line = line.strip().removeprefix("error: ")[:300]
                # A process that still finishes its work repeats itself.
                if _NOTICED.match(line) and child.last_line != child.noticed:
                    child.noticed = child.last_line
                    self._notice(f"{child.name}: {child.last_line.removeprefix(f'{child.name}: ')}")
            with contextlib.suppress(OSError):
                log.flush()
                cut_log(self._log_file)
            rest = rest[-_CHUNK_BYTES:]

    async def _leaders_done(self) -> None:
        """Return when all leaders have ended, or `follow_s` after the first of them."""
        waits = [asyncio.create_task(child.ended.wait()) for child in self._leaders]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waits, timeout=self._follow_s)
        finally:
            for wait in waits:
                wait.cancel()

    async def _end(self) -> None:
        """End everything: first all but the last command, which the others still talk to."""
        self._ending.set()
        others = [child for child in self._children.values() if child is not self._last]
        for part in (others, [self._last]):
            for child in part:
                if child.running:
                    child.is_asked_to_end = True
                    child.signal_group(signal.SIGTERM)
            await asyncio.gather(*(self._see_end(child) for child in part))

    async def _see_end(self, child: Child) -> None:
        """Kill a child that was asked to end, and neither ends nor prints what it still has to do."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while not child.ended.is_set():
            until = min(max(asked, child.heard_at), asked + LAST_WORK_S) + GRACE_S + 2
            left = until - loop.time()
            if left <= 0:
                self._notice(f"{child.name} did not end in time; killed")
                child.signal_group(signal.SIGKILL)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await child.ended.wait()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
