"""The end of a rehearsal before its end: by a signal, or as its time is over.

    Stopped          raised in the main thread; says why
    stoppable        a block that a signal and the end of the time stop
    end_descendants  kills all that this process has started

Nothing of a rehearsal outlives it: its processes are killed before its report is made. Those that play environments
get `CLOSING_S` to close them, since a virtual machine would stay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil

from dart_cli.runtime.role import stop_signals

CLOSING_S = 3.0
"""Seconds that a process has to close its environments."""
PLAYING = ("env", "eval")
"""The verbs of processes that have environments."""
LACK = "for lack of time"


class Stopped(KeyboardInterrupt):
    """The rehearsal was stopped. A KeyboardInterrupt, since asyncio lets no other exception out of a callback."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_over = number == signal.SIGALRM  # its time is over
        self.why = LACK if self.is_over else f"stopped by {signal.Signals(number).name}"


@contextlib.contextmanager
def stoppable(seconds: float) -> Iterator[None]:
    """Raise Stopped within the block at a signal of `stop_signals`, or after `seconds`; all that was started is gone then."""
    stopping = (*stop_signals(), signal.SIGALRM)

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in stopping:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGALRM else signal.SIG_DFL)
        end_descendants()
        raise Stopped(number)

    before = {each: signal.signal(each, stop) for each in stopping}
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def end_descendants() -> None:
    """Kill the processes that this one has started, and theirs; return when all are gone."""
    playing: list[psutil.Process] = []
    others: list[psutil.Process] = []
    _hold(psutil.Process(), playing, others)
    for each in others:
        _send(each, signal.SIGKILL)
    for each in playing:
        _send(each, signal.SIGTERM)
    _await_end(playing)
    for each in (*playing, *others):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(each.pid, signal.SIGKILL)  # what a leader of a group leaves behind
    _await_end([*playing, *others])


def _hold(
    process: psutil.Process, playing: list[psutil.Process], others: list[psutil.Process]
) -> None:
    """List what `process` has started: processes that play environments, and others, which are suspended.

    What is suspended starts nothing more. Of a process that plays, its own processes are not listed.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children():
            if _plays(child):
                playing.append(child)
            else:
                others.append(child)
                _send(child, signal.SIGSTOP)
                _hold(child, playing, others)


def _await_end(processes: Sequence[psutil.Process]) -> None:
    """Return once all have ended, or after CLOSING_S. Exit codes are left to the supervisor that waits for them."""
    until = time.monotonic() + CLOSING_S
    while any(map(_lives, processes)) and time.monotonic() < until:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _plays(process: psutil.Process) -> bool:
    """Return whether a process is a verb of `dart` that plays environments."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()[1:4]
        return words[:2] == ["-m", "dart_cli"] and words[-1] in PLAYING
    return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
