"""`dart data`: the process that owns the run's database and says what is played and trained.

    Replier     the `data` address: leases, steps, hand-ins, batches, status   -> DataService.handle
    Forwarder   telemetry of all processes, in a thread of its own
    _listen     heartbeats: who lives, which leases go on, who serves what     -> Ledger.renew
    _housekeeping       each second: expiry, dead workers, RunState, limits of the run
    Commits     many requests share one transaction; each is answered after it is durable
    Permits     which rollout workers take new weights now
    Overview    what status sees

A request that cannot be answered yet (no lease free, no batch ready, no permit) is held for
`HOLD_S` and answered the moment that changes, so nobody polls. All handlers run in one event loop;
only the database's log is moved in another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.errors import ConfigError, DartError, ProtocolError, StoreError
from bus.heartbeat import DEAD_AFTER_S, HeartbeatSender, Liveness, Load
from bus.messages import (
    Ack,
    BatchReply,
    BatchRequest,
    BatchTrained,
    Heartbeat,
    Lease,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    RunState,
    StatusReply,
    StatusRequest,
    StepRecord,
    StopRequest,
    SyncDone,
    SyncReply,
    SyncRequest,
    TrainerHello,
    TrajectoryEnd,
    WeightsPublished,
)
from bus.sockets import Forwarder, Publisher, Replier, Subscriber
from dart_cli.config.schema import Config, run_curve, run_endpoints
from dart_cli.config.task_split import training_tasks
from dart_cli.data.exchange.transfer import import_pool
from dart_cli.data.group_commit import Commits
from dart_cli.data.ledger import Ledger
from dart_cli.data.overview import Moment, Overview
from dart_cli.data.permits import Permits
from dart_cli.data.scheduler import NoLease, Scheduler, make_scheduler
from dart_cli.data.stall_monitor import AlertLog, ProgressMonitor
from dart_cli.data.store.writer import RunRow, Store, open_store
from dart_cli.data.usage import Usage
from envs.base import Task

log = logging.getLogger(__name__)

WORKER = "data"
HOLD_S = 2.0
"""Longest time a request is held that cannot be answered yet."""
HOUSEKEEPING_S = 1.0
SAVE_S = 5.0
"""Between notes of what the processes last said and moves of the database's log."""
SNAPSHOT_S = 0.5
"""A snapshot younger than this is given again."""
SNAPSHOT_SHARE = 0.05
"""Most of the time that snapshots may take: one that was slow, in a long run, is given for longer."""
ROOM_S = 0.05
"""Longest time, each second, that the removal of old screenshots takes."""
ROOM_STEP = 100
"""Screenshots removed at once."""
STALL_LOOK_S = 3.0
"""Between two looks for what to tell in the log, at most."""
STOP_S = 10.0
"""Longest time the service stays up for the others after the run is over."""
STOP_LEAST_S = 2.0
MAX_HANDLERS = 4096
"""Requests in work or held at once: one for each slot and each step on its way."""

_ADVANCES = (StepRecord, TrajectoryEnd, BatchTrained, WeightsPublished, SyncDone)
"""Requests by which a run goes on."""

_T = TypeVar("_T")


@dataclass(eq=False)
class _FreeSlot:
    """An environment slot whose request for a lease may be held."""

    request: LeaseRequest
    answer: asyncio.Future[Lease | NoLease]
    reason: str = ""  # why it waits


async def run(config: Config, stop: asyncio.Event) -> None:
    """Serve the run until it is over (its updates are done, or a StopRequest) or `stop` is set.

    The run is over when train.updates are trained, train.max_minutes have been served, or someone
    asked for it: then everybody is told for a few seconds. `stop` ends only this process; the run
    goes on with the next one. So it does after a StopRequest that was carried out; one that was not,
    because this process died first, is carried out by the next. Raises RunDirectoryError if another process serves the run,
    ExchangeError for a mistake in a folder of data.pool, StoreError if the database cannot be read
    or written.
    """
    tasks = training_tasks(config)
    with open_store(config.run.dir) as store:
        import_pool(config, store)
        service = DataService(config, store, tasks, make_scheduler(config, tasks))
        await service.serve(stop)


class DataService:
    """The live service of one run; made inside a running loop."""

    def __init__(
        self, config: Config, store: Store, tasks: list[Task], scheduler: Scheduler
    ) -> None:
        self._config = config
        self._store = store
        self._run: RunRow = store.begin_run(config.run.seed, config.model_dump_json(), tasks)
        self.ledger = Ledger(config, store, tasks, scheduler)
        self._commits = Commits(store)
        self._liveness = Liveness(DEAD_AFTER_S)
        self._usage = Usage(store.usage())
        self._stillness = ProgressMonitor()
        self._told = AlertLog()
        self._overview = Overview(
            *(config, store, self.ledger, scheduler, tasks),
            *(self._liveness, self._usage, self._stillness),
        )
        self._started = time.monotonic()
        self._advanced_at = self._started  # monotonic seconds: something of _ADVANCES came
        self._changed = asyncio.Event()
        self._slots: dict[tuple[str, int], _FreeSlot] = {}  # that wait for a lease, longest first
        sync = config.sync
        # Coupled, all workers update together: nothing is served meanwhile that permits protect.
        self._permits = Permits(0 if config.data.coupled else sync.concurrent, sync.deadline_s)
        self._askers: dict[str, asyncio.Future[SyncReply]] = {}  # by rollout worker
        self._told_suspended = False
        self._ending = False  # this process, not the run
        self._over = asyncio.Event()
        self._reason = ""
        self._over_at = 0.0
        self._publisher: Publisher | None = None
        self._is_full = False  # data.max_gb is reached, and nothing may be removed
        self._snapshot: dict[str, Any] = {}
        self._snapshot_until = 0.0  # monotonic seconds
        self._handlers: dict[type[Request], Callable[[Any], Awaitable[Reply]]] = {
            LeaseRequest: self._on_lease,
            StepRecord: self._filed(self.ledger.step),
            TrajectoryEnd: self._filed(self.ledger.end, wakes=True),
            TrainerHello: self._filed(self.ledger.hello, wakes=True),
            BatchRequest: self._on_batch,
            BatchTrained: self._filed(self.ledger.batch_trained, wakes=True),
            WeightsPublished: self._on_weights,
            SyncRequest: self._on_sync,
            SyncDone: self._on_sync_done,
            StatusRequest: self._on_status,
            StopRequest: self._on_stop,
        }

    async def serve(self, stop: asyncio.Event) -> None:
        """Answer until the run is over and told, `stop` is set, or the database breaks."""
        addresses = run_endpoints(self._config)
        curve = run_curve(self._config)
        telemetry_in = addresses.address(TELEMETRY_IN)
        telemetry_out = addresses.address(TELEMETRY_OUT)
        async with AsyncExitStack() as stack:
            stack.enter_context(Forwarder(telemetry_in, telemetry_out, curve=curve))
            self._publisher = await stack.enter_async_context(Publisher(telemetry_in, curve=curve))
            heartbeats = await stack.enter_async_context(
                Subscriber(telemetry_out, [Heartbeat], curve=curve)
            )
            replier = await stack.enter_async_context(
                Replier(addresses.address(DATA), curve=curve, max_handlers=MAX_HANDLERS)
            )
            await stack.enter_async_context(
                HeartbeatSender(
                    self._publisher, "data", WORKER, self._load, endpoint=replier.endpoint
                )
            )
            log.info("run %s: %s", self._run.id, replier.endpoint)
            tasks = [
                asyncio.create_task(job, name=name)
                for name, job in (
                    ("replier", replier.serve(self.handle)),
                    ("heartbeats", self._listen(heartbeats)),
                    ("tend", self._housekeeping()),
                    ("end", self._end(stop)),
                )
            ]
            try:
                done, _ = await asyncio.wait(
                    [*tasks, self._commits.failed], return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    each.result()
            except StoreError as error:
                self._commits.fail(error)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._ending = True
                self._wake()
                await replier.close()
                if not self._commits.failed.done():
                    self._save()

    async def handle(self, _client: str, request: Request) -> Reply:
        """Answer one request; what it changed is durable when this returns."""
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

    def _filed(
        self, method: Callable[[_T], Ack], *, wakes: bool = False
    ) -> Callable[[_T], Awaitable[Ack]]:
        """A handler that files a message in the ledger and acknowledges when it is durable."""

        async def handler(message: _T) -> Ack:
            ack = method(message)
            if wakes:
                self._wake()
            await self._commits.durable()
            return ack

        return handler

    async def _on_lease(self, request: LeaseRequest) -> LeaseReply:
        if refusal := self._refusal():
            return LeaseReply(retry_after_s=1.0, reason=refusal)
        key = (request.worker, request.slot)
        if before := self._slots.pop(key, None):
            before.answer.set_result(NoLease("the slot has asked again since"))
        slot = _FreeSlot(request, asyncio.get_running_loop().create_future())
        gave_up = self.ledger.give_up(*key)
        self._lease_to(slot)  # before those that wait: what it has been leased is its own
        if not slot.answer.done():
            self._slots[key] = slot
        if gave_up:
            self._wake()
        await asyncio.wait([slot.answer], timeout=HOLD_S)
        if not slot.answer.done():
            del self._slots[key]
            return LeaseReply(reason=slot.reason)
        found = slot.answer.result()
        if isinstance(found, NoLease):
            return LeaseReply(reason=found.reason)
        await self._commits.durable()
        return LeaseReply(lease=found)

    def _lease_to(self, slot: _FreeSlot) -> NoLease | None:
        """Answer the slot, or return what it must wait for."""
        try:
            found = self.ledger.lease(slot.request)
        except DartError as error:
            slot.answer.set_exception(error)
            return None
        if isinstance(found, NoLease):
            slot.reason = found.reason
            return found
        slot.answer.set_result(found)
        return None

    def _lease_to_slots(self) -> None:
        """Give trajectories to the slots that wait, longest first, until there is none to give."""
        waiting = list(self._slots.items())
        for index, (key, slot) in enumerate(waiting):
            wait = self._lease_to(slot)
            if wait is None:
                del self._slots[key]
            elif not wait.one_slot:
                for _, later in waiting[index:]:
                    later.reason = wait.reason
                return

    def _refuse_slots(self, reason: str, worker: str | None = None) -> None:
        """Answer the slots that wait, all or one worker's, with no lease."""
        for key in list(self._slots):
            if worker in (None, key[0]):
                self._slots.pop(key).answer.set_result(NoLease(reason))

    async def _on_batch(self, request: BatchRequest) -> BatchReply:
        deadline = time.monotonic() + HOLD_S
        while True:
            groups = len(self.ledger.group_table.groups)
            try:
                found = self.ledger.next_batch(request.policy_version)
            except ConfigError as error:  # the trainer ends with it
                log.warning("%s", error)
                raise
            if not isinstance(found, NoLease):
                self._wake()
                await self._commits.durable()
                return BatchReply.model_construct(batch=found, retry_after_s=0.0, reason="")
            if len(self.ledger.group_table.groups) < groups:  # some were too old for the trainer
                self._lease_to_slots()
            if refusal := self._refusal():
                return BatchReply(retry_after_s=1.0, reason=refusal)
            if not await self._change_before(deadline):
                return BatchReply(reason=found.reason)

    def _refusal(self) -> str:
        """Why nothing new is begun; empty while the run goes on."""
        if self._over.is_set():
            return f"the run is over: {self._reason}"
        return "dart data is stopping" if self._ending else ""

    async def _on_weights(self, weights: WeightsPublished) -> Ack:
        ack = self.ledger.weights_published(weights)
        await self._commits.durable()
        self._publish()
        self._wake()
        return ack

    async def _on_sync(self, request: SyncRequest) -> SyncReply:
        worker, weights = request.worker, self.ledger.weights
        if before := self._askers.pop(worker, None):
            before.set_result(SyncReply(reason="the worker has asked again since"))
        self._permits.ask(worker, request.policy_version)
        if weights is not None and request.policy_version >= weights.policy_version:
            self._permits.withdraw(worker)
            self._grant()
            return SyncReply(
                reason=f"{worker} serves the newest weights, v{weights.policy_version}"
            )
        answer: asyncio.Future[SyncReply] = asyncio.get_running_loop().create_future()
        self._askers[worker] = answer
        self._grant()
        await asyncio.wait([answer], timeout=HOLD_S)
        if answer.done():
            return answer.result()
        del self._askers[worker]
        self._permits.withdraw(worker)
        holders = self._permits.holders
        if not holders:
            return SyncReply(reason="the trainer has published no weights yet")
        return SyncReply(
            reason=f"{' and '.join(holders)} must have taken weights first; "
            f"sync.concurrent = {self._config.sync.concurrent}"
        )

    def _grant(self) -> None:
        """Let the workers whose turn it is take the newest weights."""
        if (weights := self.ledger.weights) is None or self._ending:  # then all were answered
            return
        for worker in self._permits.grant(weights.policy_version):
            self._askers.pop(worker).set_result(
                SyncReply(
                    granted=True,
                    policy_version=weights.policy_version,
                    path=weights.path,
                    digest=weights.digest,
                )
            )

    async def _on_sync_done(self, done: SyncDone) -> Ack:
        now = time.time()
        held_s = self._permits.free(done.worker)
        if held_s is None:  # its time was over, or another data process gave it
            held_s = done.transfer_s + done.pause_s + done.finish_s + done.resume_s
        self._store.add_sync(done, now - held_s, now)
        self.ledger.versions.done(done)
        self._wake()
        await self._commits.durable()
        return Ack()

    async def _on_status(self, _request: StatusRequest) -> StatusReply:
        return StatusReply(snapshot=self.snapshot())

    async def _on_stop(self, request: StopRequest) -> Ack:
        reason = request.reason or "somebody asked for it"
        self._store.save_stop_reason(reason)
        self._finish_run(reason)
        await self._commits.durable()
        return Ack()

    # --- time ---------------------------------------------------------------------------

    def _wake(self) -> None:
        """Something changed that a held request may wait for."""
        if self.ledger.updates >= self._config.train.updates:
            self._finish_run(f"{self.ledger.updates} updates are done")
        if refusal := self._refusal():
            self._refuse_slots(refusal)
        if self._ending:
            for answer in self._askers.values():
                answer.set_result(SyncReply(reason=refusal))
            self._askers.clear()
        self._lease_to_slots()
        self._grant()
        if self.ledger.suspended != self._told_suspended:
            self._publish()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_before(self, deadline: float) -> bool:
        """Wait for `_wake`; False once the deadline (monotonic seconds) is past."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, heartbeats: Subscriber) -> None:
        async for message in heartbeats:
            if isinstance(message, Heartbeat):
                before = self._liveness.get(message.worker)
                is_new = self._liveness.observe(message)
                if is_new:
                    log.info("%s is here: pid %d on %s", message.worker, message.pid, message.host)
                self._usage.observe(message, time.monotonic())
                self._stillness.observe(message)
                self.ledger.renew(message.trajectories)
                if message.role == "rollout":
                    self._hear_rollout(message, before, is_new)
                elif message.role == "env" and message.state == "stopping":
                    self._refuse_slots("its process is stopping", message.worker)

    def _hear_rollout(self, heartbeat: Heartbeat, before: Heartbeat | None, is_new: bool) -> None:
        is_changed = self.ledger.versions.hear(heartbeat, is_new)
        # A worker may hold a permit before the first heartbeat that is heard of it, above all when
        # this data process has just begun: only a successor's gives back what it held.
        is_successor = before is not None and before.started_at != heartbeat.started_at
        if is_successor or heartbeat.state == "stopping":
            is_changed |= self._permits.free(heartbeat.worker) is not None
        if is_changed:
            self._wake()

    async def _housekeeping(self) -> None:
        saved = looked = time.monotonic()
        if self._run.stop_reason:  # the last start died before all were told
            self._finish_run(self._run.stop_reason)
        self._wake()
        while True:
            self._tend_workers()
            self._usage.tend(time.monotonic())
            self._make_room()
            if self._config.train.max_minutes and self._served_s() >= (
                60 * self._config.train.max_minutes
            ):
                self._finish_run(f"{self._config.train.max_minutes:g} minutes are over")
            self._publish()
            if time.monotonic() - looked >= min(STALL_LOOK_S, self._config.bus.stall_s / 4):
                looked = time.monotonic()
                self._told.tell(self.snapshot()["stalls"])
            if time.monotonic() - saved >= SAVE_S:
                saved = time.monotonic()
                self._save()
                await asyncio.to_thread(self._store.checkpoint)
            slept = time.monotonic()
            await asyncio.sleep(HOUSEKEEPING_S)
            overslept_s = time.monotonic() - slept - HOUSEKEEPING_S
            if (
                overslept_s > HOUSEKEEPING_S
            ):  # stopped (Ctrl-Z), or starved: others may have been, too
                log.warning("was away for %.0f s; leases are out that much longer", overslept_s)
                self._liveness.discount_pause(overslept_s)
                self._usage.discount_pause(overslept_s)
                self._advanced_at += overslept_s
                self.ledger.discount_pause(overslept_s)

    def _tend_workers(self) -> None:
        """Take back what the silent held, and forget those that had said goodbye."""
        is_changed = self.ledger.take_back_expired() > 0
        for gone in self._liveness.dead():
            is_changed |= self.ledger.take_back_from(gone.worker) > 0
            held_s = self._permits.free(gone.worker)
            if held_s is not None:
                is_changed = True
                log.warning(
                    "%s is gone with the permit to take weights, which it had for %.0f s; "
                    "the next one may",
                    *(gone.worker, held_s),
                )
            is_changed |= self.ledger.versions.forget(gone.worker)
            self._stillness.forget(gone.worker)
            if gone.state == "stopping":
                self._liveness.forget(gone.worker)
        for worker in self._permits.expire():
            is_changed = True
            log.warning(
                "%s has not taken weights within sync.deadline_s = %g; the next one may",
                worker,
                self._config.sync.deadline_s,
            )
        if is_changed:
            self._wake()

    def _make_room(self) -> None:
        """Keep the database within data.max_gb, in steps so small that nobody waits for them."""
        limit = self._config.data.max_gb * 1e9
        deadline = time.monotonic() + ROOM_S
        is_over = self._store.bytes_in_use() > limit
        removed = -1
        while is_over and removed and time.monotonic() < deadline:
            removed = self.ledger.make_room(ROOM_STEP)
            is_over = self._store.bytes_in_use() > limit
        self._is_full = is_over and not removed

    def _save(self) -> None:
        heard = [*self._liveness.alive(), *self._liveness.dead()]
        beats = {beat.worker: beat for beat in heard}
        now = time.time()
        self._store.save_processes(
            beats, {worker: now - self._liveness.silent_s(worker) for worker in beats}
        )
        self._store.save_usage(self._usage.changed())
        self._store.save_active_s(self._served_s())
        self._commits.flush()

    def _finish_run(self, reason: str) -> None:
        """Lease nothing more and tell everybody."""
        if self._over.is_set():
            return
        log.info("the run is over: %s", reason)
        self._reason = reason
        self._over_at = time.monotonic()
        self._over.set()
        self._publish()
        self._wake()

    async def _end(self, stop: asyncio.Event) -> None:
        """Return when this process should end."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            while not stop.is_set():
                told_s = time.monotonic() - self._over_at
                others = [beat for beat in self._liveness.alive() if self._speaks(beat)]
                if told_s >= STOP_S or (told_s >= STOP_LEAST_S and not others):
                    self._store.save_stop_reason("")
                    return
                await asyncio.sleep(0.1)
        finally:
            for wait in waits:
                wait.cancel()

    def _speaks(self, beat: Heartbeat) -> bool:
        """Whether another process of the run was heard in the last moments."""
        return beat.role in ("env", "rollout", "train") and (
            self._liveness.silent_s(beat.worker) < STOP_LEAST_S
        )

    # --- what others see ----------------------------------------------------------------

    def _publish(self) -> None:
        if self._publisher is None:
            return
        weights = self.ledger.weights
        self._told_suspended = self.ledger.suspended
        self._publisher.publish(
            RunState(
                run_id=self._run.id,
                policy_version=weights.policy_version if weights else -1,
                weights_path=weights.path if weights else "",
                stopping=self._over.is_set(),
                reason=self._reason,
                suspended=self._told_suspended,
            )
        )

    def _load(self) -> Load:
        group_table = self.ledger.group_table
        return Load(
            state="stopping" if self._over.is_set() else "ready",
            policy_version=self.ledger.weights.policy_version if self.ledger.weights else -1,
            gauges={
                "open_groups": float(len(group_table.open)),
                "ready_groups": float(len(group_table.ready)),
                "leases": float(sum(1 for _ in group_table.live())),
            },
        )

    def _served_s(self) -> float:
        """Seconds this run has been served, over all starts."""
        return self._run.active_s + time.monotonic() - self._started

    def _moment(self, now: float) -> Moment:
        return Moment(
            now=now,
            run_id=self._run.id,
            uptime_s=now - self._started,
            run_s=self._served_s(),
            stopping=self._over.is_set(),
            reason=self._reason,
            free_slots=len(self._slots),
            is_full=self._is_full,
            quiet_s=now - self._advanced_at,
            permits=self._permits.held_s(),
        )

    def snapshot(self) -> dict[str, Any]:
        """The run at this moment as a bus.snapshot.Snapshot, dumped."""
        now = time.monotonic()
        if now >= self._snapshot_until:
            self._snapshot = self._overview.snapshot(self._moment(now)).model_dump(mode="json")
            took_s = time.monotonic() - now
            self._snapshot_until = now + max(SNAPSHOT_S, took_s / SNAPSHOT_SHARE)
        return self._snapshot
