"""An environment in a process of its own, which is killed if it hangs, crashes or uses too much memory.

    IsolatedEnv      starts the process, calls it with a deadline, ends it with its child processes
    make_async_env   an environment in a thread or in a process, as the configuration says

A thread that hangs cannot be ended, and a process that runs out of memory takes all slots with it:
environments that are not trusted run here. It costs a Python process for each slot (40 MB and more),
and environments that otherwise share something (one browser) no longer do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from bus.errors import ActionCausedError, EnvError, NoOracleError, TaskError
from bus.heartbeat import WaitReporter
from dart_cli.config.schema import EnvConfig, observed_kinds
from dart_cli.env import calls
from dart_cli.env.calls import (
    AS_GIVEN,
    AsyncEnv,
    Deadlines,
    Looked,
    StepResult,
    reporting_wait,
)
from dart_cli.env.child import TOO_MANY
from dart_cli.env.judged import with_judge
from dart_cli.env.pipe import PipeMessage, pack, read
from dart_cli.env.threaded import CLOSE_DEADLINE_S, ThreadedEnv
from envs.actions import Action, action_from_dict, action_to_dict
from envs.base import Observation, Task, Verdict
from envs.elements import ScreenState, element_from_dict
from envs.process_tree import kill_tree
from envs.registry import make_env
from envs.screenshots import ScreenFormat

logger = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0

_KINDS = {each.__name__: each for each in (EnvError, NoOracleError, ActionCausedError)}
"""Errors that keep their class on the way out of the process."""


def make_async_env(config: EnvConfig, name: str, waits: WaitReporter | None = None) -> AsyncEnv:
    """An environment of the run's suite, isolated as env.isolation says; `name` is used in errors.

    Each pending call is reported to `waits`, e.g. "env-0/2 to reset mini/popup".
    """
    deadlines = Deadlines(
        config.reset_deadline_s, config.step_deadline_s, config.evaluate_deadline_s
    )
    has_key, ignore = config.screen_match == "similar", tuple(config.screen_ignore)
    screens = ScreenFormat(config.screenshots, config.screenshot_quality, has_key, ignore)
    return with_judge(_isolated(config, name, deadlines, screens, waits), config, name, waits)


def _isolated(
    config: EnvConfig,
    name: str,
    deadlines: Deadlines,
    screens: ScreenFormat,
    waits: WaitReporter | None,
) -> AsyncEnv:
    if config.isolation == "process":
        return IsolatedEnv(
            config.suite,
            config.options,
            observe=observed_kinds(config),
            screens=screens,
            name=name,
            deadlines=deadlines,
            memory_mb=config.memory_mb,
            max_processes=config.max_processes,
            pass_threshold=config.pass_threshold,
            waits=waits,
        )
    return ThreadedEnv(
        lambda: make_env(config.suite, observe=observed_kinds(config), **config.options),
        screens=screens,
        name=name,
        deadlines=deadlines,
        pass_threshold=config.pass_threshold,
        waits=waits,
    )


class IsolatedEnv:
    """Calls one GuiEnv in a process. See dart_cli.env.calls.AsyncEnv.

    The process is started at the first call and again after `renew`, or after it was killed: for a
    call that overran its deadline or was cancelled, or because it ended by itself.
    """

    def __init__(
        self,
        suite: str,
        options: Mapping[str, Any],
        *,
        observe: Sequence[str] = (),
        screens: ScreenFormat = AS_GIVEN,
        name: str,
        deadlines: Deadlines,
        memory_mb: int = 0,
        max_processes: int = 0,
        pass_threshold: float = 1.0,
        waits: WaitReporter | None = None,
    ) -> None:
        """`memory_mb` bounds the private memory of each process, `max_processes` their number; 0: no.

        `pass_threshold` is the reward that a pass needs where the environment gives a reward alone.
        Raises TaskError for options that are no plain values.
        """
        self._about = {
            "suite": suite,
            "options": dict(options),
            "observe": list(observe),
            "screens": list(astuple(screens)),
            "memory_mb": memory_mb,
            "max_processes": max_processes,
        }
        try:
            json.dumps(self._about)
        except TypeError as error:
            raise TaskError(f"options of suite {suite} for another process: {error}") from None
        self._name = name
        self._deadlines = deadlines
        self._pass_threshold = pass_threshold
        self._waits = waits
        self._task_id = "no task"  # the newest that was begun
        self._steps_left = 0  # until it is cut off
        self._process: asyncio.subprocess.Process | None = None

    @property
    def hung(self) -> int:
        """Always 0: a process that hangs is killed."""
        return 0

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def reset(self, task: Task, seed: int, *, free: bool = False) -> tuple[Observation, str]:
        """Start the task; returns the first observation and the instruction. Raises EnvError."""
        self._task_id, self._steps_left = task.id, task.max_steps
        header, blob = await self._call(
            "reset", self._deadlines.reset_s, {"task": task.id, "seed": seed, "free": free}
        )
        return _screen(header, blob), header["instruction"]

    async def judge_start(self) -> Verdict | None:
        """The verdict on the state right after `reset`; None where it cannot be told."""
        header, _ = await self._call("judge_start", self._deadlines.evaluate_s)
        return self._verdict(header["verdict"]) if header["verdict"] else None

    async def step(self, action: Action) -> StepResult:
        """Perform one action. Raises EnvError."""
        self._steps_left -= 1
        deadline_s = self._deadlines.of_step(action, last=self._steps_left <= 0)
        call = {"action": action_to_dict(action)}
        header, blob = await self._call("step", deadline_s, call)
        return StepResult(
            _screen(header, blob), header["terminated"], header["truncated"], header["reward"]
        )

    async def evaluate(self) -> Verdict:
        """Judge the present state. Raises EnvError where the evaluator broke."""
        header, _ = await self._call("evaluate", self._deadlines.evaluate_s)
        return self._verdict(header["verdict"])

    async def solve(self) -> tuple[Action, str]:
        """The environment's own next action, and its hint. Raises NoOracleError, EnvError."""
        header, _ = await self._call("solve", self._deadlines.step_s)
        return action_from_dict(header["action"]), header["hint"]

    async def look(self) -> Looked | None:
        """The present screen's state and elements; None where the environment cannot tell them."""
        header, _ = await self._call("look", self._deadlines.step_s)
        if header["state"] is None:
            return None
        return ScreenState(**header["state"]), [element_from_dict(e) for e in header["elements"]]

    async def renew(self) -> None:
        """Close the environment and end its process; the next call starts a fresh one."""
        if self._process is None:
            return
        try:
            await self._call("close", CLOSE_DEADLINE_S)
        except EnvError as error:
            logger.warning("%s", error)
        await self._end()

    async def close(self) -> None:
        """Free everything; may be called twice."""
        await self.renew()

    async def _call(
        self, what: str, deadline_s: float, call: Mapping[str, Any] | None = None
    ) -> PipeMessage:
        try:
            told = reporting_wait(
                self._waits, f"{self._name} to {what} {self._task_id}", deadline_s
            )
            with told:
                async with asyncio.timeout(deadline_s):
                    process = self._process or await self._start()
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(pack({"call": what, **(call or {})}))
                    await process.stdin.drain()
                    header, blob = await read(process.stdout)
        except TimeoutError:
            await self._end()
            raise EnvError(f"{self._name}: no answer to {what} in {deadline_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvError(f"{self._name}: {what}: its process {await self._end()}") from None
        except BaseException:
            await self._end()  # half an answer may be on its way
            raise
        if "error" in header:
            if "traceback" in header:
                calls.log_traceback(f"{self._name}: {what} failed", *header["traceback"])
            raise _KINDS[header["kind"]](f"{self._name}: {header['error']}")
        return header, blob

    def _verdict(self, told: list[Any]) -> Verdict:
        return Verdict(*told).with_threshold(self._pass_threshold)

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dart_cli.env.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pack(self._about))
        return self._process

    async def _end(self) -> str:
        """Kill the process and its child processes; returns how it had ended, if it had.

        Waits for this even if cancelled: the process would be left behind otherwise.
        """
        process, self._process = self._process, None
        if process is None:
            return "was not there"
        ending = asyncio.create_task(self._kill(process))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    async def _kill(self, process: asyncio.subprocess.Process) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):  # if it is exiting by itself, get its exit code
                await process.wait()
        code = process.returncode
        if code is None:
            await asyncio.to_thread(kill_tree, process.pid)
        with contextlib.suppress(ProcessLookupError):  # what is left of one that died by itself
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await process.wait()
        except TimeoutError:
            logger.error("%s: process %d does not die", self._name, process.pid)
        if code is None:
            return "hung"
        if code == TOO_MANY:
            return "had more processes than env.max_processes"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _screen(header: Mapping[str, Any], blob: bytes) -> Observation:
    size = header["width"], header["height"]
    return Observation(blob, header["media_type"], *size, header["texts"], header["screen_key"])
