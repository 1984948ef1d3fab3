"""Carries calls to an environment, in a separate thread or process, with a deadline on each call.

ThreadedEnv   makes, uses and closes an environment in one thread: GUI environments block, and some must be
              used from the thread that made them
IsolatedEnv   does the same in one process, which is killed with its children if it hangs or crashes
stuck         makes the error of a slot in which too many environments hang

A call's deadline stands still while its environment is in a queue (envs/contract/queueing.py). If the slot no
longer waits for a call, the call leaves that queue at once: a thread sees its event, a process is killed.

A thread that hangs cannot be ended, and an environment that crashes in a thread ends the process with all its
slots. Therefore untrusted environments run in processes. This costs a Python process for each slot (40 MB and
more), and such environments cannot share anything (one browser).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bus.errors import EnvError, TaskError
from dart_cli.env.calls import Failure, perform
from dart_cli.env.child import LENGTHS, QUEUED, PipeMessage, decoded, lengths, pack, plain
from envs.contract.base import GuiEnv
from envs.contract.methods import call_method
from envs.contract.queueing import OnQueue, PendingCall, SharedWait, answering, ignore_queue
from envs.contract.screenshots import StoredEncoding
from envs.tools.process_tree import kill_tree

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0

MOST_HUNG = 8
"""Most environments of one slot that may hang at once. Each keeps its thread and memory until the process
ends."""

QUEUE_GRACE_S = 30.0
"""Seconds beyond the patience of a queue after which the call is given up, if the queue does not end by
itself."""


class _Clock:
    """The deadline of a call, which stands still while the environment is in a queue."""

    def __init__(self, timeout: asyncio.Timeout, on_queue: OnQueue) -> None:
        self.timeout = timeout
        self._on_queue = on_queue
        self._left_s = 0.0  # seconds left for the call when it entered the queue
        self._shared_wait: SharedWait | None = None
        self._over = False

    def note_queue(self, shared_wait: SharedWait | None) -> None:
        """Stop or restart the clock.

        `shared_wait` is what the environment is in a queue for; the same again means that another call moved
        on in that queue; None means that the queue is over.
        """
        if self._over or self.timeout.expired():
            return
        now, when = asyncio.get_running_loop().time(), self.timeout.when()
        assert when is not None, "each call has a deadline"
        was_queued = self._shared_wait is not None
        if shared_wait is not None:
            self._left_s = self._left_s if was_queued else when - now
            self.timeout.reschedule(now + shared_wait.patience_s + QUEUE_GRACE_S)
        elif was_queued:
            self.timeout.reschedule(now + self._left_s)
        self._shared_wait = shared_wait
        if was_queued is not (shared_wait is not None):
            self._on_queue(shared_wait)

    def end(self) -> None:
        """Ignore all later notes."""
        if not self._over and self._shared_wait is not None:
            self._on_queue(None)
        self._over = True

    def overrun(self, what: str, deadline_s: float) -> str:
        """Return the message for a call that was not answered in time."""
        shared_wait = self._shared_wait
        if shared_wait is None:
            return f"no answer to {what} in {deadline_s:g} s"
        return (
            f"no answer to {what}: it waits for {shared_wait.what}, where none has moved on for "
            f"{shared_wait.patience_s + QUEUE_GRACE_S:g} s"
        )


@dataclass(frozen=True)
class _EnvCall:
    what: str
    payload: Mapping[str, Any]
    answer: asyncio.Future[Any]
    pending: PendingCall


@dataclass
class _Thread:
    """The thread of one environment."""

    loop: asyncio.AbstractEventLoop
    calls: queue.SimpleQueue[_EnvCall | None]  # None closes the environment
    finished: asyncio.Future[None]  # done when the environment is closed


class ThreadedEnv:
    """A carrier of calls to one GuiEnv in a thread. See dart_cli.env.async_env.Carrier.

    The environment is made at the first call and again after `renew`. When a call overruns its deadline,
    its thread is abandoned and the next call makes a fresh environment, as long as fewer than
    `MOST_HUNG` abandoned ones still hang.
    """

    def __init__(
        self, make: Callable[[], GuiEnv], name: str, screens: StoredEncoding = "png"
    ) -> None:
        self.name = name
        self._make = make
        self._screens = screens
        self._thread: _Thread | None = None
        self._abandoned: list[asyncio.Future[None]] = []  # each is done when its thread ends

    @property
    def hung(self) -> int:
        """The number of environments that overran a deadline and have not returned since."""
        self._abandoned = [finished for finished in self._abandoned if not finished.done()]
        return len(self._abandoned)

    async def call(
        self,
        what: str,
        payload: Mapping[str, Any],
        deadline_s: float,
        on_queue: OnQueue = ignore_queue,
    ) -> Any:
        """Return the answer to a call. Raises EnvError if the call fails or overruns `deadline_s`."""
        thread = self._thread = self._thread or self._start_thread()
        answer = thread.loop.create_future()
        clock = _Clock(asyncio.timeout(deadline_s), on_queue)
        pending = PendingCall(functools.partial(_note_queue, thread.loop, clock))
        thread.calls.put(_EnvCall(what, payload, answer, pending))
        try:
            # Only this wait can time out: an error of the environment arrives as the answer.
            async with clock.timeout:
                await asyncio.wait([answer])
        except TimeoutError:
            if not answer.done():
                # If the call ever returns, the thread closes the environment.
                thread.calls.put(None)
                self._abandoned.append(thread.finished)
                self._thread = None
                raise EnvError(f"{self.name}: {clock.overrun(what, deadline_s)}") from None
        finally:
            clock.end()
            if not answer.done():
                pending.given_up.set()
                answer.cancel()  # its result is no longer needed
        result = answer.result()
        if isinstance(result, Failure):
            raise result.error(self.name, what)
        return result

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.calls.put(None)
        await asyncio.wait([thread.finished], timeout=CLOSE_DEADLINE_S)
        if not thread.finished.done():
            self._abandoned.append(thread.finished)
            logger.warning(
                "%s: did not close in %g s; its thread is abandoned", self.name, CLOSE_DEADLINE_S
            )

    def _start_thread(self) -> _Thread:
        """Start a thread for a fresh environment. Raises EnvError if too many environments hang."""
        if self.hung >= MOST_HUNG:
            raise stuck(self.name)
        loop = asyncio.get_running_loop()
        thread = _Thread(loop, queue.SimpleQueue(), loop.create_future())
        # A daemon: a hung environment must not keep the process from ending.
        threading.Thread(target=self._serve, args=(thread,), name=self.name, daemon=True).start()
        return thread

    def _serve(self, thread: _Thread) -> None:
        """Run the thread: make the environment, perform its calls one by one, and close it at the end."""
        env: GuiEnv | None = None
        while (call := thread.calls.get()) is not None:
            if call.pending.given_up.is_set():
                continue
            answer: Any
            try:
                with answering(call.pending):
                    env = self._make() if env is None else env
                    answer = perform(env, call.what, call.payload, self._screens)
            except BaseException as error:  # noqa: BLE001 - it is raised again in the slot
                answer = Failure.of(error, call.what)
            _post(thread.loop, call.answer, answer)
        try:
            if env is not None:
                call_method(env, "close")
        except BaseException:
            logger.exception("%s: close failed", self.name)
        _post(thread.loop, thread.finished, None)


def stuck(name: str) -> EnvError:
    """Return the error of a slot, or of a process, in which no more environments can be made."""
    return EnvError(
        f"{name}: {MOST_HUNG} of its environments hang, which only the end of the process frees; fix "
        'the suite, or set env.isolation = "process"'
    )


def _post(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
    """Set the result of a future that belongs to another thread's loop, unless the future was cancelled."""

    def settle() -> None:
        if not future.done():
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(settle)


def _note_queue(
    loop: asyncio.AbstractEventLoop, clock: _Clock, shared_wait: SharedWait | None
) -> None:
    """Call `note_queue` of a clock that belongs to another thread's loop."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(clock.note_queue, shared_wait)


KILL_DEADLINE_S = 5.0


class IsolatedEnv:
    """A carrier of calls to one GuiEnv in a process. See dart_cli.env.async_env.Carrier.

    A call starts the process if there is none: at the first call, after `renew`, after a call that overran
    its deadline or was cancelled, for which the process is killed, and after the process has ended by itself.
    """

    def __init__(
        self,
        suite: str,
        options: Mapping[str, Any],
        name: str,
        screens: StoredEncoding = "png",
        observe: Sequence[str] = (),
    ) -> None:
        """Raise TaskError if an option is not a plain value, since options are sent as JSON."""
        self._about = {
            "suite": suite,
            "options": dict(options),
            "observe": list(observe),
            "screens": screens,
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
        """The id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def call(
        self,
        what: str,
        payload: Mapping[str, Any],
        deadline_s: float,
        on_queue: OnQueue = ignore_queue,
    ) -> Any:
        """Return the answer to a call.

        Raises EnvError if the call fails or overruns `deadline_s`, or if the process ends.
        """
        clock = _Clock(asyncio.timeout(deadline_s), on_queue)
        try:
            async with clock.timeout:
                process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(pack({"call": what, **plain(payload)}))
                await process.stdin.drain()
                message = await read(process.stdout)
                while QUEUED in message[0]:
                    fields = message[0][QUEUED]
                    clock.note_queue(None if fields is None else SharedWait(**fields))
                    message = await read(process.stdout)
        except TimeoutError:
            overrun = clock.overrun(what, deadline_s)
            await self._end()
            raise EnvError(f"{self.name}: {overrun}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvError(f"{self.name}: {what}: its process {await self._end()}") from None
        except BaseException:
            await self._end()  # half an answer may be in the pipe
            raise
        finally:
            clock.end()
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
            sys.executable,
            "-m",
            "dart_cli.env.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pack(self._about))
        return self._process

    async def _end(self) -> str:
        """Kill the process with its children, and return in words how it had ended, or "hung" if it had not.

        This waits even if it is cancelled, since the process would be left behind otherwise.
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
        """Kill a process with its children, and return in words how it had ended; see `_end`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):  # a process that is exiting by itself gives its code
                await process.wait()
        code = process.returncode
        if code is None:
            await asyncio.to_thread(kill_tree, process.pid)
        # Children of a process that died by itself may still run.
        with contextlib.suppress(ProcessLookupError):
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
    """Return the next frame. Raises asyncio.IncompleteReadError at the end, EnvError if it is too large."""
    header, blob = lengths(await stream.readexactly(LENGTHS.size))
    return json.loads(await stream.readexactly(header)), await stream.readexactly(blob)
