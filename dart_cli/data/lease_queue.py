"""Environment slots whose request for a lease is held until there is one.

LeaseQueue   the slots, longest wait first; bounded by the number of slots, one request for each
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bus.errors import DartError
from bus.messages import Lease, LeaseRequest
from dart_cli.data.groups import SlotKey
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet


@dataclass(eq=False)
class FreeSlot:
    """An environment slot whose request for a lease may be held."""

    request: LeaseRequest
    answer: asyncio.Future[Lease | NotYet]
    reason: str = ""  # why it waits

    @property
    def key(self) -> SlotKey:
        """Which slot it is."""
        return (self.request.worker, self.request.slot)


class LeaseQueue:
    """Gives the ledger's leases to the slots that wait."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._slots: dict[SlotKey, FreeSlot] = {}  # longest wait first

    def __len__(self) -> int:
        return len(self._slots)

    def ask(self, request: LeaseRequest) -> tuple[FreeSlot, bool]:
        """A slot is free: it is answered at once or waits; also whether it gave up what it played.

        `serve` is due then: what it gave up may be leased to another slot.
        """
        slot = FreeSlot(request, asyncio.get_running_loop().create_future())
        if before := self._slots.pop(slot.key, None):
            before.answer.set_result(NotYet("the slot has asked again since"))
        gave_up = self._ledger.give_up(*slot.key)
        self._lease_to(slot)  # before those that wait: what it has been leased is its own
        if not slot.answer.done():
            self._slots[slot.key] = slot
        return slot, gave_up

    async def answer(self, slot: FreeSlot, hold_s: float) -> Lease | NotYet:
        """The slot's lease, or after `hold_s` what it waited for. Raises what leasing raised."""
        await asyncio.wait([slot.answer], timeout=hold_s)
        if not slot.answer.done():
            del self._slots[slot.key]
            return NotYet(slot.reason)
        return slot.answer.result()

    def serve(self) -> None:
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

    def refuse(self, reason: str, worker: str | None = None) -> None:
        """Answer the slots that wait, all or one worker's, with no lease."""
        for key in list(self._slots):
            if worker in (None, key[0]):
                self._slots.pop(key).answer.set_result(NotYet(reason))

    def _lease_to(self, slot: FreeSlot) -> NotYet | None:
        """Answer the slot, or return what it must wait for."""
        try:
            found = self._ledger.lease(slot.request)
        except DartError as error:
            slot.answer.set_exception(error)
            return None
        if isinstance(found, NotYet):
            slot.reason = found.reason
            return found
        slot.answer.set_result(found)
        return None
