"""A live service in the test's loop, and a client that speaks as env and train do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.messages import (
    Ack,
    Batch,
    BatchReply,
    BatchRequest,
    BatchTrained,
    HelloReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Outcome,
    RunState,
    StatusReply,
    StatusRequest,
    StepRecord,
    StopRequest,
    TrajectoryEnd,
)
from bus.pubsub import Publisher, Subscriber
from bus.requests import Requester
from bus.snapshot import Snapshot
from bus.weights import SyncDone, SyncReply, SyncRequest, WeightsPublished
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config
from dart_cli.data import service
from tests.data.parts import (
    heartbeat,
    hello,
    step_record,
    trajectory_end,
)
from tests.waiting import PATIENCE_S


@dataclass
class Client:
    """One connection to a live service, speaking for env and train alike."""

    requester: Requester
    publisher: Publisher
    states: Subscriber

    async def lease(self, slot: int, worker: str = "env-0", started_at: float = 0.0) -> LeaseReply:
        """Ask for a lease."""
        request = LeaseRequest(worker=worker, slot=slot, suites=["mini"], started_at=started_at)
        reply = await self.requester.request(request, PATIENCE_S)
        assert isinstance(reply, LeaseReply)
        return reply

    async def must_lease(self, slot: int, worker: str = "env-0") -> Lease:
        """A lease, asked for until it is there."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if lease := (await self.lease(slot, worker)).lease:
                    return lease

    async def tell(
        self,
        message: StepRecord
        | TrajectoryEnd
        | BatchTrained
        | WeightsPublished
        | StopRequest
        | SyncDone,
    ) -> Ack:
        """Hand something in."""
        reply = await self.requester.request(message, PATIENCE_S)
        assert isinstance(reply, Ack)
        return reply

    async def greet(self, last_batch_id: int) -> HelloReply:
        """A trainer whose checkpoint ends at that batch."""
        reply = await self.requester.request(hello(last_batch_id), PATIENCE_S)
        assert isinstance(reply, HelloReply)
        return reply

    async def play(
        self, slot: int, outcome: Outcome = "pass", *, steps: int = 2, version: int = 0
    ) -> Lease:
        """Lease, play and submit one trajectory."""
        lease = await self.must_lease(slot)
        await self.submit(lease, outcome, steps=steps, version=version)
        return lease

    async def submit(
        self, lease: Lease, outcome: Outcome, *, steps: int = 2, version: int = 0
    ) -> None:
        """Hand in a whole trajectory."""
        for step in range(steps):
            record = step_record(lease.trajectory_id, step, version=version)
            assert (await self.tell(record)).accepted
        assert (await self.tell(trajectory_end(lease.trajectory_id, steps, outcome))).accepted

    async def play_group(self, outcomes: list[Outcome], *, version: int = 0) -> str:
        """Play one group with these outcomes; returns its id."""
        leases = [await self.must_lease(slot) for slot in range(len(outcomes))]
        assert len({lease.group_id for lease in leases}) == 1
        for lease, outcome in zip(leases, outcomes, strict=True):
            await self.submit(lease, outcome, version=version)
        return leases[0].group_id

    async def batch(self, version: int = 0) -> BatchReply:
        """Ask for a batch."""
        reply = await self.requester.request(BatchRequest(policy_version=version), PATIENCE_S)
        assert isinstance(reply, BatchReply)
        return reply

    async def must_batch(self, version: int = 0) -> Batch:
        """A batch that must be there at once."""
        reply = await self.batch(version)
        assert reply.batch is not None, reply.reason
        return reply.batch

    async def publish(self, version: int, updates: int | None = None) -> None:
        """The trainer publishes weights, by default of as many updates as their number."""
        weights = WeightsPublished(
            policy_version=version,
            path=f"w/{version}",
            digest=f"d{version}",
            updates=version if updates is None else updates,
        )
        assert (await self.tell(weights)).accepted

    async def sync(self, worker: str, version: int) -> SyncReply:
        """A rollout worker that serves `version` asks for newer weights."""
        request = SyncRequest(worker=worker, policy_version=version)
        reply = await self.requester.request(request, PATIENCE_S)
        assert isinstance(reply, SyncReply)
        return reply

    async def snapshot(self) -> Snapshot:
        """The run as status sees it."""
        reply = await self.requester.request(StatusRequest(), PATIENCE_S)
        assert isinstance(reply, StatusReply)
        return Snapshot.model_validate(reply.snapshot)

    async def eventually(self, wanted: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot that is as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if wanted(seen := await self.snapshot()):
                    return seen
                await asyncio.sleep(0.05)

    async def state(self) -> RunState:
        """The next published RunState."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.states.next()
        assert isinstance(message, RunState)
        return message

    async def until(self, wanted: Callable[[RunState], bool]) -> RunState:
        """The first published RunState that is as wanted."""
        while not wanted(state := await self.state()):
            pass
        return state

    async def be_heard(self, worker: str, *, state: str = "ready", version: int = -1) -> None:
        """Publish a worker's heartbeat until data has heard it; the first may find no connection."""

        def is_heard(seen: Snapshot) -> bool:
            return (worker, version) in {(p.worker, p.policy_version) for p in seen.processes}

        async with asyncio.timeout(PATIENCE_S):
            while not is_heard(await self.snapshot()):
                self.publisher.publish(heartbeat(worker, version, state=state))
                await asyncio.sleep(0.05)

    def beat(self, trajectories: list[str], worker: str = "env-0", *, state: str = "ready") -> None:
        """Publish an environment's heartbeat."""
        self.publisher.publish(heartbeat(worker, state=state, trajectories=trajectories))


@contextlib.asynccontextmanager
async def connect(config: Config) -> AsyncIterator[Client]:
    """A client of the run's service, which may start later."""
    addresses = run_endpoints(config)
    async with (
        Requester(addresses.address(DATA), name="test", peer="dart data") as requester,
        Publisher(addresses.address(TELEMETRY_IN)) as publisher,
        Subscriber(addresses.address(TELEMETRY_OUT), [RunState]) as states,
    ):
        yield Client(requester, publisher, states)


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Client]:
    """A live service in this loop and a client of it."""
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(config, stop))
    try:
        async with connect(config) as client:
            waiting = asyncio.create_task(client.snapshot())
            await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                waiting.cancel()
                task.result()
            await waiting
            yield client
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task
