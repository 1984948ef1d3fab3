"""Requests to data: leases and hand-ins, repeated for as long as data is absent.

DataClient       leases a task, hands steps and ends in; the TrajectorySink of an episode
LeaseWaitStats   how long slots waited for leases
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.errors import DartError, DeadlineError, StoreError
from bus.heartbeat import HeartbeatSender
from bus.messages import (
    Ack,
    Lease,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    StepRecord,
    TrajectoryEnd,
)
from bus.requests import Requester
from dart_cli.runtime.joining import WHAT as JOINING
from dart_cli.runtime.logs import RepeatedWarnings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

GIVE_BACK_S = 2.0
"""Seconds a stopping process takes to return its leases to data; else they expire."""

STORE_PAUSE_S = 1.0
"""Pause after a failure of data's database, before the next request."""

LAST_LEASE_S = 5.0
"""Longer than data holds a request for a lease: one that is on its way is not given up."""

LEAST_PAUSE_S = 0.02
"""Shortest pause between two requests for a lease, whatever data asks for."""


class LeaseWaitStats:
    """Seconds from a slot's first request for a lease until it has one, even if there was no work."""

    def __init__(
        self,
        newest: int = 1000,
        within_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the 99th percentile of the `newest` leases, and of these within `within_s` alone.

        At the start all slots ask at once: of 2,048 the last one waits for seconds, which says nothing
        about later waits.
        """
        self._count = 0
        self._total_s = 0.0
        self._newest: deque[tuple[float, float]] = deque(maxlen=newest)  # when, and seconds
        self._within_s = within_s
        self._clock = clock

    def note(self, seconds: float) -> None:
        """Count one lease."""
        self._count += 1
        self._total_s += seconds
        self._newest.append((self._clock(), seconds))

    def gauges(self) -> dict[str, float]:
        """For the heartbeat: `leases`, `lease_wait_s` (summed), `lease_p99_s` (0 without one)."""
        since = self._clock() - self._within_s
        ordered = sorted(seconds for at, seconds in self._newest if at >= since)
        p99_s = ordered[int(0.99 * len(ordered))] if ordered else 0.0
        return {
            "leases": float(self._count),
            "lease_wait_s": self._total_s,
            "lease_p99_s": p99_s,
        }


class DataClient:
    """Leases and hand-ins. Waits as long as data is absent or its disk is full."""

    def __init__(
        self,
        requester: Requester,
        leases: Requester,
        deadline_s: float,
        heartbeat: HeartbeatSender,
        joined: asyncio.Event | None = None,
    ) -> None:
        """`leases` is a connection of its own. Nothing is leased before `joined` is set.

        Data holds a request for a lease for seconds, and a connection has a bounded number in flight:
        hundreds of free slots would keep the steps of others waiting.
        """
        self._requester = requester
        self._lease_requester = leases
        self._deadline_s = deadline_s
        self._heartbeat = heartbeat
        self._joined = joined
        self.leases = LeaseWaitStats()
        self._warnings = RepeatedWarnings(logger)

    def close(self) -> None:
        """Log the warnings that were not logged yet."""
        self._warnings.close()

    async def lease(self, request: LeaseRequest, within_s: float = math.inf) -> Lease:
        """Wait for a task to play; the heartbeat reports why there is none yet.

        Raises DeadlineError after `within_s` with what the wait was for, TaskError where the request names no
        task of the run.
        """
        since, what = time.monotonic(), "a lease from data"
        try:
            async with asyncio.timeout(None if within_s == math.inf else within_s + LAST_LEASE_S):
                if self._joined is not None and not self._joined.is_set():
                    await self._reporting(self._joined.wait(), JOINING, since, "data")
                while (waited_s := time.monotonic() - since) < within_s:
                    reply = await self._insist(request, what, since, "lease", self._lease_requester)
                    assert isinstance(reply, LeaseReply)
                    if reply.lease is not None:
                        self.leases.note(time.monotonic() - since)
                        return reply.lease
                    what = f"a lease from data: {reply.reason}"
                    pause_s = max(reply.retry_after_s, LEAST_PAUSE_S)
                    await self._reporting(asyncio.sleep(pause_s), what, since, "lease")
        except TimeoutError:
            told = f"waited {within_s:g} s for {what}: dart data does not answer"
            raise DeadlineError(told) from None
        raise DeadlineError(f"waited {waited_s:.0f} s for {what}")

    async def step(self, record: StepRecord) -> Ack:
        """Hand a step in; returns when data has it."""
        return await self._hand_in(record)

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Hand the end in; returns when data has it."""
        return await self._hand_in(end)

    async def give_back(self, end: TrajectoryEnd) -> None:
        """Return a lease to data, if it answers within `GIVE_BACK_S`; else the lease expires."""
        try:
            await self._requester.request(end, GIVE_BACK_S)
        except DartError as error:
            self._warnings.add(f"a lease was not given back, and expires: {error}")

    async def _hand_in(self, request: StepRecord | TrajectoryEnd) -> Ack:
        what = f"data to take {request.trajectory_id}"
        reply = await self._insist(request, what, time.monotonic(), "data", self._requester)
        assert isinstance(reply, Ack)
        return reply

    async def _insist(
        self, request: Request, what: str, since: float, on: str, requester: Requester
    ) -> Reply:
        """Repeat the request until it is answered, under the same id unless data's database fails.

        A database failure ends the data process; the next one accepts the request.
        """
        request_id = uuid.uuid4().bytes
        while True:
            asking = requester.request(request, self._deadline_s, request_id=request_id)
            try:
                return await self._reporting(asking, what, since, on)
            except DeadlineError as error:
                self._warnings.add(f"{error}; asking again")
            except StoreError as error:
                self._warnings.add(f"data: {error}; asking again")
                request_id = uuid.uuid4().bytes  # the old id would only get the old answer
                await self._reporting(asyncio.sleep(STORE_PAUSE_S), what, since, on)

    async def _reporting(self, wait: Awaitable[_T], what: str, since: float, on: str) -> _T:
        with self._heartbeat.waiting(what, since=since, on=on):
            return await wait
