"""Rollout workers whose request for new weights is held until it is their turn.

SyncQueue   the requests; bounded by the number of workers, one request for each
"""

from __future__ import annotations

import asyncio

from bus.weights import SyncDone, SyncReply, SyncRequest
from dart_cli.data.ledger import Ledger
from dart_cli.data.permits import Permits
from dart_cli.data.store.writer import Store


class SyncQueue:
    """Answers workers as Permits grants them the newest weights."""

    def __init__(self, concurrent: int, store: Store, ledger: Ledger, permits: Permits) -> None:
        self._concurrent = concurrent  # weights.concurrent
        self._store = store
        self._ledger = ledger
        self._permits = permits
        self._asking: dict[str, asyncio.Future[SyncReply]] = {}  # by rollout worker
        self._is_closed = False

    async def ask(self, request: SyncRequest, hold_s: float) -> SyncReply:
        """The permit to take the newest weights, or after `hold_s` what the worker waited for."""
        worker, weights = request.worker, self._ledger.weights
        if before := self._asking.pop(worker, None):
            before.set_result(SyncReply(reason="the worker has asked again since"))
        self._permits.ask(worker, request.policy_version)
        if weights is not None and request.policy_version >= weights.policy_version:
            self._permits.withdraw(worker)
            self.grant()
            return SyncReply(
                reason=f"{worker} serves the newest weights, v{weights.policy_version}"
            )
        answer: asyncio.Future[SyncReply] = asyncio.get_running_loop().create_future()
        self._asking[worker] = answer
        self.grant()
        await asyncio.wait([answer], timeout=hold_s)
        if answer.done():
            return answer.result()
        del self._asking[worker]
        self._permits.withdraw(worker)
        if weights is None:
            return SyncReply(reason="the trainer has published no weights yet")
        if not self._ledger.lineage.is_ahead(weights.policy_version, request.policy_version):
            return SyncReply(
                reason=f"v{weights.policy_version} is not ahead of the v{request.policy_version} that "
                "serves: the trainer does again what was lost when it ended"
            )
        holders = self._permits.holders
        return SyncReply(
            reason=f"{' and '.join(holders)} must have taken weights first; "
            f"weights.concurrent = {self._concurrent}"
        )

    def grant(self) -> None:
        """Let the workers whose turn it is take the newest weights."""
        weights = self._ledger.weights
        if weights is None or self._is_closed:  # once closed, all were answered
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

    def done(self, done: SyncDone, now: float) -> None:
        """A worker has taken a set, or refused it; `now` in unix seconds."""
        held_s = self._permits.free(done.worker)
        if held_s is None:  # its time was over, or another data process gave it
            held_s = done.transfer_s + done.pause_s + done.finish_s + done.resume_s
        self._store.add_sync(done, now - held_s, now)
        self._ledger.versions.done(done)

    def close(self, reason: str) -> None:
        """This process ends: answer all, grant nothing more."""
        self._is_closed = True
        for answer in self._asking.values():
            answer.set_result(SyncReply(reason=reason))
        self._asking.clear()
