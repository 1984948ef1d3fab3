"""`dart data`: the process that owns the run's database and decides what is played and trained.

    Replier         receives the requests of all processes and passes each to `handle`
    Forwarder       forwards the telemetry of all processes, in a thread
    _listen         passes heartbeats to WorkerWatch, which notes who lives and which leases are renewed
    _housekeeping   takes back leases, publishes RunState and checks the run's limits, each second
    Ledger          makes every transition of a trajectory, a group and a batch
    Commits         lets many requests share one transaction; each is answered once it is durable
    LeaseQueue      holds the environment slots that wait for a lease
    NextBatch       plans, loads, files and encodes the trainer's next batch
    SyncQueue       holds the rollout workers that wait for their turn to take new weights
    RunSettings     compares the settings that the processes were started with
    RunEnd          decides when the run is over, and when this process may end
    Overview        makes the snapshots of the run for `dart status`

A request that cannot be answered yet (no lease is free, no batch is ready, no permit) is held for `HOLD_S`
and answered as soon as it can be, so no process polls. All handlers run in one event loop. Two things run
in threads: the checkpoint of the database's write-ahead log, and the reading and encoding of a batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.errors import ProtocolError, StoreError
from bus.heartbeat import DEAD_AFTER_S, HeartbeatSender, Liveness, Load, awaited
from bus.messages import (
    PLAYERS,
    Ack,
    BatchReply,
    BatchRequest,
    BatchTrained,
    Heartbeat,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    RunState,
    StatusReply,
    StatusRequest,
    StepRecord,
    StopRequest,
    TrainerHello,
    TrajectoryEnd,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.requests import EncodedReply, Replier
from bus.weights import SyncDone, SyncReply, SyncRequest, WeightsPublished
from dart_cli.config import endpoints
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.exchange.transfer import import_pool
from dart_cli.data.ledger import Ledger
from dart_cli.data.next_batch import NextBatch
from dart_cli.data.overview import Overview, ServiceState
from dart_cli.data.queues import Commits, LeaseQueue, SyncQueue
from dart_cli.data.run_end import RunEnd
from dart_cli.data.scheduler import NotYet, Scheduler, make_scheduler
from dart_cli.data.settings import RunSettings
from dart_cli.data.stalls import AlertLog
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import RunRow
from dart_cli.data.store.writer import Store
from dart_cli.data.versions import Permits
from dart_cli.data.workers import Usage, WorkerWatch
from dart_cli.runtime.role import how_started
from dart_cli.runtime.run_dir import leave_snapshot
from dart_cli.runtime.waits import announced_waits
from envs.contract.base import Task

log = logging.getLogger(__name__)

WORKER = "data"
HOLD_S = 2.0
"""Longest time for which a request is held that cannot be answered yet."""
HOUSEKEEPING_S = 1.0
"""Pause between two rounds of housekeeping."""
SAVE_S = 5.0
"""Time between two writes of the newest heartbeats and of the snapshot that outlives this process, and
between two checkpoints of the write-ahead log."""
SNAPSHOT_S = 0.5
"""A snapshot younger than this is returned again."""
SNAPSHOT_SHARE = 0.05
"""Largest share of the time that may go into making snapshots; in a long run, where making one is slow, a
snapshot is returned again for longer."""
ROOM_S = 0.05
"""Longest time for which old screenshots are removed, each second."""
ROOM_STEP = 100
"""Screenshots that are removed at once."""
STALL_LOOK_S = 3.0
"""Longest time between two checks for stalls."""
MAX_HANDLERS = 4096
"""Most requests in work or held at once; there is one for each slot and each step in transit."""

_ADVANCES = (StepRecord, TrajectoryEnd, BatchTrained, WeightsPublished, SyncDone)
"""Requests that show progress of the run."""

_T = TypeVar("_T")
_R = TypeVar("_R", bound=Reply)


async def run(config: Config, stop: asyncio.Event) -> None:
    """Serve the run until it is over or `stop` is set.

    The run is over when train.updates are trained, train.max_minutes have been served, train.max_trajectories
    have ended, success has reached train.stop_at, or a StopRequest came. RunState then announces the end, and
    this process ends after the others (run_end.py). `stop` ends only this process; the next `dart data`
    continues the run. The next one also continues a run that ended by a StopRequest, unless this process died
    while it carried out the request: then the next one ends the run.

    Raises AttentionError if the run ended by train.attention_minutes, RunDirectoryError if another process
    serves the run, ExchangeError for a mistake in a folder of data.pool, StoreError if the database cannot
    be read or written.
    """
    tasks = training_tasks(config)
    with open_store(config.run.dir) as store:
        import_pool(config, store)
        service = DataService(config, store, tasks, make_scheduler(config, tasks))
        await service.serve(stop)


class DataService:
    """The live service of one run; it must be made inside a running event loop."""

    def __init__(
        self, config: Config, store: Store, tasks: list[Task], scheduler: Scheduler
    ) -> None:
        self._config = config
        self._store = store
        self._settings = RunSettings(config, store.save_config, how_started().set_keys)
        self._run: RunRow = store.begin_run(config.run.seed, self._settings.used, tasks)
        self.ledger = Ledger(config, store, tasks, scheduler)
        self._commits = Commits(store)
        self._alerts = AlertLog()
        self._started = time.monotonic()
        self._advanced_at = self._started  # monotonic seconds of the newest of _ADVANCES
        self._changed = asyncio.Event()
        self._lease_queue = LeaseQueue(self.ledger)
        # Where turns are taken, all workers take weights together: none of them serves meanwhile.
        self._permits = Permits(0 if config.data.takes_turns else config.weights.concurrent)
        self._watch = WorkerWatch(
            self.ledger, self._permits, Liveness(DEAD_AFTER_S), Usage(store.usage())
        )
        self._end = RunEnd(config, store, self.ledger, self._watch.liveness)
        self._overview = Overview(config, store, self.ledger, scheduler, tasks, self._watch)
        self._next_batch = NextBatch(
            self.ledger,
            self._commits,
            store.path,
            served_s=self._served_s,
            on_filed=self._wake,
        )
        self._sync_queue = SyncQueue(config.weights.concurrent, store, self.ledger, self._permits)
        self._published_suspended = False
        self._is_ending = False  # this process, not the run
        self._publisher: Publisher | None = None
        self._is_full = False  # data.max_gb is reached, and no screenshot may be removed
        self._snapshot: dict[str, Any] = {}
        self._snapshot_until = 0.0  # monotonic seconds
        self._handlers: dict[type[Request], Callable[[Any], Awaitable[Reply | EncodedReply]]] = {
            JoinRequest: self._on_join,
            LeaseRequest: self._on_lease,
            StepRecord: self._filing(self.ledger.step),
            TrajectoryEnd: self._filing(self.ledger.end, wakes=True),
            TrainerHello: self._filing(self.ledger.hello, wakes=True),
            BatchRequest: self._on_batch,
            BatchTrained: self._filing(self.ledger.batch_trained, wakes=True),
            WeightsPublished: self._on_weights,
            SyncRequest: self._on_sync,
            SyncDone: self._on_sync_done,
            StatusRequest: self._on_status,
            StopRequest: self._on_stop,
        }

    async def serve(self, stop: asyncio.Event) -> None:
        """Answer requests until the run is over and announced, `stop` is set, or the database fails."""
        async with AsyncExitStack() as stack:
            stack.callback(self._next_batch.close)
            replier, heartbeats = await self._connect(stack)
            await stack.enter_async_context(announced_waits(self._awaits))
            log.info("run %s: %s", self._run.id, replier.endpoint)
            tasks = [
                asyncio.create_task(job, name=name)
                for name, job in (
                    ("replier", replier.serve(self.handle)),
                    ("heartbeats", self._listen(heartbeats)),
                    ("housekeeping", self._housekeeping()),
                    ("end", self._end.wait_for_end(stop)),
                )
            ]
            try:
                waits = [*tasks, self._commits.failed]
                ends, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.result()
            except StoreError as error:
                self._commits.fail(error)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._is_ending = True
                self._wake()
                await replier.close()
                if not self._commits.failed.done():
                    self._snapshot_until = 0.0  # the snapshot that stays is made now
                    self._save()

    async def _connect(self, stack: AsyncExitStack) -> tuple[Replier, Subscriber]:
        """Open the sockets and begin to send heartbeats; `stack` closes them."""
        addresses = run_endpoints(self._config)
        curve = run_curve(self._config)
        telemetry_in = addresses.address(TELEMETRY_IN)
        telemetry_out = addresses.address(TELEMETRY_OUT)
        stack.enter_context(Forwarder(telemetry_in, telemetry_out, curve=curve))
        self._publisher = await stack.enter_async_context(Publisher(telemetry_in, curve=curve))
        heartbeats = await stack.enter_async_context(
            Subscriber(telemetry_out, [Heartbeat], curve=curve)
        )
        replier = await stack.enter_async_context(
            Replier(addresses.address(DATA), curve=curve, max_handlers=MAX_HANDLERS)
        )
        await stack.enter_async_context(
            HeartbeatSender(self._publisher, "data", WORKER, self._load, endpoint=replier.endpoint)
        )
        return replier, heartbeats

    async def handle(self, _client: str, request: Request) -> Reply | EncodedReply:
        """Return the reply to one request; its changes are durable by then."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"dart data answers no {type(request).__name__}")
        try:
            reply = await handler(request)
        except StoreError as error:
            self._commits.fail(error)
            raise
        if isinstance(request, _ADVANCES):
            self._advanced_at = time.monotonic()
        return reply

    # --- requests -----------------------------------------------------------------------

    def _filing(
        self, method: Callable[[_T], _R], *, wakes: bool = False
    ) -> Callable[[_T], Awaitable[_R]]:
        """Return a handler that files a message by `method` and replies once that is durable.

        A handler that `wakes` also answers held requests which wait for such a change.
        """

        async def handler(message: _T) -> _R:
            reply = method(message)
            if wakes:
                self._wake()
            await self._commits.durable()
            return reply

        return handler

    async def _on_join(self, request: JoinRequest) -> JoinReply:
        reply = self._settings.join(request)
        await self._commits.durable()
        return reply

    async def _on_lease(self, request: LeaseRequest) -> LeaseReply:
        """Return a lease, or after HOLD_S why there is none."""
        if refusal := self._refusal():
            return LeaseReply(retry_after_s=1.0, reason=refusal)
        slot, gave_up = self._lease_queue.ask(request)
        if gave_up:
            self._wake()
        lease = await self._lease_queue.answer(slot, HOLD_S)
        if isinstance(lease, NotYet):
            return LeaseReply(reason=lease.reason)
        await self._commits.durable()
        return LeaseReply(lease=lease)

    async def _on_batch(self, request: BatchRequest) -> BatchReply | EncodedReply:
        """Return the next batch, or after HOLD_S why there is none yet."""
        deadline = time.monotonic() + HOLD_S
        while True:
            groups, refused = len(self.ledger.group_table.groups), self.ledger.refused_replays
            reply = await self._next_batch.reply(request.policy_version)
            if not isinstance(reply, NotYet):
                return reply
            # Planning may have refused replays, so that fewer updates come before the next batch, or
            # dropped stale groups: then slots that wait may get a lease.
            if self.ledger.refused_replays > refused:
                self._wake()
            elif len(self.ledger.group_table.groups) < groups:
                self._lease_queue.serve()
            if refusal := self._refusal():
                return BatchReply(retry_after_s=1.0, reason=refusal)
            if not await self._change_before(deadline):
                return BatchReply(reason=reply.reason)

    def _refusal(self) -> str:
        """Return why no new work is given out; empty while the run goes on."""
        if self._end.is_over:
            return f"the run is over: {self._end.reason}"
        return "the data service is stopping" if self._is_ending else ""

    async def _on_weights(self, weights: WeightsPublished) -> Ack:
        ack = self.ledger.weights_published(weights)
        await self._commits.durable()
        self._publish()
        self._wake()
        return ack

    async def _on_sync(self, request: SyncRequest) -> SyncReply:
        return await self._sync_queue.ask(request, HOLD_S)

    async def _on_sync_done(self, message: SyncDone) -> Ack:
        self._sync_queue.finish(message, time.time())
        self._wake()
        await self._commits.durable()
        return Ack()

    async def _on_status(self, _request: StatusRequest) -> StatusReply:
        return StatusReply(snapshot=self.snapshot())

    async def _on_stop(self, request: StopRequest) -> Ack:
        reason = request.reason or "a stop was requested"
        self._store.save_stop_reason(reason)
        self._finish_run(reason)
        await self._commits.durable()
        return Ack()

    # --- time ---------------------------------------------------------------------------

    def _wake(self) -> None:
        """Answer the held requests that can be answered after a change."""
        self._end_at_bound()
        if refusal := self._refusal():
            self._lease_queue.refuse(refusal)
        if self._is_ending:
            self._sync_queue.close(refusal)
        self._lease_queue.serve()
        self._sync_queue.grant()
        if self.ledger.suspended != self._published_suspended:
            self._publish()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_before(self, deadline: float) -> bool:
        """Wait for `_wake`; return False if the deadline (monotonic seconds) passes first."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, heartbeats: Subscriber) -> None:
        async for message in heartbeats:
            if isinstance(message, Heartbeat):
                if self._watch.observe(message):
                    self._wake()
                if message.role in PLAYERS and message.state == "stopping":
                    self._lease_queue.refuse("its process is stopping", message.worker)

    async def _housekeeping(self) -> None:
        """Do the work of each second: look after leases, limits, stalls and the database."""
        saved_at = looked_at = time.monotonic()
        if self._run.stop_reason:  # the last `dart data` died before it announced the end
            self._finish_run(self._run.stop_reason)
        self._wake()
        while True:
            if self._watch.check():
                self._wake()
            self._make_room()
            self._end_at_bound()
            self._publish()
            if time.monotonic() - looked_at >= min(STALL_LOOK_S, endpoints.STALL_S / 4):
                looked_at = time.monotonic()
                self._look_for_stalls()
            if time.monotonic() - saved_at >= SAVE_S:
                saved_at = time.monotonic()
                self._save()
                await asyncio.to_thread(self._store.checkpoint)
            slept_at = time.monotonic()
            await asyncio.sleep(HOUSEKEEPING_S)
            self._discount_pause(time.monotonic() - slept_at - HOUSEKEEPING_S)

    def _look_for_stalls(self) -> None:
        """Log stalls that begin or end, and note what the run needs attention for."""
        stalls = self.snapshot()["stalls"]
        self._alerts.update(stalls)
        absent = self._watch.absent()
        wait = f"it waits for {awaited(*absent)}" if absent else ""
        self._end.note_attention(stalls[0]["text"] if stalls else wait)

    def _end_at_bound(self) -> None:
        if reason := self._end.bound(self._served_s()):
            self._finish_run(reason)

    def _discount_pause(self, overslept_s: float) -> None:
        """Extend all deadlines by a time in which this process was stopped (Ctrl-Z) or got no processor.

        Other processes may have been stopped, too.
        """
        if overslept_s <= HOUSEKEEPING_S:
            return
        log.warning(
            "the data service was paused for %.0f s; leases expire that much later", overslept_s
        )
        self._watch.discount_pause(overslept_s)
        self._advanced_at += overslept_s
        self._end.discount_pause(overslept_s)
        self.ledger.discount_pause(overslept_s)

    def _make_room(self) -> None:
        """Remove old screenshots while the database is above data.max_gb, for at most ROOM_S seconds."""
        limit = self._config.data.max_gb * 1e9
        deadline = time.monotonic() + ROOM_S
        is_over = self._store.bytes_in_use() > limit
        removed = -1
        while is_over and removed and time.monotonic() < deadline:
            removed = self.ledger.make_room(ROOM_STEP)
            is_over = self._store.bytes_in_use() > limit
        self._is_full = is_over and not removed

    def _save(self) -> None:
        """Store what outlives this process: heartbeats, times and the snapshot."""
        self._watch.save(self._store)
        self._store.save_active_s(self._served_s())
        self._commits.flush()
        leave_snapshot(self._config.run.dir, self.snapshot())

    def _finish_run(self, reason: str) -> None:
        """End the run: lease nothing more, and announce the end."""
        if self._end.finish(reason):
            self._publish()
            self._wake()

    # --- what others see ----------------------------------------------------------------

    def _publish(self) -> None:
        """Publish the RunState of this moment, if the sockets are open."""
        if self._publisher is None:
            return
        weights = self.ledger.weights
        self._published_suspended = self.ledger.suspended
        self._publisher.publish(
            RunState(
                run_id=self._run.id,
                policy_version=weights.policy_version if weights else -1,
                weights_path=weights.path if weights else "",
                stopping=self._end.is_over,
                reason=self._end.reason,
                suspended=self._published_suspended,
                absent=self._watch.absent(),
            )
        )

    def _awaits(self) -> str:
        """Return what this process waits for before it ends, else the absent roles that the run waits for."""
        absent = [] if self._end.is_over else self._watch.absent()
        return self._end.awaited or (awaited(*absent) if absent else "")

    def _load(self) -> Load:
        group_table = self.ledger.group_table
        return Load(
            state="stopping" if self._end.is_over else "ready",
            policy_version=self.ledger.weights.policy_version if self.ledger.weights else -1,
            gauges={
                "open_groups": float(len(group_table.open)),
                "ready_groups": float(len(group_table.ready)),
                "leases": float(sum(1 for _ in group_table.live_attempts())),
            },
        )

    def _served_s(self) -> float:
        """Return for how many seconds this run has been served, over all starts."""
        return self._run.active_s + time.monotonic() - self._started

    def _state(self, now: float) -> ServiceState:
        """Return the state of the service at `now` (monotonic seconds), for a snapshot."""
        alive = [beat.worker for beat in self._watch.liveness.alive()]
        return ServiceState(
            now=now,
            run_id=self._run.id,
            uptime_s=now - self._started,
            run_s=self._served_s(),
            stopping=self._end.is_over,
            reason=self._end.reason,
            is_ending=self._is_ending,
            ending=self._end.awaited,
            free_slots=len(self._lease_queue),
            is_full=self._is_full,
            quiet_s=now - self._advanced_at,
            permits=self._permits.held_s(),
            settings=self._settings.notes(alive),
            unequal=self._settings.warnings(alive),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the run at this moment: a bus.snapshot.Snapshot as JSON values."""
        now = time.monotonic()
        if now >= self._snapshot_until:
            self._snapshot = self._overview.snapshot(self._state(now)).model_dump(mode="json")
            took_s = time.monotonic() - now
            self._snapshot_until = now + max(SNAPSHOT_S, took_s / SNAPSHOT_SHARE)
        return self._snapshot
