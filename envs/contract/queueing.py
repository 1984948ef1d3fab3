"""Waits for what environments share: a turn to boot, a browser, a file that another one fetches.

    queueing            a context in which a call waits for others; its deadline stands still meanwhile
    QueuePlace          the wait of one call: it pauses, and notes when others get their turn
    SharedLock          a lock of this process for which calls wait in this way
    leave_if_given_up   raises GivenUpError if the slot no longer waits for the call
    PendingCall         a slot's call, as the environment sees it
    OnQueue             the function that is told what a call waits for
    answering           a context that makes a call the one that this thread performs

A call that waits without `queueing` uses up its deadline. A script or a test may use an environment without a
slot: then the waits are the same, and there is no deadline that stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event, Lock

from bus.errors import EnvError

UNSAID_S = 0.5
"""Seconds of waiting for a lock that still count towards the deadline, and are not reported."""
POLL_S = 0.1
"""Seconds between two checks of whether the slot still waits for a call that waits for a lock."""


class GivenUpError(EnvError):
    """The slot no longer waits for this call, since its deadline passed or the slot is ending."""


@dataclass(frozen=True)
class SharedWait:
    """The thing that a call waits for, as `dart status` shows it."""

    what: str  # e.g. "a turn to boot a guest"
    patience_s: float  # the wait ends once no other call got its turn for so long


OnQueue = Callable[[SharedWait | None], None]
"""A function that is called with what a call waits for, again whenever another call gets its turn, and with
None when the call goes on."""


def ignore_queue(_: SharedWait | None) -> None:
    """Ignore what a call waits for."""


@dataclass(frozen=True)
class PendingCall:
    """A call of a slot, as the environment sees it that performs the call."""

    tell: OnQueue = ignore_queue
    given_up: Event = field(default_factory=Event)
    """An event that is set when the slot no longer waits for the answer."""


_call: ContextVar[PendingCall | None] = ContextVar("pending_call", default=None)


@contextmanager
def answering(call: PendingCall) -> Iterator[None]:
    """Make `call` the one that this thread performs while inside."""
    before = _call.set(call)
    try:
        yield
    finally:
        _call.reset(before)


def leave_if_given_up() -> None:
    """Raise GivenUpError if the slot no longer waits for the call that this thread performs."""
    _raise_if_given_up(_call.get() or PendingCall())


class QueuePlace:
    """The wait of one call in a queue; `queueing` makes it."""

    def __init__(self, call: PendingCall, shared_wait: SharedWait) -> None:
        self._call = call
        self._shared_wait = shared_wait
        # Seconds without a turn of another call, summed over pauses: time in which this process was stopped
        # does not count.
        self._still_s = 0.0

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`. Return False once no other call got its turn within the patience.

        Raises GivenUpError at once if the slot no longer waits for the call.
        """
        self._call.given_up.wait(seconds)
        return self.waited(seconds)

    def waited(self, seconds: float) -> bool:
        """Count a pause that the caller made itself; otherwise like `pause`."""
        _raise_if_given_up(self._call)
        self._still_s += seconds
        return self._still_s < self._shared_wait.patience_s

    def moved(self) -> None:
        """Note that another call got its turn: the patience begins anew."""
        self._still_s = 0.0
        self._call.tell(self._shared_wait)


@contextmanager
def queueing(what: str, patience_s: float) -> Iterator[QueuePlace]:
    """Wait for what environments share; the deadline of the call stands still while inside.

    `what` is its name in `dart status`. The caller waits with `QueuePlace.pause` and raises its own EnvError
    once that returns False, which happens after `patience_s` in which no other call got its turn. Raises
    GivenUpError if the slot no longer waits for the call. One such wait must not contain another.
    """
    call, shared_wait = _call.get() or PendingCall(), SharedWait(what, patience_s)
    _raise_if_given_up(call)
    call.tell(shared_wait)
    try:
        yield QueuePlace(call, shared_wait)
    finally:
        call.tell(None)


class SharedLock:
    """A lock of this process for which calls wait in a queue, first come, first served."""

    def __init__(self, what: str) -> None:
        """Make a lock; `what` is what calls wait for, e.g. "the start of a shared browser"."""
        self._what = what
        self._lock = Lock()  # guards `_turns`, for moments only
        self._turns: deque[Event] = deque()  # the first one is set: its call holds the shared lock
        # How often a call got the lock. Waiting calls see by it that others move on.
        self._turns_taken = 0

    @contextmanager
    def hold(self, patience_s: float, otherwise: str) -> Iterator[None]:
        """Hold the lock while inside.

        Raises EnvError with the text `otherwise` once one call holds it for `patience_s`, and GivenUpError if
        the slot no longer waits for this call.
        """
        turn = Event()
        with self._lock:
            self._turns.append(turn)
            self._turns[0].set()
        try:
            if not turn.wait(min(UNSAID_S, patience_s)):
                with queueing(self._what, patience_s) as place:
                    self._wait(turn, place, otherwise)
            self._turns_taken += 1
            leave_if_given_up()
            yield
        finally:
            with self._lock:
                self._turns.remove(turn)
                if self._turns:
                    self._turns[0].set()

    def _wait(self, turn: Event, place: QueuePlace, otherwise: str) -> None:
        turns_before = self._turns_taken
        while not turn.wait(POLL_S):
            if self._turns_taken != turns_before:
                turns_before = self._turns_taken
                place.moved()
            if not place.waited(POLL_S):
                raise EnvError(otherwise)


def _raise_if_given_up(call: PendingCall) -> None:
    if call.given_up.is_set():
        raise GivenUpError("the slot no longer waits for this call")
