"""Run work beside other work, and stop it.

background         runs coroutines while a block runs; their errors are raised in the block
in_daemon_thread   makes a blocking call in a thread that does not delay the end of the process
unless_stopped     awaits a coroutine, and raises StopRequested if a stop comes first
run_until_stopped  runs a command's coroutine, shows its waits, and ends it cleanly at a signal
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
    """A stop was requested during a wait."""


@contextlib.asynccontextmanager
async def background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `parts` while the block runs, and cancel them at its end.

    If a part fails, the block is cancelled and the part's error is raised.
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
    """Run `call` in a daemon thread, and return its result or raise its error.

    If the caller is cancelled, the thread goes on alone. asyncio.to_thread differs in that the end of the
    event loop waits for its threads without a deadline.
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
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return await outcome


async def unless_stopped(stop: asyncio.Event, waiting: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `waiting`. If `stop` is set first, cancel it and raise StopRequested."""
    if stop.is_set():
        waiting.close()
        raise StopRequested
    task = asyncio.create_task(waiting)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StopRequested
        return task.result()
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


# --- a command that a signal stops ------------------------------------------------------------


STOP_S = 15.0
"""Seconds after a signal in which environments and engines must be closed."""


def run_until_stopped(
    work: Coroutine[Any, Any, None], waits: OpenWaits, at_stop: Callable[[], None]
) -> int:
    """Run `work` to its end, print its waits on stderr, and return the exit code.

    It is 0, or 128 + the number of the signal that stopped the work. The first SIGINT, SIGTERM or SIGHUP
    prints the current wait, calls `at_stop`, which prints the results so far, and cancels `work`. A second
    signal ends the process at once, and so does the end of STOP_S: a thread that hangs is not waited for.
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
    """Cancels the work at the first signal."""

    def __init__(self, waits: OpenWaits, at_stop: Callable[[], None]) -> None:
        self.code = 0  # exit code, set by the first signal
        self._waits, self._at_stop = waits, at_stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: threading.Timer | None = None
        self._error: Exception | None = None  # raised by `at_stop`

    def end(self) -> None:
        """Cancel the deadline because the work is over. Raises the error of `at_stop`, if there was one."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._error is not None:
            raise self._error

    async def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in the task that the first signal cancels."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        with self._signal_handlers():
            async with self._waits.show():
                await work

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Handle the signals of `stop_signals` while the block runs; then restore the earlier handlers."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in stop_signals()}
            before = {
                number: handler for number, handler in handlers.items() if handler is not None
            }
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop the work at the first signal, and end the process at the second."""
        if self.code:
            self._end_now()
        self.code = 128 + number
        self._deadline = threading.Timer(STOP_S, self._too_late)
        self._deadline.daemon = True
        self._deadline.start()
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """Print the wait and the results so far, and cancel the work."""
        assert self._task is not None
        if self._task.done():
            return
        lines = self._waits.lines()
        waited = f"; it had waited {in_one(lines)}" if lines else ""
        sys.stderr.write(f"stopped by {signal.Signals(self.code - 128).name}{waited}\n")
        try:
            self._at_stop()
            sys.stdout.flush()  # now, because the end may take seconds
        except Exception as error:  # noqa: BLE001 - `end` raises it
            self._error = error
        self._task.cancel()

    def _too_late(self) -> None:
        """End the process, unless the work has handled the cancellation itself, as a prompt does."""
        if self._task is None or self._task.cancelling():
            self._end_now()

    def _end_now(self) -> None:
        """Flush the standard streams, and end the process without any cleanup."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # another write may be in progress
                stream.flush()
        os._exit(self.code)
