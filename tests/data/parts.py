"""What the data tests share: a small run, and clients that speak as env and train do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.messages import (
    Ack,
    Batch,
    BatchReply,
    BatchRequest,
    BatchTrained,
    Heartbeat,
    Lease,
    LeaseReply,
    LeaseRequest,
    Outcome,
    RunState,
    SampledTokens,
    StatusReply,
    StatusRequest,
    StepRecord,
    StopReason,
    StopRequest,
    SyncDone,
    SyncReply,
    SyncRequest,
    TrainerHello,
    TrajectoryEnd,
    VersionSpan,
    WeightsPublished,
)
from bus.pubsub import Publisher, Subscriber
from bus.requester import Requester
from bus.snapshot import Snapshot
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data import service
from dart_cli.data.curate import FinishedGroup, Member
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NoLease, make_scheduler
from dart_cli.data.store.rows import PoolRow, PoolSource, StepRow
from dart_cli.data.store.writer import Store
from envs.base import content_hash
from tests.waiting import PATIENCE_S

DEADLINE_S = PATIENCE_S


def small_config(run_dir: Path, **data: object) -> Config:
    """A run of two tasks in groups of four, two groups a batch."""
    settings = {"group_size": 4, "groups_per_batch": 2, "max_open_groups": 6, **data}
    tasks = [task.id for task in training_tasks(Config())[:2]]
    return Config.model_validate(
        {"run": {"dir": run_dir, "seed": 3}, "env": {"tasks": tasks}, "data": settings}
    )


def picture(*parts: object) -> bytes:
    """Bytes that stand for a screenshot, other ones for other parts."""
    return b"\x89PNG" + hashlib.blake2b(repr(parts).encode()).digest() * 20


def step_record(
    trajectory_id: str, step: int, *, version: int = 0, image: bytes | None = None
) -> StepRecord:
    """A step whose numbers follow from its trajectory and index."""
    image = image or picture(trajectory_id, step)
    tokens = [step + 1, step + 2, 7]
    return StepRecord(
        trajectory_id=trajectory_id,
        step=step,
        screenshot=image,
        media_type="image/png",
        image_hashes=[content_hash(image)],
        prompt_token_ids=[5] * 40 + [step],
        sampled=SampledTokens(
            token_ids=tokens,
            behaviour_logprobs=[-0.1 * (step + 1), -1 / 3, -2.0],
            entropies=[0.1, 0.2, 0.3 * (crc32(f"{trajectory_id}:{step}".encode()) % 7)],
            version_spans=[VersionSpan(version=version, start=0, end=3)],
        ),
        worker="rollout-0",
        text="Action: click(start_box='(1,2)')",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=0.01,
        env_s=0.001,
        instruction="" if step else "click the red one",
    )


def trajectory_end(
    trajectory_id: str, steps: int, outcome: Outcome = "pass", stop_reason: StopReason = "done"
) -> TrajectoryEnd:
    """The end of an episode."""
    return TrajectoryEnd(
        trajectory_id=trajectory_id,
        steps=steps,
        outcome=outcome,
        reason="because",
        stop_reason=stop_reason,
        screenshot=picture(trajectory_id, "final"),
        reset_s=0.01,
        wall_s=0.1,
    )


def finished_group(name: str, outcomes: list[Outcome], version: int = 0) -> FinishedGroup:
    """A group whose members took two steps each."""
    return FinishedGroup(
        name, tuple(Member(f"{name}-{i:02d}", o, 2, version) for i, o in enumerate(outcomes))
    )


def pool_member(
    name: str,
    *,
    task_id: str = "mini/click",
    source: PoolSource = "oracle",
    steps: int = 2,
    known: bool = False,
    added_at: float = 500.0,
    first: bytes | None = None,
) -> tuple[PoolRow, list[StepRow], dict[str, bytes]]:
    """A success from outside; `first` is its first screenshot."""
    row = PoolRow(name, "mini", task_id, 7, source, steps, known, "", added_at, None, 0)
    filed, images = [], {}
    for number in range(steps):
        record = step_record(name, number, image=None if number else first)
        images[record.image_hashes[-1]] = record.screenshot
        filed.append(
            StepRow(
                trajectory_id=name,
                step=number,
                at=added_at,
                screenshot=record.image_hashes[-1],
                image_hashes=record.image_hashes,
                prompt_token_ids=record.prompt_token_ids,
                sampled=record.sampled,
                text=record.text,
                action=record.action,
                error="",
                model_s=0.0,
                env_s=0.0,
                worker="",
            )
        )
    return row, filed, images


@dataclass
class Clock:
    """Time that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make_ledger(config: Config, store: Store, clock: Clock | None = None) -> Ledger:
    """A ledger as the service makes it."""
    tasks = training_tasks(config)
    store.begin_run(config.run.seed, config.model_dump_json(), tasks)
    clock = clock or Clock()
    return Ledger(config, store, tasks, make_scheduler(config, tasks), wall=clock, monotonic=clock)


def ask_lease(ledger: Ledger, slot: int, worker: str = "env-0") -> Lease:
    """A lease that must be there."""
    found = ledger.lease(LeaseRequest(worker=worker, slot=slot, suites=["mini"]))
    assert isinstance(found, Lease), found
    return found


def play(
    ledger: Ledger, slot: int, outcome: Outcome = "pass", *, steps: int = 2, version: int = 0
) -> Lease:
    """Lease, play and hand in one trajectory."""
    lease = ask_lease(ledger, slot)
    for step in range(steps):
        assert ledger.step(step_record(lease.trajectory_id, step, version=version)).accepted
    assert ledger.end(trajectory_end(lease.trajectory_id, steps, outcome)).accepted
    return lease


def play_group(ledger: Ledger, outcomes: list[Outcome], *, steps: int = 2, version: int = 0) -> str:
    """Play one group with these outcomes, in order of its members; returns its id."""
    leases = [ask_lease(ledger, slot) for slot in range(len(outcomes))]
    assert len({lease.group_id for lease in leases}) == 1
    for lease, outcome in zip(leases, outcomes, strict=True):
        for step in range(steps):
            ledger.step(step_record(lease.trajectory_id, step, version=version))
        ledger.end(trajectory_end(lease.trajectory_id, steps, outcome))
    return leases[0].group_id


MIXED: list[Outcome] = ["pass", "fail", "fail", "pass"]


def a_batch(found: Batch | NoLease) -> Batch:
    """A batch that must be there."""
    assert isinstance(found, Batch), found
    return found


def trained(batch_id: int, version: int | None = None) -> BatchTrained:
    """The trainer's acknowledgement of a batch."""
    after = batch_id if version is None else version
    return BatchTrained(batch_id=batch_id, policy_version=after, metrics={"loss": 1.0 / batch_id})


def hello(last_batch_id: int) -> TrainerHello:
    """A trainer whose checkpoint ends at that batch."""
    return TrainerHello(
        policy_version=last_batch_id, batches_trained=[], last_batch_id=last_batch_id
    )


def picture_of(ledger: Ledger) -> object:
    """All of a ledger that must survive a restart."""
    groups = {
        group.id: (
            group.state,
            group.task_seed,
            (group.size, group.max_steps),
            group.pool_member and group.pool_member.trajectory_id,
            {
                a.id: (a.state, a.outcome, a.slot, a.oldest_version, a.entropies)
                for a in group.attempts.values()
                if a.state != "dropped"
            },
            len(group.attempts),
        )
        for group in ledger.group_table.groups.values()
    }
    tasks = {
        task_id: (
            fares,
            ledger.leasing.next_size(task_id),
            ledger.leasing.step_limit(task_id),
            [member.trajectory_id for member in ledger.pool.members(task_id)],
        )
        for task_id, fares in ledger.progress.tasks.items()
    }
    return groups, ledger.group_table.opened, ledger.updates, ledger.weights, tasks


def assert_sums_are_conserved(ledger: Ledger, store: Store) -> None:
    """Each trajectory is in play, pending, in one batch, trained, or dropped for a reason.

    And each step of those in a batch is trained on or left out for a reason.
    """
    rows = store.trajectories()
    live = {attempt.id for _, attempt in ledger.group_table.live()}
    pending = {a.id for group in ledger.group_table.groups.values() for a in group.finished}
    for row in rows:
        reasons = [told for told in store.decisions(row.id) if told.reason != "pool"]
        assert (row.id in live) == (row.state in ("leased", "playing"))
        assert (row.id in pending) == (row.state == "finished")
        assert (row.batch_id is not None) == (row.state in ("batched", "trained"))
        assert bool(row.reason) == (row.state == "dropped")
        assert [d.used for d in reasons] == {
            "dropped": [False],
            "batched": [True],
            "trained": [True],
        }.get(row.state, [])
        assert row.outcome != "invalid" or row.state == "dropped"
    assert {row.trajectory_id for row in store.pool()} == {
        member.trajectory_id
        for task_id in {row.task_id for row in store.pool(evicted=True)}
        for member in ledger.pool.members(task_id)
    }
    for batch in store.batches():
        _assert_steps_are_conserved(store, batch.id)


def _assert_steps_are_conserved(store: Store, batch_id: int) -> None:
    """All steps of the batch's groups and of those that joined them from the pool, each once."""
    told = store.batch_rows(batch_id)
    groups = [group for group in store.groups() if group.batch_id == batch_id]
    members = [row for row in store.trajectories(group_ids=[g.id for g in groups]) if row.batch_id]
    joined = [
        member for g in groups if g.pool_member and (member := store.pool_member(g.pool_member))
    ]
    own = [(row.id, step) for row in members for step in range(row.steps or 0)]
    pooled = [(row.trajectory_id, step) for row in joined for step in range(row.steps)]
    assert sorted((s.trajectory_id, s.step) for s in told if s.reason != "pool") == sorted(own)
    assert sorted((s.trajectory_id, s.step) for s in told if s.reason == "pool") == sorted(pooled)
    assert all((s.weight == 0) == (s.reason == "low_entropy") for s in told)
    assert [(s.trajectory_id, s.step, s.advantage) for s in told if s.weight] == [
        (s.trajectory_id, s.step, s.advantage) for s in store.batch_samples(batch_id)
    ]
    for group in groups:
        of_group = [row for row in members if row.group_id == group.id]
        assert len({row.max_steps for row in of_group}) == 1
        outcomes = {row.outcome for row in of_group}
        assert outcomes == ({"fail"} if group.pool_member else {"pass", "fail"})


def heartbeat(
    worker: str, version: int = -1, *, state: str = "ready", trajectories: Sequence[str] = ()
) -> Heartbeat:
    """What a process says each second; its role follows from its name."""
    return Heartbeat(
        role="rollout" if worker.startswith("rollout") else "env",
        worker=worker,
        host="here",
        pid=1,
        started_at=1.0,
        sent_at=2.0,
        endpoint="",
        policy_version=version,
        state=state,
        waiting_for="",
        waiting_s=0.0,
        gauges={"slots": 2.0},
        trajectories=list(trajectories),
    )


def sync_done(worker: str, version: int, error: str = "") -> SyncDone:
    """A rollout worker has taken a weight set, or refused it."""
    return SyncDone(
        worker=worker,
        policy_version=version,
        error=error,
        waited_s=0.5,
        transfer_s=0.25,
        pause_s=0.125,
        finish_s=0.0,
        resume_s=0.0,
        in_flight=3,
    )


@dataclass
class Client:
    """One connection to a live service, speaking for env and train alike."""

    requester: Requester
    publisher: Publisher
    states: Subscriber

    async def lease(self, slot: int, worker: str = "env-0") -> LeaseReply:
        """Ask for a lease."""
        request = LeaseRequest(worker=worker, slot=slot, suites=["mini"])
        reply = await self.requester.request(request, DEADLINE_S)
        assert isinstance(reply, LeaseReply)
        return reply

    async def must_lease(self, slot: int, worker: str = "env-0") -> Lease:
        """A lease, asked for until it is there."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if lease := (await self.lease(slot, worker)).lease:
                    return lease

    async def tell(
        self,
        message: StepRecord
        | TrajectoryEnd
        | TrainerHello
        | BatchTrained
        | WeightsPublished
        | StopRequest
        | SyncDone,
    ) -> Ack:
        """Hand something in."""
        reply = await self.requester.request(message, DEADLINE_S)
        assert isinstance(reply, Ack)
        return reply

    async def play(
        self, slot: int, outcome: Outcome = "pass", *, steps: int = 2, version: int = 0
    ) -> Lease:
        """Lease, play and hand in one trajectory."""
        lease = await self.must_lease(slot)
        await self.hand_in(lease, outcome, steps=steps, version=version)
        return lease

    async def hand_in(
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
            await self.hand_in(lease, outcome, version=version)
        return leases[0].group_id

    async def batch(self, version: int = 0) -> BatchReply:
        """Ask for a batch."""
        reply = await self.requester.request(BatchRequest(policy_version=version), DEADLINE_S)
        assert isinstance(reply, BatchReply)
        return reply

    async def must_batch(self, version: int = 0) -> Batch:
        """A batch that must be there at once."""
        reply = await self.batch(version)
        assert reply.batch is not None, reply.reason
        return reply.batch

    async def publish(self, version: int) -> None:
        """The trainer publishes weights."""
        weights = WeightsPublished(
            policy_version=version, path=f"w/{version}", digest=f"d{version}"
        )
        assert (await self.tell(weights)).accepted

    async def sync(self, worker: str, version: int) -> SyncReply:
        """A rollout worker that serves `version` asks for newer weights."""
        request = SyncRequest(worker=worker, policy_version=version)
        reply = await self.requester.request(request, DEADLINE_S)
        assert isinstance(reply, SyncReply)
        return reply

    async def snapshot(self) -> Snapshot:
        """The run as status sees it."""
        reply = await self.requester.request(StatusRequest(), DEADLINE_S)
        assert isinstance(reply, StatusReply)
        return Snapshot.model_validate(reply.snapshot)

    async def eventually(self, wanted: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot that is as wanted."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if wanted(seen := await self.snapshot()):
                    return seen
                await asyncio.sleep(0.05)

    async def state(self) -> RunState:
        """The next published RunState."""
        async with asyncio.timeout(DEADLINE_S):
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

        async with asyncio.timeout(DEADLINE_S):
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
        async with asyncio.timeout(DEADLINE_S):
            await task
