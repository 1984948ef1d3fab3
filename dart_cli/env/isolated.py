"""An environment in a process of its own, which is killed if it hangs or crashes.

A thread that hangs cannot be ended, and a process that crashes takes all slots with it:
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

from bus.errors import EnvError, TaskError
from dart_cli.env.calls import AS_GIVEN, Failure
from dart_cli.env.child import LENGTHS, PipeMessage, decoded, lengths, pack, plain
from dart_cli.env.threaded import CLOSE_DEADLINE_S
from envs.process_tree import kill_tree
from envs.screenshots import ScreenFormat

logger = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0


class IsolatedEnv:
    """Carries calls to one GuiEnv in a process. See dart_cli.env.async_env.Carrier.

    The process is started at the first call and again after `renew`, or after it was killed: for a
    call that overran its deadline or was cancelled, or because it ended by itself.
    """

    def __init__(
        self,
        suite: str,
        options: Mapping[str, Any],
        name: str,
        screens: ScreenFormat = AS_GIVEN,
        observe: Sequence[str] = (),
    ) -> None:
        """Raises TaskError for options that are no plain values."""
        self._about = {
            "suite": suite,
            "options": dict(options),
            "observe": list(observe),
            "screens": list(astuple(screens)),
        }
        try:
            json.dumps(self._about)
        except TypeError as error:
            raise TaskError(f"options of suite {suite} for another process: {error}") from None
        self.name = name
        self._process: asyncio.subprocess.Process | None = None

    @property
    def hung(self) -> int:
        """Always 0: a process that hangs is killed."""
        return 0

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def call(self, what: str, payload: Mapping[str, Any], deadline_s: float) -> Any:
        """The answer to a call. Raises EnvError."""
        try:
            async with asyncio.timeout(deadline_s):
                process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(pack({"call": what, **plain(payload)}))
                await process.stdin.drain()
                message = await read(process.stdout)
        except TimeoutError:
            await self._end()
            raise EnvError(f"{self.name}: no answer to {what} in {deadline_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvError(f"{self.name}: {what}: its process {await self._end()}") from None
        except BaseException:
            await self._end()  # half an answer may be on its way
            raise
        if "failure" in message[0]:
            raise Failure(**message[0]["failure"]).error(self.name, what)
        return decoded(what, message)

    async def renew(self) -> None:
        """Close the environment and end its process; the next call starts a fresh one."""
        if self._process is None:
            return
        try:
            await self.call("close", {}, CLOSE_DEADLINE_S)
        except EnvError as error:
            logger.warning("%s", error)
        await self._end()

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
            logger.error("%s: process %d does not die", self.name, process.pid)
        if code is None:
            return "hung"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


async def read(stream: asyncio.StreamReader) -> PipeMessage:
    """The next frame. Raises asyncio.IncompleteReadError at the end, EnvError for one too large."""
    header, blob = lengths(await stream.readexactly(LENGTHS.size))
    return json.loads(await stream.readexactly(header)), await stream.readexactly(blob)
