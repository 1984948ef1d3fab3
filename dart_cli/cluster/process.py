"""Commands of `dart` on nodes of the cluster, as the run's supervisor sees them.

    RemoteProcess   the child of one RoleHost: its output, its end, its signals
    Ranks           the processes of a trainer with ranks on several nodes, as one process

Both are a Process (runtime/supervisor.py). A process whose node or actor is lost ends with the code LOST. The
supervisor then starts the command again, on the node where Ray has restarted its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dart_cli.cluster.demands import Node
from dart_cli.cluster.role_host import ChildOutput

LOST = -int(signal.SIGKILL)
"""The exit code of a process whose node or actor is lost."""
POLL_S = 5.0
"""Seconds for which an actor waits for output of its child before it answers that there is none."""
LATE_S = 3.0
"""Seconds by which an answer may be late before the cluster is asked whether the node lives."""
SILENCE_S = 60.0
"""Seconds without an answer of an actor on a living node, after which its process counts as lost."""
RANKS_END_S = 20.0
"""Seconds in which ranks must end by themselves once one of them is gone; then they are killed."""
_AGAIN_S = 0.5
_LOST_LINE = b"\nits node is gone, or Ray's process there\n"
"""The last line of a lost process's output, which says why it ended."""


class RemoteProcess:
    """A child of a RoleHost (see Process). It is created and used inside one running event loop."""

    def __init__(
        self,
        host: Any,
        life: str,
        node: Node,
        log: Callable[[bytes], object],
        lives: Callable[[Node], Awaitable[bool]],
    ) -> None:
        """Follow the child of the actor `host` on `node`.

        `log` is called with new content of the child's log, `lives` returns whether a node lives.
        """
        self.output = asyncio.StreamReader()
        self.returncode: int | None = None
        self.node = node
        self._host, self._life, self._log, self._lives = host, life, log, lives
        self._was_lost = False
        self._signals: set[asyncio.Future[None]] = set()
        self._following = asyncio.create_task(self._follow())

    async def wait(self) -> int:
        """Wait until the process has ended, and return the exit code."""
        return await asyncio.shield(self._following)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started, without waiting."""
        sent = asyncio.wrap_future(self._host.signal.remote(self._life, int(number)).future())
        self._signals.add(sent)
        sent.add_done_callback(self._signals.discard)
        sent.add_done_callback(ignore_error)

    def how_it_ended(self, code: int) -> str:
        """Return how the process ended, such as `ended with 1 on gpu-box` or `was lost on gpu-box`."""
        if self._was_lost:
            return f"was lost on {self.node.host}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"{how} on {self.node.host}"

    async def _follow(self) -> int:
        """Copy the output until the process has ended or is lost, and return the exit code."""
        code: int | None = None
        answered_at = time.monotonic()
        while code is None:
            news = await self._new_output()
            if news is None or time.monotonic() - answered_at > SILENCE_S:
                self._was_lost, code = True, LOST
            elif news:
                answered_at = time.monotonic()
                self.output.feed_data(news["output"])
                if news["log"]:
                    self._log(news["log"])
                code = news["code"]
            else:
                await asyncio.sleep(_AGAIN_S)
        if self._was_lost:
            self.output.feed_data(_LOST_LINE)
        self.returncode = code
        self.output.feed_eof()
        return code

    async def _new_output(self) -> ChildOutput | dict[str, Any] | None:
        """Return new output; an empty dict if the actor cannot be asked at the moment; None if it is lost."""
        import ray

        answer = asyncio.wrap_future(self._host.new_output.remote(self._life, POLL_S).future())
        answer.add_done_callback(ignore_error)
        until = time.monotonic() + SILENCE_S
        within_s = POLL_S + LATE_S
        while not (await asyncio.wait([answer], timeout=within_s))[0]:
            within_s = LATE_S
            if not await self._lives(self.node):
                return None  # Ray reports calls to a lost node late, or never
            if time.monotonic() > until:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(self._host, no_restart=False)
                return None
        try:
            output: ChildOutput | None = answer.result()
        except ray.exceptions.ActorUnavailableError:
            return {}
        except ray.exceptions.RayError:
            return None
        return output


def ignore_error(answer: asyncio.Future[Any]) -> None:
    """Read the error of a future that is no longer needed, so that asyncio does not report it."""
    if not answer.cancelled():
        answer.exception()


class Ranks:
    """The ranks of one trainer as one process.

    They end together; the first that fails determines the exit code.
    """

    def __init__(self, ranks: Sequence[RemoteProcess]) -> None:
        self._ranks = ranks
        self.output = asyncio.StreamReader()
        self.returncode: int | None = None
        self._first: RemoteProcess | None = None
        self._copying = [asyncio.create_task(self._copy(rank)) for rank in ranks]
        self._waiting = asyncio.create_task(self._wait_for_all())

    async def wait(self) -> int:
        """Wait until all ranks have ended; return the exit code of the first that failed, 0 if none did."""
        return await asyncio.shield(self._waiting)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all ranks and everything they started."""
        for rank in self._ranks:
            rank.signal_group(number)

    def how_it_ended(self, code: int) -> str:
        """Return which rank failed first, and how it ended with `code`."""
        failed = self._first or self._ranks[0]
        return f"(rank {self._ranks.index(failed)}) {failed.how_it_ended(code)}"

    async def _copy(self, rank: RemoteProcess) -> None:
        """Copy the output of one rank until its end."""
        while chunk := await rank.output.read(65536):
            self.output.feed_data(chunk)

    async def _wait_for_all(self) -> int:
        """Wait until all ranks have ended, and return the exit code.

        When one rank is gone, the others end by themselves (docs/box.md), or are killed after RANKS_END_S.
        """
        waits = {asyncio.create_task(rank.wait()): rank for rank in self._ranks}
        pending = set(waits)
        while pending:
            finished, pending = await asyncio.wait(
                pending,
                timeout=None if self._first is None else RANKS_END_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not finished:
                self.signal_group(signal.SIGKILL)
            for task in finished:
                if task.result() != 0 and self._first is None:
                    self._first = waits[task]
        await asyncio.gather(*self._copying)
        self.returncode = 0 if self._first is None else self._first.returncode
        self.output.feed_eof()
        assert self.returncode is not None
        return self.returncode
