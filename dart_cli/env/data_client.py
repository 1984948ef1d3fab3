"""Requests to the data service, which are repeated until the service answers.

DataClient       leases tasks and submits steps and ends; the TrajectorySink of an episode
LeaseWaitStats   measures how long slots wait for leases
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
"""Seconds that a stopping process tries to return its leases to the data service; otherwise they expire."""

STORE_PAUSE_S = 1.0
"""Seconds between a failure of the data service's database and the next request."""

LAST_LEASE_S = 5.0
"""Seconds that a request for a lease may take beyond the caller's limit. The data service holds such a
request for less than this, so that a lease that is already granted is not lost."""

LEAST_PAUSE_S = 0.02
"""Shortest pause between two requests for a lease, whatever pause the data service asks for."""


class LeaseWaitStats:
    """Statistics of the seconds from a slot's first request for a lease until it has one."""

    def __init__(
        self,
        newest: int = 1000,
        within_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compute the 99th percentile over the `newest` leases that are not older than `within_s`.

        At the start all slots ask at once: the last of 2,048 waits for seconds, which does not predict later
        waits.
        """
        self._count = 0
        self._total_s = 0.0
        self._newest: deque[tuple[float, float]] = deque(maxlen=newest)  # (time, seconds waited)
        self._within_s = within_s
        self._clock = clock

    def note(self, seconds: float) -> None:
        """Count one lease."""
        self._count += 1
        self._total_s += seconds
        self._newest.append((self._clock(), seconds))

    def gauges(self) -> dict[str, float]:
        """Return the gauges `leases`, `lease_wait_s` (sum) and `lease_p99_s` (0 if there was no lease)."""
        since = self._clock() - self._within_s
        ordered = sorted(seconds for at, seconds in self._newest if at >= since)
        p99_s = ordered[int(0.99 * len(ordered))] if ordered else 0.0
        return {
            "leases": float(self._count),
            "lease_wait_s": self._total_s,
            "lease_p99_s": p99_s,
        }


class DataClient:
    """A client of the data service. It waits while the service does not answer or its disk is full."""

    def __init__(
        self,
        requester: Requester,
        leases: Requester,
        deadline_s: float,
        heartbeat: HeartbeatSender,
        joined: asyncio.Event | None = None,
    ) -> None:
        """Send leases over the connection `leases`, and all else over `requester`.

        The data service holds a request for a lease for seconds, and a connection has a bounded number of
        requests in flight: over one connection, hundreds of free slots would delay the steps of others.
        Nothing is leased before `joined` is set.
        """
        self._requester = requester
        self._lease_requester = leases
        self._deadline_s = deadline_s
        self._heartbeat = heartbeat
        self._joined = joined
        self.leases = LeaseWaitStats()
        self._warnings = RepeatedWarnings(logger)

    def close(self) -> None:
        """Log the warnings that have not been logged yet."""
        self._warnings.close()

    async def lease(self, request: LeaseRequest, within_s: float = math.inf) -> Lease:
        """Wait for a lease and return it; the heartbeat reports why there is none yet.

        Raises DeadlineError after `within_s` seconds, with the reason of the wait, and TaskError if the
        request names a task that the run does not have.
        """
        since, what = time.monotonic(), "a lease from the data service"
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
                    what = f"a lease from the data service: {reply.reason}"
                    pause_s = max(reply.retry_after_s, LEAST_PAUSE_S)
                    await self._reporting(asyncio.sleep(pause_s), what, since, "lease")
        except TimeoutError:
            message = f"waited {within_s:g} s for {what}: dart data does not answer"
            raise DeadlineError(message) from None
        raise DeadlineError(f"waited {waited_s:.0f} s for {what}")

    async def step(self, record: StepRecord) -> Ack:
        """Submit a step and return the acknowledgement."""
        return await self._submit(record)

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Submit the end of a trajectory and return the acknowledgement."""
        return await self._submit(end)

    async def give_back(self, end: TrajectoryEnd) -> None:
        """Return a lease to the data service: submit `end`, the end of its trajectory.

        If the data service does not answer within `GIVE_BACK_S`, the lease expires later.
        """
        try:
            await self._requester.request(end, GIVE_BACK_S)
        except DartError as error:
            self._warnings.add(f"a lease was not given back, and expires: {error}")

    async def _submit(self, request: StepRecord | TrajectoryEnd) -> Ack:
        what = f"the data service to take {request.trajectory_id}"
        reply = await self._insist(request, what, time.monotonic(), "data", self._requester)
        assert isinstance(reply, Ack)
        return reply

    async def _insist(
        self, request: Request, what: str, since: float, on: str, requester: Requester
    ) -> Reply:
        """Repeat the request until it is answered, and return the answer.

        The id stays the same, except after a failure of the data service's database: that failure ends the
        service, and the next one accepts the request under a new id.
        """
        request_id = uuid.uuid4().bytes
        while True:
            asking = requester.request(request, self._deadline_s, request_id=request_id)
            try:
                return await self._reporting(asking, what, since, on)
            except DeadlineError as error:
                self._warnings.add(f"{error}; asking again")
            except StoreError as error:
                self._warnings.add(f"the data service: {error}; asking again")
                request_id = uuid.uuid4().bytes  # the old id would only get the old answer
                await self._reporting(asyncio.sleep(STORE_PAUSE_S), what, since, on)

    async def _reporting(self, wait: Awaitable[_T], what: str, since: float, on: str) -> _T:
        with self._heartbeat.waiting(what, since=since, on=on):
            return await wait
