"""Waits for what environments share: a turn to boot, a shared browser, a file that another one fetches.

    queueing            a context in which a call waits for others; its deadline stands still meanwhile
    QueuePlace          such a wait: pauses, and notes that others move on
    SharedLock          a lock of this process, for which calls wait in this manner
    leave_if_given_up   raises where the slot no longer waits for the call
    PendingCall         the call as its environment sees it
    OnQueue             what is told of such waits
    answering           makes a call that of this thread

An environment whose call waits without `queueing` waits within the call's deadline. Where no slot made the
call (a script, a test), the wait is the same, and no deadline stands still.
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
"""A lock that is free again within this time is waited for within the deadline, and without a report."""
POLL_S = 0.1
"""Time after which a call that waits for a lock looks whether its slot still waits for it."""


class GivenUpError(EnvError):
    """The slot no longer waits for this call: its deadline passed, or the slot is ending."""


@dataclass(frozen=True)
class SharedWait:
    """What a call waits for, as `dart status` shows it."""

    what: str  # e.g. "a turn to boot a guest"
    patience_s: float  # ends the wait once no other has moved on for so long


OnQueue = Callable[[SharedWait | None], None]
"""Takes what a call waits for, again whenever another one moves on; None once the call goes on."""


def ignore_queue(_: SharedWait | None) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class PendingCall:
    """A call of a slot, as the environment sees it that performs the call."""

    tell: OnQueue = ignore_queue
    given_up: Event = field(default_factory=Event)
    """Is set when the slot no longer waits for the answer."""


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
    """Raise GivenUpError where the slot no longer waits for the call that this thread performs."""
    _raise_if_given_up(_call.get() or PendingCall())


class QueuePlace:
    """A call's place in a queue. Made by `queueing`."""

    def __init__(self, call: PendingCall, shared_wait: SharedWait) -> None:
        self._call = call
        self._shared_wait = shared_wait
        self._still_s = 0.0  # summed over pauses: a process that was stopped has not waited

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`; return False once no other has moved on for the patience.

        Raises GivenUpError at once where the slot no longer waits for the call.
        """
        self._call.given_up.wait(seconds)
        return self.waited(seconds)

    def waited(self, seconds: float) -> bool:
        """Note a pause that the caller made itself; the same as `pause` otherwise."""
        _raise_if_given_up(self._call)
        self._still_s += seconds
        return self._still_s < self._shared_wait.patience_s

    def moved(self) -> None:
        """Note that another one got what this call waits for: the patience begins anew."""
        self._still_s = 0.0
        self._call.tell(self._shared_wait)


@contextmanager
def queueing(what: str, patience_s: float) -> Iterator[QueuePlace]:
    """Wait for what environments share; the deadline of the call stands still while inside.

    `what` names it in `dart status`. The caller pauses by QueuePlace and raises an EnvError of its own once
    `pause` returns False, which is after `patience_s` in which no other moved on. Raises GivenUpError
    where the slot no longer waits for the call. One such wait does not contain another.
    """
    call, shared_wait = _call.get() or PendingCall(), SharedWait(what, patience_s)
    _raise_if_given_up(call)
    call.tell(shared_wait)
    try:
        yield QueuePlace(call, shared_wait)
    finally:
        call.tell(None)


class SharedLock:
    """A lock of this process, for which calls wait in a queue: each gets it before those that came later."""

    def __init__(self, what: str) -> None:
        """Keep in `what` the name of what calls wait for, e.g. "the start of a shared browser"."""
        self._what = what
        self._lock = Lock()  # of the turns; held for moments
        self._turns: deque[Event] = deque()  # the first one is set: it holds the shared lock
        self._turns_taken = 0  # so often: others move on as it grows

    @contextmanager
    def hold(self, patience_s: float, otherwise: str) -> Iterator[None]:
        """Hold it while inside. Raises EnvError with the text `otherwise` once one holds it for `patience_s`."""
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
