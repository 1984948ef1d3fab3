"""Requests that are held until they can be answered.

    LeaseQueue   holds environment slots until there is a lease for them, the longest wait first
    SyncQueue    holds rollout workers until it is their turn to take new weights
    Commits      holds requests that changed the database until their common transaction is durable

Each queue is bounded: it holds one request of each slot, or of each worker.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bus.errors import DartError, StoreError
from bus.messages import Lease, LeaseRequest
from bus.weights import SyncDone, SyncReply, SyncRequest
from dart_cli.data.groups import SlotKey
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.writer import Store
from dart_cli.data.versions import Permits

COMMIT_S = 0.005
"""Time for which a transaction stays open for more requests."""


@dataclass(eq=False)
class FreeSlot:
    """An environment slot whose request for a lease may be held."""

    request: LeaseRequest
    answer: asyncio.Future[Lease | NotYet]
    reason: str = ""  # why it waits

    @property
    def key(self) -> SlotKey:
        """Worker and index of the slot."""
        return (self.request.worker, self.request.slot)


class LeaseQueue:
    """The environment slots that wait for a lease."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._slots: dict[SlotKey, FreeSlot] = {}  # longest wait first

    def __len__(self) -> int:
        return len(self._slots)

    def ask(self, request: LeaseRequest) -> tuple[FreeSlot, bool]:
        """Answer a free slot at once or hold its request; return the slot, and if it gave up a trajectory.

        If it did (True), the caller must call `serve`, since another slot may replace that trajectory.
        """
        slot = FreeSlot(request, asyncio.get_running_loop().create_future())
        if before := self._slots.pop(slot.key, None):
            before.answer.set_result(NotYet("the slot has asked again since"))
        gave_up = self._ledger.give_up(*slot.key)
        # This slot comes before the slots that wait: it may get its own lease again.
        self._lease_to(slot)
        if not slot.answer.done():
            self._slots[slot.key] = slot
        return slot, gave_up

    async def answer(self, slot: FreeSlot, hold_s: float) -> Lease | NotYet:
        """Return the slot's lease, or after `hold_s` what it waits for.

        Raises the errors of Ledger.lease.
        """
        await asyncio.wait([slot.answer], timeout=hold_s)
        if not slot.answer.done():
            del self._slots[slot.key]
            return NotYet(slot.reason)
        return slot.answer.result()

    def serve(self) -> None:
        """Lease trajectories to the slots that wait, the longest wait first, as long as there are any."""
        waiting = list(self._slots.items())
        for index, (key, slot) in enumerate(waiting):
            wait = self._lease_to(slot)
            if wait is None:
                del self._slots[key]
            elif not wait.one_slot:
                for _, later in waiting[index:]:
                    later.reason = wait.reason
                return

    def refuse(self, reason: str, worker: str | None = None) -> None:
        """Answer the slots that wait, of all workers or of one, that they get no lease for this reason."""
        for key in list(self._slots):
            if worker in (None, key[0]):
                self._slots.pop(key).answer.set_result(NotYet(reason))

    def _lease_to(self, slot: FreeSlot) -> NotYet | None:
        """Answer the slot if there is a lease; else return what it must wait for."""
        try:
            lease = self._ledger.lease(slot.request)
        except DartError as error:
            slot.answer.set_exception(error)
            return None
        if isinstance(lease, NotYet):
            slot.reason = lease.reason
            return lease
        slot.answer.set_result(lease)
        return None


class SyncQueue:
    """The rollout workers that wait for a permit to take the newest weights."""

    def __init__(self, concurrent: int, store: Store, ledger: Ledger, permits: Permits) -> None:
        self._concurrent = concurrent  # weights.concurrent
        self._store = store
        self._ledger = ledger
        self._permits = permits
        self._asking: dict[str, asyncio.Future[SyncReply]] = {}  # by rollout worker
        self._is_closed = False

    async def ask(self, request: SyncRequest, hold_s: float) -> SyncReply:
        """Return the permit to take the newest weights, or after `hold_s` what the worker waits for."""
        worker, weights = request.worker, self._ledger.weights
        # 1. Note the request, in place of an earlier one.
        if before := self._asking.pop(worker, None):
            before.set_result(SyncReply(reason="the worker has asked again since"))
        self._permits.ask(worker, request.policy_version)
        if weights is not None and request.policy_version >= weights.policy_version:
            self._permits.withdraw(worker)
            self.grant()
            return SyncReply(
                reason=f"{worker} serves the newest weights, v{weights.policy_version}"
            )
        # 2. Hold it until the permit is granted.
        answer: asyncio.Future[SyncReply] = asyncio.get_running_loop().create_future()
        self._asking[worker] = answer
        self.grant()
        await asyncio.wait([answer], timeout=hold_s)
        if answer.done():
            return answer.result()
        # 3. Say why there is none.
        del self._asking[worker]
        self._permits.withdraw(worker)
        if weights is None:
            return SyncReply(reason="the trainer has published no weights yet")
        if not self._ledger.lineage.is_ahead(weights.policy_version, request.policy_version):
            return SyncReply(
                reason=f"v{weights.policy_version} is not ahead of the v{request.policy_version} that "
                "serves: the trainer repeats the updates that were lost when it ended"
            )
        holders = self._permits.holders
        return SyncReply(
            reason=f"{' and '.join(holders)} must have taken weights first; "
            f"weights.concurrent = {self._concurrent}"
        )

    def grant(self) -> None:
        """Answer the workers that get a permit now."""
        weights = self._ledger.weights
        if weights is None or self._is_closed:
            return
        is_ahead = self._ledger.lineage.is_ahead
        for worker in self._permits.grant(weights.policy_version, is_ahead):
            self._asking.pop(worker).set_result(
                SyncReply(
                    granted=True,
                    policy_version=weights.policy_version,
                    path=weights.path,
                    digest=weights.digest,
                )
            )

    def finish(self, message: SyncDone, now: float) -> None:
        """Note that a worker has taken a weight set, or refused it; `now` is in unix seconds."""
        held_s = self._permits.free(message.worker)
        if held_s is None:  # the permit has expired, or another data service granted it
            held_s = message.transfer_s + message.pause_s
        self._store.add_sync(message, now - held_s, now)
        self._ledger.versions.note_sync(message)

    def close(self, reason: str) -> None:
        """Answer all workers with `reason`, and grant no more permits."""
        self._is_closed = True
        for answer in self._asking.values():
            answer.set_result(SyncReply(reason=reason))
        self._asking.clear()


class Commits:
    """The commits of the database: many callers of `durable` share one transaction.

    After a failure, memory and file may differ. Then no request is acknowledged any more, `failed` ends the
    process, and the next process begins from the file.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: asyncio.Future[None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def durable(self) -> None:
        """Wait until everything written so far is durable. Raises StoreError if the commit fails."""
        if self.failed.done():
            self.failed.result()
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(COMMIT_S, self.flush)
        await asyncio.shield(self._next)

    def flush(self) -> None:
        """Commit now, and let the callers of `durable` go on."""
        if self.failed.done():
            return
        try:
            self._store.commit()
        except StoreError as error:
            self.fail(error)
            return
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)

    def fail(self, error: StoreError) -> None:
        """Note that the database failed: discard what is not committed.

        Every caller of `durable` gets the error.
        """
        if self.failed.done():
            return
        self.failed.set_exception(error)
        if self._next is not None:
            self._next.set_exception(error)
        self._store.abandon(error)
