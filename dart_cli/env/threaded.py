"""An environment in a thread of its own, with a deadline on every call.

GUI environments block; some must be used from the thread that made them. ThreadedEnv makes, uses
and closes one there, so that the event loop that plays many of them never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bus.errors import EnvError
from dart_cli.env.calls import AS_GIVEN, Failure, perform
from envs.base import GuiEnv
from envs.screenshots import ScreenFormat

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0

MOST_HUNG = 8
"""Environments of one slot that may hang at once: each keeps its thread and its memory."""


@dataclass(frozen=True)
class _EnvCall:
    what: str
    payload: Mapping[str, Any]
    answer: asyncio.Future[Any]


@dataclass
class _Thread:
    """One environment's: its calls, and whether it has ended."""

    loop: asyncio.AbstractEventLoop
    calls: queue.SimpleQueue[_EnvCall | None]
    ended: asyncio.Future[None]


class ThreadedEnv:
    """Carries calls to one GuiEnv. See dart_cli.env.async_env.Carrier.

    The environment is made at the first call and again after `renew`. When a call overruns its deadline,
    its thread is abandoned and the next call makes a fresh environment, as long as fewer than
    `MOST_HUNG` abandoned ones still hang.
    """

    def __init__(
        self, make: Callable[[], GuiEnv], name: str, screens: ScreenFormat = AS_GIVEN
    ) -> None:
        self.name = name
        self._make = make
        self._screens = screens
        self._thread: _Thread | None = None
        self._left: list[asyncio.Future[None]] = []  # done when an abandoned thread ends

    @property
    def hung(self) -> int:
        """Environments that overran a deadline and have not come back since."""
        self._left = [ended for ended in self._left if not ended.done()]
        return len(self._left)

    async def call(self, what: str, payload: Mapping[str, Any], deadline_s: float) -> Any:
        """The answer to a call. Raises EnvError."""
        thread = self._thread = self._thread or self._started()
        call = _EnvCall(what, payload, thread.loop.create_future())
        thread.calls.put(call)
        try:
            # Not asyncio.timeout: its TimeoutError could be one that the environment raised.
            await asyncio.wait([call.answer], timeout=deadline_s)
            if not call.answer.done():
                thread.calls.put(
                    None
                )  # if the call ever returns, the thread closes the environment
                self._left.append(thread.ended)
                self._thread = None
                raise EnvError(f"{self.name}: no answer to {what} in {deadline_s:g} s")
            answer = call.answer.result()
        finally:
            call.answer.cancel()  # its result is no longer needed
        if isinstance(answer, Failure):
            raise answer.error(self.name, what)
        return answer

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.calls.put(None)
        await asyncio.wait([thread.ended], timeout=CLOSE_DEADLINE_S)
        if not thread.ended.done():
            self._left.append(thread.ended)
            logger.warning(
                "%s: did not close in %g s; its thread is abandoned", self.name, CLOSE_DEADLINE_S
            )

    def _started(self) -> _Thread:
        if self.hung >= MOST_HUNG:
            raise EnvError(
                f"{self.name}: {MOST_HUNG} of its environments hang; fix the suite, or set "
                'env.isolation = "process"'
            )
        loop = asyncio.get_running_loop()
        thread = _Thread(loop, queue.SimpleQueue(), loop.create_future())
        # A daemon: a hung environment must not keep the process from ending.
        threading.Thread(target=self._serve, args=(thread,), name=self.name, daemon=True).start()
        return thread

    def _serve(self, thread: _Thread) -> None:
        env: GuiEnv | None = None
        while (call := thread.calls.get()) is not None:
            answer: Any
            try:
                env = self._make() if env is None else env
                answer = perform(env, call.what, call.payload, self._screens)
            except BaseException as error:  # noqa: BLE001 - it is raised again in the slot
                answer = Failure.of(error, call.what)
            _post(thread.loop, call.answer, answer)
        try:
            if env is not None:
                env.close()
        except BaseException:
            logger.exception("%s: close failed", self.name)
        _post(thread.loop, thread.ended, None)


def _post(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
    """Settle a future of another thread's loop, unless it was cancelled."""

    def settle() -> None:
        if not future.done():
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(settle)
