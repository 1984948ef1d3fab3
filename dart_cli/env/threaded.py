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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from bus.errors import DartError, EnvError
from bus.heartbeat import WaitReporter
from dart_cli.env import calls
from dart_cli.env.calls import Deadlines, Looked, StepResult, reporting_wait
from envs.actions import Action
from envs.base import GuiEnv, Observation, Task, Verdict
from envs.screenshots import ScreenFormat

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0

MOST_HUNG = 8
"""Environments of one slot that may hang at once: each keeps its thread and its memory."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class _EnvCall:
    what: str
    work: Callable[[GuiEnv], Any]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class ThreadedEnv:
    """Calls one GuiEnv from the event loop; `name` is used in errors.

    The environment is made at the first call and again after `renew`. All its errors become EnvError.
    When a call overruns its deadline, its thread is abandoned and the next call makes a fresh
    environment, as long as fewer than `MOST_HUNG` abandoned ones still hang.
    """

    def __init__(
        self,
        make: Callable[[], GuiEnv],
        *,
        name: str,
        deadlines: Deadlines,
        screens: ScreenFormat = calls.AS_GIVEN,
        pass_threshold: float = 1.0,
        waits: WaitReporter | None = None,
    ) -> None:
        """Each pending call is reported to `waits`, e.g. "env-0/2 to reset mini/popup".

        `pass_threshold` is the reward that a pass needs where the environment gives a reward alone.
        """
        self._make = make
        self._screens = screens
        self._name = name
        self._deadlines = deadlines
        self._pass_threshold = pass_threshold
        self._waits = waits
        self._task_id = "no task"  # the newest that was begun
        self._steps_left = 0  # until it is cut off
        self._jobs: queue.SimpleQueue[_EnvCall | None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._left: list[asyncio.Future[None]] = []  # done when an abandoned thread ends

    @property
    def hung(self) -> int:
        """Environments that overran a deadline and have not come back since."""
        self._left = [ended for ended in self._left if not ended.done()]
        return len(self._left)

    async def reset(self, task: Task, seed: int, *, free: bool = False) -> tuple[Observation, str]:
        """Start the task; returns the first observation and the instruction. Raises EnvError."""
        self._task_id, self._steps_left = task.id, task.max_steps
        return await self._call(
            "reset",
            self._deadlines.reset_s,
            lambda env: calls.reset(env, task, seed, self._screens, free=free),
        )

    async def judge_start(self) -> Verdict | None:
        """The verdict on the state right after `reset`; None where it cannot be told.

        Raises EnvError for an evaluator that hangs.
        """
        verdict = await self._call("evaluate", self._deadlines.evaluate_s, calls.judge_start)
        return None if verdict is None else verdict.with_threshold(self._pass_threshold)

    async def step(self, action: Action) -> StepResult:
        """Perform one action. Raises EnvError."""
        self._steps_left -= 1
        deadline_s = self._deadlines.of_step(action, last=self._steps_left <= 0)
        return await self._call(
            "step", deadline_s, lambda env: calls.step(env, action, self._screens)
        )

    async def evaluate(self) -> Verdict:
        """Judge the present state. Raises EnvError where the evaluator broke."""
        verdict = await self._call("evaluate", self._deadlines.evaluate_s, calls.evaluate)
        return verdict.with_threshold(self._pass_threshold)

    async def solve(self) -> tuple[Action, str]:
        """The environment's own next action, and its hint.

        Raises NoOracleError where it knows no solution, EnvError where it finds no way.
        """
        return await self._call("solve", self._deadlines.step_s, calls.solve)

    async def look(self) -> Looked | None:
        """The present screen's state and elements; None where the environment cannot tell them."""
        return await self._call("look", self._deadlines.step_s, calls.look)

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        jobs, ended = self._jobs, self._ended
        self._jobs = self._ended = None
        if jobs is None or ended is None:
            return
        jobs.put(None)
        await asyncio.wait([ended], timeout=CLOSE_DEADLINE_S)
        if not ended.done():
            self._left.append(ended)
            logger.warning(
                "%s: did not close in %g s; its thread is abandoned", self._name, CLOSE_DEADLINE_S
            )

    async def close(self) -> None:
        """Free everything; may be called twice."""
        await self.renew()

    async def _call(self, what: str, deadline_s: float, work: Callable[[GuiEnv], _T]) -> _T:
        loop = asyncio.get_running_loop()
        if self._jobs is None:
            if self.hung >= MOST_HUNG:
                raise EnvError(
                    f"{self._name}: {MOST_HUNG} of its environments hang; fix the suite, or set "
                    'env.isolation = "process"'
                )
            self._jobs, self._ended = queue.SimpleQueue(), loop.create_future()
            threading.Thread(
                target=self._serve,
                args=(self._jobs, self._ended, loop),
                name=self._name,
                daemon=True,  # a hung environment must not keep the process from ending
            ).start()
        job = _EnvCall(what, work, loop.create_future(), loop)
        self._jobs.put(job)
        try:
            # Not asyncio.timeout: its TimeoutError could be one that the environment raised.
            with reporting_wait(self._waits, f"{self._name} to {what} {self._task_id}", deadline_s):
                await asyncio.wait([job.answer], timeout=deadline_s)
            if not job.answer.done():
                self._jobs.put(None)  # if the call ever returns, the thread closes the environment
                if self._ended is not None:
                    self._left.append(self._ended)
                self._jobs = self._ended = None
                raise EnvError(f"{self._name}: no answer to {what} in {deadline_s:g} s")
            return job.answer.result()  # type: ignore[no-any-return]
        except EnvError:
            raise
        except DartError as error:
            raise EnvError(f"{self._name}: {what}: {error}") from error
        except Exception as error:
            calls.log_traceback(f"{self._name}: {what} failed", *calls.traceback_of(error))
            raise EnvError(f"{self._name}: {what}: {type(error).__name__}: {error}") from error
        finally:
            job.answer.cancel()  # its result is no longer needed

    def _serve(
        self,
        jobs: queue.SimpleQueue[_EnvCall | None],
        ended: asyncio.Future[None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        env: GuiEnv | None = None
        while (job := jobs.get()) is not None:
            try:
                env = self._make() if env is None else env
                result = job.work(env)
            except BaseException as error:  # noqa: BLE001 - it is raised again in _call
                _post(
                    job.loop,
                    job.answer,
                    error=calls.as_regular_exception(error, f"{self._name}: {job.what}"),
                )
            else:
                _post(job.loop, job.answer, result=result)
        try:
            if env is not None:
                env.close()
        except BaseException:
            logger.exception("%s: close failed", self._name)
        _post(loop, ended)


def _post(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    *,
    result: Any = None,
    error: Exception | None = None,
) -> None:
    """Settle a future of another thread's loop, unless it was cancelled."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(settle)
