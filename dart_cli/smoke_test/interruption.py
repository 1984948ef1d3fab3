"""End a smoke test early: at a signal, or when its time is over.

    Interruption     is raised in the main thread, with the reason
    interruptible    runs a block that signals and the end of the time can interrupt
    end_descendants  kills all processes that this one has started

The processes of a smoke test are killed before its report is made. Processes that play environments first get
`CLOSING_S` seconds to close them, because a virtual machine would keep running.
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
"""Seconds in which a process may close its environments."""
PLAYING = ("env", "eval")
"""Commands of `dart` that play environments."""
LACK_OF_TIME = "for lack of time"


class Interruption(KeyboardInterrupt):
    """The smoke test was interrupted.

    It is a KeyboardInterrupt because asyncio passes no other error out of a callback.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_over = number == signal.SIGALRM  # whether its time is over
        self.why = LACK_OF_TIME if self.is_over else f"stopped by {signal.Signals(number).name}"


@contextlib.contextmanager
def interruptible(seconds: float) -> Iterator[None]:
    """Raise Interruption in the block at a signal of `stop_signals`, or after `seconds`.

    Before it is raised, all processes that this one has started are ended.
    """
    numbers = (*stop_signals(), signal.SIGALRM)

    def stop(number: int, _frame: FrameType | None) -> None:
        # From now on the alarm is ignored, and a second signal ends the process.
        for handled in numbers:
            signal.signal(handled, signal.SIG_IGN if handled == signal.SIGALRM else signal.SIG_DFL)
        end_descendants()
        raise Interruption(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def end_descendants() -> None:
    """Kill the processes that this one has started and all their descendants. Return when they have ended."""
    playing: list[psutil.Process] = []
    others: list[psutil.Process] = []
    _suspend(psutil.Process(), playing, others)
    for process in others:
        _send(process, signal.SIGKILL)
    for process in playing:
        _send(process, signal.SIGTERM)
    _await_end(playing)
    # A process that led a group may have left members of the group behind.
    for process in (*playing, *others):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    _await_end([*playing, *others])


def _suspend(
    process: psutil.Process, playing: list[psutil.Process], others: list[psutil.Process]
) -> None:
    """Add the descendants of `process` to `playing` if they play environments, else to `others`.

    The others are suspended, so that they start nothing more. Children of a process that plays are not added.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children():
            if _plays(child):
                playing.append(child)
            else:
                others.append(child)
                _send(child, signal.SIGSTOP)
                _suspend(child, playing, others)


def _await_end(processes: Sequence[psutil.Process]) -> None:
    """Return when all have ended, or after CLOSING_S.

    The supervisor that waits for them still gets the exit codes.
    """
    until = time.monotonic() + CLOSING_S
    while any(map(_lives, processes)) and time.monotonic() < until:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _plays(process: psutil.Process) -> bool:
    """Return True if a process runs a command of `dart` that plays environments."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()[1:4]
        return words[:2] == ["-m", "dart_cli"] and words[-1] in PLAYING
    return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process if it still exists."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
