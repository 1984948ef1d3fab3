"""A command of `dart` on a node of the cluster, as the run's supervisor sees it.

    RemoteProcess   the child of one RoleHost: its output, its end, its signals
    Ranks           the processes of a trainer with ranks on several nodes, as one

Both are a Process (runtime/supervisor.py). A process whose node or actor is lost has ended with LOST: the
supervisor then starts the command again, where Ray has started its actor again.
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
"""The exit code of a process that was lost with its node."""
POLL_S = 5.0
"""Seconds that an actor waits for its child to print something, before it says that nothing is new."""
LATE_S = 3.0
"""Seconds that an answer may be late before the cluster is asked whether the node lives."""
SILENCE_S = 60.0
"""Seconds without an answer of an actor, on a node that lives, after which its process is lost."""
RANKS_END_S = 20.0
"""Seconds that ranks have to end by themselves once one of them is gone; then they are killed."""
_AGAIN_S = 0.5
_LOST_LINE = b"\nits node is gone, or Ray's process there\n"
"""The last of its output, which says why it ended."""


class RemoteProcess:
    """A child of a RoleHost. See Process; made and used inside one running loop."""

    def __init__(
        self,
        host: Any,
        life: str,
        node: Node,
        log: Callable[[bytes], object],
        lives: Callable[[Node], Awaitable[bool]],
    ) -> None:
        """`host` is the actor's handle; `log` takes what the child's own log has more; `lives`: its node."""
        self.output = asyncio.StreamReader()
        self.returncode: int | None = None
        self.node = node
        self._host, self._life, self._log, self._lives = host, life, log, lives
        self._was_lost = False
        self._signals: set[asyncio.Future[None]] = set()
        self._following = asyncio.create_task(self._follow())

    async def wait(self) -> int:
        """Return the exit code, once it has ended."""
        return await asyncio.shield(self._following)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started, soon."""
        sent = asyncio.wrap_future(self._host.signal.remote(self._life, int(number)).future())
        self._signals.add(sent)
        sent.add_done_callback(self._signals.discard)
        sent.add_done_callback(ignore_error)

    def how_it_ended(self, code: int) -> str:
        """Return how the process ended: `ended with 1 on gpu-box`, `was lost on gpu-box`."""
        if self._was_lost:
            return f"was lost on {self.node.host}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"{how} on {self.node.host}"

    async def _follow(self) -> int:
        """Copy what it prints, until it has ended or is lost."""
        code: int | None = None
        heard = time.monotonic()
        while code is None:
            printed = await self._printed()
            if printed is None or time.monotonic() - heard > SILENCE_S:
                self._was_lost, code = True, LOST
            elif printed:
                heard = time.monotonic()
                self.output.feed_data(printed["output"])
                if printed["log"]:
                    self._log(printed["log"])
                code = printed["code"]
            else:
                await asyncio.sleep(_AGAIN_S)
        if self._was_lost:
            self.output.feed_data(_LOST_LINE)
        self.returncode = code
        self.output.feed_eof()
        return code

    async def _printed(self) -> ChildOutput | dict[str, Any] | None:
        """Return what is new; empty where the actor cannot be asked at the moment; None where it is lost."""
        import ray

        asked = asyncio.wrap_future(self._host.printed.remote(self._life, POLL_S).future())
        asked.add_done_callback(ignore_error)
        until = time.monotonic() + SILENCE_S
        within_s = POLL_S + LATE_S
        while not (await asyncio.wait([asked], timeout=within_s))[0]:
            within_s = LATE_S
            if not await self._lives(self.node):
                return None  # Ray fails the calls to a node that vanished late, or not at all
            if time.monotonic() > until:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(self._host, no_restart=False)
                return None
        try:
            told: ChildOutput | None = asked.result()
        except ray.exceptions.ActorUnavailableError:
            return {}
        except ray.exceptions.RayError:
            return None
        return told


def ignore_error(answered: asyncio.Future[Any]) -> None:
    """Read an error that is of no interest any more, so that it is not reported as forgotten."""
    if not answered.cancelled():
        answered.exception()


class Ranks:
    """The ranks of one trainer: they end together, and the first one speaks for all."""

    def __init__(self, ranks: Sequence[RemoteProcess]) -> None:
        self._ranks = ranks
        self.output = asyncio.StreamReader()
        self.returncode: int | None = None
        self._first: RemoteProcess | None = None
        self._copying = [asyncio.create_task(self._copy(rank)) for rank in ranks]
        self._waiting = asyncio.create_task(self._all())

    async def wait(self) -> int:
        """Return the exit code of the first that failed, once all have ended; 0 where none did."""
        return await asyncio.shield(self._waiting)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all ranks and everything they started."""
        for rank in self._ranks:
            rank.signal_group(number)

    def how_it_ended(self, code: int) -> str:
        """Of the rank that failed first."""
        failed = self._first or self._ranks[0]
        return f"(rank {self._ranks.index(failed)}) {failed.how_it_ended(code)}"

    async def _copy(self, rank: RemoteProcess) -> None:
        while chunk := await rank.output.read(65536):
            self.output.feed_data(chunk)

    async def _all(self) -> int:
        """Return an exit code once all ranks have ended: the others end by themselves when one is gone (docs/box.md), or are killed."""
        waits = {asyncio.create_task(rank.wait()): rank for rank in self._ranks}
        pending = set(waits)
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=None if self._first is None else RANKS_END_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                self.signal_group(signal.SIGKILL)
            for task in done:
                if task.result() != 0 and self._first is None:
                    self._first = waits[task]
        await asyncio.gather(*self._copying)
        self.returncode = 0 if self._first is None else self._first.returncode
        self.output.feed_eof()
        assert self.returncode is not None
        return self.returncode
