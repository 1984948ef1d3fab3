"""Work beside other work.

background        coroutines that run while a block runs, and whose errors rise in it
in_daemon_thread  a blocking call in a thread that does not hold up the end of the process
unless_stopped    what a coroutine returns, unless a stop comes first (StopRequested)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

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
    """What `call` returns or raises. A caller that waits no longer leaves it to itself.

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
    """What `waiting` returns. Cancels it and raises StopRequested when `stop` is set."""
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
