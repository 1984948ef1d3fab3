"""Report what a process waits for, and how its time is spent.

announced_waits    prints a line, during a block, when a wait for another process lasts or is over
data_awaited       returns the wait for the data service in words, with its address
OpenWaits          registers the waits of a command that plays in one process, and prints long ones
receive_telemetry  yields the messages of a subscriber; logs a warning if a connected data service is silent
PhaseTimer         counts seconds by phase: one phase at a time, every second in exactly one of them
as_gauges          returns the seconds of PhaseTimers as gauges of a heartbeat

The words come from bus.heartbeat.awaited. The lines are logged as information, not as warnings: `dart up`
shows warnings, but starts all processes itself. They go to the terminal of a process that was started by
hand, and to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from bus.endpoints import DATA
from bus.heartbeat import awaited
from bus.messages import Message
from dart_cli.config import endpoints
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    from bus.pubsub import Subscriber

log = logging.getLogger(__name__)

LOOK_S = 0.25
SAY_AFTER_S = 1.25
"""Seconds from which on a wait is printed. Processes that start together wait for each other for a moment."""
AGAIN_S = 600.0
"""Seconds between two lines about the same wait."""


def data_awaited(config: Config) -> str:
    """Return the wait for the data service in words, for a process that is not connected to it."""
    return awaited("data", at=run_endpoints(config).address(DATA))


@contextlib.asynccontextmanager
async def announced_waits(
    what: Callable[[], str], say: Callable[[str], None] = log.info
) -> AsyncIterator[None]:
    """Call `say` about each wait while the block runs.

    `what` returns the current wait in words, empty if there is none. `say` is called once the wait has lasted
    `SAY_AFTER_S`, again every `AGAIN_S`, and when it is over.
    """
    following = asyncio.create_task(_follow(what, say), name="waits")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(what: Callable[[], str], say: Callable[[str], None]) -> None:
    """Look at the current wait every LOOK_S, and announce it."""
    current = announced = ""
    # Sums of intervals, not differences of a clock: a process that was suspended has not waited.
    lasted_s, since_announced_s = 0.0, 0.0
    while True:
        wait = what()
        if wait != current:
            current, lasted_s = wait, 0.0
        if not current:
            if announced:
                say(f"no longer waits for {_subject(announced)}")
            announced = ""
        elif current != announced and lasted_s >= SAY_AFTER_S:
            say(f"waits for {current}")
            announced, since_announced_s = current, 0.0
        elif current == announced and since_announced_s >= AGAIN_S:
            say(f"has waited {lasted_s:.0f} s for {current}")
            since_announced_s = 0.0
        await asyncio.sleep(LOOK_S)
        lasted_s += LOOK_S
        since_announced_s += LOOK_S


def _subject(wait: str) -> str:
    """Return `dart data` for the wait ``dart data: start `dart data CONFIG` ``."""
    return wait.partition(": ")[0]


# --- a command that plays in one process ------------------------------------------------------


SHOWN_AFTER_S = 5.0
"""Seconds from which on a wait is printed as a line of progress."""
WAITED = "has waited"
MOST_QUIET_S = 60.0
"""Most seconds between two lines about waits that go on."""


class OpenWaits:
    """The current waits of all parts of this process. It is a WaitReporter (bus/heartbeat.py)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, float]] = {}  # number -> (what is waited for, since when)

    @contextlib.contextmanager
    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        since: float | None = None,
        on: str = "",  # noqa: ARG002 - only heartbeats use it
    ) -> Iterator[None]:
        """Register a wait while the block runs. `deadline_s` is only printed."""
        bound = "" if deadline_s is None else f" (at most {deadline_s:g} s)"
        number = next(self._numbers)
        self._open[number] = f"{what}{bound}", self._clock() if since is None else since
        try:
            yield
        finally:
            del self._open[number]

    def lines(self, after_s: float = 0.0) -> list[str]:
        """Return a line for each wait that has lasted `after_s`, the longest first.

        Example: `12 s for check/0 to reset mini/popup`.
        """
        now = self._clock()
        lasted = sorted(((now - since, what) for what, since in self._open.values()), reverse=True)
        return [f"{seconds:.0f} s for {what}" for seconds, what in lasted if seconds >= after_s]

    @contextlib.asynccontextmanager
    async def show(self) -> AsyncIterator[None]:
        """Print the longest wait to stderr while the block runs, in growing intervals."""
        following = asyncio.create_task(self._follow(), name="waits")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        """Look at the longest wait every LOOK_S, and print it in growing intervals."""
        printed_at, quiet_s = self._clock(), SHOWN_AFTER_S
        while True:
            await asyncio.sleep(LOOK_S)
            lines = self.lines(SHOWN_AFTER_S)
            if not lines:
                quiet_s = SHOWN_AFTER_S
            elif self._clock() - printed_at >= quiet_s:
                sys.stderr.write(f"progress: {WAITED} {in_one(lines)}\n")
                sys.stderr.flush()
                printed_at, quiet_s = self._clock(), min(2 * quiet_s, MOST_QUIET_S)


def in_one(lines: list[str]) -> str:
    """Return one text for the lines of several waits: the first line, and the number of the others."""
    others = len(lines) - 1
    return lines[0] + (f", and for {others} other{'s' if others > 1 else ''}" if others else "")


# --- silence -----------------------------------------------------------------------------

LISTEN_S = 1.0
"""Most seconds of one wait for a message. The length of a silence is the sum of such waits."""
WARN_AGAIN_S = 600.0
"""Seconds between two warnings about the same silence."""


async def receive_telemetry(
    subscriber: Subscriber, config: Config, is_there: Callable[[], bool]
) -> AsyncIterator[Message]:
    """Yield the messages of `subscriber`, without end.

    Log a warning if none has arrived within DEADLINE_S although the data service `is_there`. If it is not
    there, announced_waits reports the wait.
    """
    first_s = endpoints.DEADLINE_S
    silent_s, warn_at_s = 0.0, first_s
    while True:
        slice_s = min(LISTEN_S, warn_at_s - silent_s)
        try:
            # Not asyncio.wait_for: until Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(slice_s):
                message = await subscriber.next()
        except TimeoutError:
            # If this process was suspended (SIGSTOP), only one slice counts as silence.
            silent_s += slice_s
            if silent_s < warn_at_s:
                continue
            warn_at_s = silent_s + max(WARN_AGAIN_S, first_s)
            if is_there():
                log.warning(
                    "no message from the connected data service at %s for %g s; see its log",
                    run_endpoints(config).address(DATA),
                    silent_s,
                )
        else:
            silent_s, warn_at_s = 0.0, first_s
            yield message


# --- time --------------------------------------------------------------------------------


PREFIX = "seconds."
"""Prefix of the gauges of a PhaseTimer. The data service keeps their newest values by process."""


class PhaseTimer:
    """A timer that counts the seconds in each phase, from its creation up to now."""

    def __init__(
        self, phases: Iterable[str], now: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin in the phase `now`; `phases` are all phases that may be entered."""
        self._seconds = dict.fromkeys(phases, 0.0)
        self._clock = clock
        self._phase = now
        self._since = clock()

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Enter `phase`, which must be one of the phases that were named at the start."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds. The sum is the time since the start."""
        running = self._clock() - self._since
        return self._seconds | {self._phase: self._seconds[self._phase] + running}


def as_gauges(timers: Iterable[PhaseTimer]) -> dict[str, float]:
    """Return the sums of several timers as gauges of a heartbeat: `seconds.PHASE`."""
    gauges: dict[str, float] = {}
    for timer in timers:
        for phase, seconds in timer.seconds().items():
            gauges[PREFIX + phase] = gauges.get(PREFIX + phase, 0.0) + seconds
    return gauges
