"""Work beside other work.

background        coroutines that run while a block runs, and whose errors rise in it
in_daemon_thread  a blocking call in a thread that does not hold up the end of the process
unless_stopped    what a coroutine returns, unless a stop comes first (StopRequested)
run_until_stopped a verb's coroutine: its waits are shown, and its results so far where a signal stops it
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from dart_cli.runtime.role import stop_signals
from dart_cli.runtime.waits import OpenWaits, in_one

_T = TypeVar("_T")


class StopRequested(Exception):  # noqa: N818 - no error
    """A stop was requested while something was waited for."""


@contextlib.asynccontextmanager
async def background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `parts` while the block runs, and cancel them at its end.

    A part that fails cancels the block, and its error rises from the block as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def in_daemon_thread(call: Callable[[], _T]) -> _T:
    """Return what `call` returns or raises. A caller that waits no longer leaves it to itself.

    Unlike asyncio.to_thread, whose threads the end of an event loop waits for without a deadline.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def finish(value: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(value)  # type: ignore[arg-type]
        else:
            outcome.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # noqa: BLE001 - it is the caller's
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return await outcome


async def unless_stopped(stop: asyncio.Event, waiting: Coroutine[Any, Any, _T]) -> _T:
    """Return what `waiting` returns. Cancels it and raises StopRequested when `stop` is set."""
    if stop.is_set():  # it is not begun
        waiting.close()
        raise StopRequested
    task = asyncio.create_task(waiting)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StopRequested
        return task.result()
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


# --- a verb that a signal stops ------------------------------------------------------------


STOP_S = 15.0
"""Seconds after a signal within which environments and engines are closed."""


def run_until_stopped(
    work: Coroutine[Any, Any, None], waits: OpenWaits, at_stop: Callable[[], None]
) -> int:
    """Run `work` to its end, with its waits on stderr; returns 0, or 128 + the number of the signal that stopped it.

    The first SIGINT, SIGTERM or SIGHUP says what was waited for, calls `at_stop`, which prints what there is so
    far, and cancels `work`. A second one ends the process at once, as does the end of STOP_S: a thread that hangs
    is left to itself.
    """
    stopping = _Stopping(waits, at_stop)
    try:
        asyncio.run(stopping.watch(work))
    except asyncio.CancelledError:
        if not stopping.code:
            raise
        return stopping.code
    finally:
        stopping.end()
    return 0


class _Stopping:
    """Turns the first signal into a cancellation of the work."""

    def __init__(self, waits: OpenWaits, at_stop: Callable[[], None]) -> None:
        self.code = 0  # exit code that the first signal gives
        self._waits, self._at_stop = waits, at_stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: threading.Timer | None = None
        self._error: Exception | None = None  # of `at_stop`

    def end(self) -> None:
        """Leave the deadline, as the work is over. Raises what `at_stop` raised."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._error is not None:
            raise self._error

    async def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work as the task that the first signal cancels."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        with self._signals_taken():
            async with self._waits.shown():
                await work

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        """Handle the signals of `stop_signals` while the block runs."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in stop_signals()}
            before = {n: each for n, each in handlers.items() if each is not None}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.code:
            self._end_now()
        self.code = 128 + number
        self._deadline = threading.Timer(STOP_S, self._too_late)
        self._deadline.daemon = True
        self._deadline.start()
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        assert self._task is not None
        if self._task.done():
            return
        lines = self._waits.lines()
        waited = f"; it had waited {in_one(lines)}" if lines else ""
        sys.stderr.write(f"stopped by {signal.Signals(self.code - 128).name}{waited}\n")
        try:
            self._at_stop()
            sys.stdout.flush()  # the end may take seconds
        except Exception as error:  # noqa: BLE001 - it is raised once the work is cancelled
            self._error = error
        self._task.cancel()

    def _too_late(self) -> None:
        """End the process, unless the work has taken the signal as its own, as a prompt does."""
        if self._task is None or self._task.cancelling():
            self._end_now()

    def _end_now(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # another write of it may be under way
                stream.flush()
        os._exit(self.code)
