"""What a process waits for, told to the person who started it; and where its time goes.

announced_waits         while a block runs: a line once a wait for another process lasts, and one when it is over
data_awaited       the wait for `dart data`, at its address
OpenWaits          what a verb that plays in one process waits for, written to stderr as it lasts
receive_telemetry  the messages of a subscriber, without end; a warning when data, which is there, is silent
PhaseTimer         seconds by phase: one phase at a time, every second in exactly one of them
as_gauges          the same in a heartbeat

The words are those of bus.heartbeat.awaited. The lines are no warnings, since `dart up`, which shows
warnings, starts all processes itself; they go to the terminal of a process started by hand, and to its log.
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
"""A wait that is over before needs no line: processes that start together wait for each other."""
AGAIN_S = 600.0
"""Seconds from one line of a wait to the next."""


def data_awaited(config: Config) -> str:
    """Return the wait for `dart data`, where there is no connection to it."""
    return awaited("data", at=run_endpoints(config).address(DATA))


@contextlib.asynccontextmanager
async def announced_waits(
    what: Callable[[], str], say: Callable[[str], None] = log.info
) -> AsyncIterator[None]:
    """While inside, `say` each wait that `what` names (empty: none) once it has lasted `SAY_AFTER_S`.

    Again each `AGAIN_S`; and once it is over.
    """
    following = asyncio.create_task(_follow(what, say), name="waits")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(what: Callable[[], str], say: Callable[[str], None]) -> None:
    present = told = ""
    # Sums of looks, no differences of a clock: a process that was stopped has not waited.
    lasted_s, since_told_s = 0.0, 0.0
    while True:
        seen = what()
        if seen != present:
            present, lasted_s = seen, 0.0
        if not present:
            if told:
                say(f"no longer waits for {_subject(told)}")
            told = ""
        elif present != told and lasted_s >= SAY_AFTER_S:
            say(f"waits for {present}")
            told, since_told_s = present, 0.0
        elif present == told and since_told_s >= AGAIN_S:
            say(f"has waited {lasted_s:.0f} s for {present}")
            since_told_s = 0.0
        await asyncio.sleep(LOOK_S)
        lasted_s += LOOK_S
        since_told_s += LOOK_S


def _subject(wait: str) -> str:
    """`dart data` of ``dart data: start `dart data CONFIG` ``."""
    return wait.partition(": ")[0]


# --- a verb that plays in one process ------------------------------------------------------


SHOWN_AFTER_S = 5.0
"""A wait that is over before needs no line of progress."""
WAITED = "has waited"
MOST_QUIET_S = 60.0
"""Longest time between two lines of waits that go on."""


class OpenWaits:
    """What the parts of this process wait for now. A WaitReporter (bus/heartbeat.py)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, float]] = {}  # what, and since when

    @contextlib.contextmanager
    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        since: float | None = None,
        on: str = "",  # noqa: ARG002 - heartbeats tell it
    ) -> Iterator[None]:
        """Note what is waited for while the block runs; `deadline_s` is only shown."""
        bound = "" if deadline_s is None else f" (at most {deadline_s:g} s)"
        number = next(self._numbers)
        self._open[number] = f"{what}{bound}", self._clock() if since is None else since
        try:
            yield
        finally:
            del self._open[number]

    def lines(self, after_s: float = 0.0) -> list[str]:
        """Return `12 s for check/0 to reset mini/popup` of each wait that has lasted `after_s`, the longest first."""
        now = self._clock()
        lasted = sorted(((now - since, what) for what, since in self._open.values()), reverse=True)
        return [f"{seconds:.0f} s for {what}" for seconds, what in lasted if seconds >= after_s]

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """While the block runs, write the longest wait to stderr once it has lasted, and again ever more rarely."""
        following = asyncio.create_task(self._follow(), name="waits")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        said_at, quiet_s = self._clock(), SHOWN_AFTER_S
        while True:
            await asyncio.sleep(LOOK_S)
            lines = self.lines(SHOWN_AFTER_S)
            if not lines:
                quiet_s = SHOWN_AFTER_S
            elif self._clock() - said_at >= quiet_s:
                sys.stderr.write(f"progress: {WAITED} {in_one(lines)}\n")
                sys.stderr.flush()
                said_at, quiet_s = self._clock(), min(2 * quiet_s, MOST_QUIET_S)


def in_one(lines: list[str]) -> str:
    """Return the first of several waits with the number of the others."""
    others = len(lines) - 1
    return lines[0] + (f", and for {others} other{'s' if others > 1 else ''}" if others else "")


# --- silence -----------------------------------------------------------------------------

LISTEN_S = 1.0
"""Longest wait for one message, of which silence is the sum."""
WARN_AGAIN_S = 600.0
"""Seconds from one warning of a silence to the next."""


async def receive_telemetry(
    subscriber: Subscriber, config: Config, is_there: Callable[[], bool]
) -> AsyncIterator[Message]:
    """Yield the messages of `subscriber`, without end.

    A warning if none arrived within DEADLINE_S though data `is_there`: else it is awaited, which
    announced_waits says.
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
            # Where this process was stopped (SIGSTOP), it is data's silence no longer than a slice.
            silent_s += slice_s
            if silent_s < warn_at_s:
                continue
            warn_at_s = silent_s + max(WARN_AGAIN_S, first_s)
            if is_there():
                log.warning(
                    "has heard nothing from dart data at %s for %g s, which is connected; see its log",
                    *(run_endpoints(config).address(DATA), silent_s),
                )
        else:
            silent_s, warn_at_s = 0.0, first_s
            yield message


# --- time --------------------------------------------------------------------------------


PREFIX = "seconds."
"""Prefix of the gauges that hold a PhaseTimer; `dart data` keeps their newest values by process."""


class PhaseTimer:
    """Seconds by phase since it was made, the present phase up to now included."""

    def __init__(
        self, phases: Iterable[str], now: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`phases` are all that may be entered, `now` is the one to begin with."""
        self._seconds = dict.fromkeys(phases, 0.0)
        self._clock = clock
        self._phase = now
        self._since = clock()

    @property
    def phase(self) -> str:
        """The present phase."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Enter `phase`, one of those named at the start."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds; they add up to the time since the start."""
        running = self._clock() - self._since
        return self._seconds | {self._phase: self._seconds[self._phase] + running}


def as_gauges(splits: Iterable[PhaseTimer]) -> dict[str, float]:
    """Return the sum of several splits, as gauges of a heartbeat: `seconds.PHASE`."""
    gauges: dict[str, float] = {}
    for timer in splits:
        for phase, seconds in timer.seconds().items():
            gauges[PREFIX + phase] = gauges.get(PREFIX + phase, 0.0) + seconds
    return gauges
