"""The trainer's thread that broadcasts: it collects the workers that ask, forms their group, and sends.

    Version        a published version and the trainer's own copy of it
    RoundsThread   the thread, from the first request to `close`

Workers that took part in a round are expected in the next one too. It begins as soon as all expected
workers that lack the newest version have asked, or `GATHER_S` after the first request. A worker that did
not ask is no longer expected, until it asks again. A round that breaks off is tried again with the workers
that ask again. If that round breaks off too, its workers are served one by one, after all other workers.
If the rounds with a worker break off `MOST_BROKEN` times in a row, the version is written to disk, where
that worker finds it.

Bounds: one request for each worker; one group; and one version that is kept in memory for the round under way
(between rounds none is).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from bus.errors import WeightsError
from bus.weights import TransferReply, TransferRequest
from dart_cli.weights.broadcast.group import join
from dart_cli.weights.broadcast.rendezvous import GroupStore, Rendezvous
from dart_cli.weights.broadcast.transport import (
    JOIN_S,
    MOST_BROKEN,
    ByteGroup,
    Member,
    Transport,
    join_deadline,
)
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.manifest import Layout, Published

log = logging.getLogger(__name__)

MEET_S = 0.05
"""Seconds for which a round waits for workers that it does not expect, since several may start together."""
GATHER_S = 2.0
"""Seconds for which a round waits for a worker that it expects."""
MOST_BROKEN_TOGETHER = 2
"""Rounds that may break off in a row before each of their workers is served alone, since one of them may be
able to ask but not to receive."""
ASKS_AGAIN_S = 1.0
"""A worker whose request was held asks again within this time, and the wait for the round goes on."""
_LOOK_S = 0.02


class Version:
    """A published version and the trainer's own copy of it."""

    def __init__(self, published: Published, tensors: FlatWeights) -> None:
        self.published = published
        self.tensors = tensors
        self._lock = threading.Lock()  # guards the two fields below
        self._readers = 0
        self._is_taken = False

    @contextlib.contextmanager
    def read(self) -> Iterator[FlatWeights]:
        """Yield the copy, which does not change inside the block.

        Raises WeightsError if a later version has taken its memory.
        """
        with self._lock:
            if self._is_taken:
                raise WeightsError(f"v{self.published.policy_version} is no longer in memory")
            self._readers += 1
        try:
            yield self.tensors
        finally:
            with self._lock:
                self._readers -= 1

    def take(self, layout: Layout) -> FlatWeights | None:
        """Return this version's memory for a later version of `layout`; it cannot be read afterwards.

        Return None if it is being read, was taken before, or has another layout.
        """
        with self._lock:
            if self._readers or self._is_taken or self.tensors.layout != layout:
                return None
            self._is_taken = True
            return self.tensors


@dataclass(eq=False)
class PendingRequest:
    """A worker's request, and the answer for which it waits."""

    request: TransferRequest
    answer: Future[TransferReply] = field(default_factory=Future)


@dataclass(frozen=True)
class _Formed:
    """A group, and the workers in it."""

    group: ByteGroup
    workers: list[str]  # by rank, from 1


class RoundsThread:
    """A daemon thread that broadcasts versions."""

    def __init__(
        self,
        source: Callable[[], Version | None],
        transport: Transport,
        rendezvous: Rendezvous,
        write: Callable[[Published, FlatWeights], bool],
    ) -> None:
        """Start the thread, which broadcasts the newest version to the workers that ask.

        `source` returns the newest version, or None before the first.
        `write` writes a version to disk whole, and returns False if that was done before.
        """
        self._source = source
        self._write = write
        self._transport = transport
        self._rendezvous = rendezvous
        self._pending: dict[str, PendingRequest] = {}  # by worker
        # By worker: the digest of the version that it has received; empty if a round broke off since.
        self._expected: dict[str, str] = {}
        self._broken: Counter[str] = Counter()  # by worker: rounds in a row that broke off
        self._formed: _Formed | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="broadcast", daemon=True)
        self._thread.start()

    def ask(self, request: TransferRequest) -> Future[TransferReply]:
        """Enter a worker into the next round; return its answer, which comes when the round begins.

        Cancel the answer to leave the round.
        """
        pending = PendingRequest(request)
        with self._changed:
            if before := self._pending.pop(request.worker, None):
                before.answer.cancel()
            self._pending[request.worker] = pending
            self._changed.notify()
        return pending.answer

    def close(self) -> None:
        """End the thread. A broadcast that is under way stops at its next bucket."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while round_ := self._gather():
            self._begin(*round_)
            del round_  # it holds the version, whose memory the channel must be able to free
        self._leave()

    def _begin(self, version: Version, requests: list[PendingRequest]) -> None:
        """Answer the requests with a round.

        If a later version has this one's memory, tell the workers to ask again.
        """
        with contextlib.ExitStack() as stack:
            try:
                tensors = stack.enter_context(version.read())
            except WeightsError:
                for pending in requests:
                    pending.answer.set_result(refer_to(version.published))
                return
            self._round(version.published, tensors, requests)

    def _gather(self) -> tuple[Version, list[PendingRequest]] | None:
        """Return the newest version and the requests of the next round for it; None once this is closed."""
        # The time of this round's first request, and of the last look that saw a request.
        began = last_seen_at = -ASKS_AGAIN_S
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                version = self._source()
                if version is not None:
                    self._refer(version)
                if version is None or not self._pending:
                    version = None  # not held during the wait, as in _serve
                    self._changed.wait()
                    continue
                if now - last_seen_at >= ASKS_AGAIN_S:
                    began = now
                last_seen_at, waited_s = now, now - began
                if waited_s < GATHER_S and (waited_s < MEET_S or self._is_one_missing(version)):
                    self._changed.wait(_LOOK_S)
                    continue
                requests = [
                    pending
                    for pending in self._next()
                    if pending.answer.set_running_or_notify_cancel()
                ]
                if requests:
                    return version, requests
            for pending in self._pending.values():
                pending.answer.cancel()
            self._pending.clear()
        return None

    def _next(self) -> list[PendingRequest]:
        """Remove the requests of the next round from the pending ones, and return them.

        These are the requests of all workers whose rounds broke off less than `MOST_BROKEN_TOGETHER` times in
        a row. If there are none, it is the request of one other worker.
        """
        together = [w for w in self._pending if self._broken[w] < MOST_BROKEN_TOGETHER]
        return [self._pending.pop(worker) for worker in together or list(self._pending)[:1]]

    def _refer(self, newest: Version) -> None:
        """Answer requests for older versions with the newest one; drop requests that were cancelled."""
        for worker, pending in list(self._pending.items()):
            if pending.answer.cancelled():
                del self._pending[worker]
            elif pending.request.digest != newest.published.digest:
                del self._pending[worker]
                if pending.answer.set_running_or_notify_cancel():
                    pending.answer.set_result(refer_to(newest.published))

    def _is_one_missing(self, newest: Version) -> bool:
        """Return True if an expected worker that lacks the newest version has not asked yet."""
        return any(
            digest != newest.published.digest and worker not in self._pending
            for worker, digest in self._expected.items()
        )

    def _round(
        self, published: Published, tensors: FlatWeights, requests: list[PendingRequest]
    ) -> None:
        """Broadcast the tensors that any of the workers lacks; use the last group if it fits."""
        # 1. Use the last group, or name a new one.
        began = time.monotonic()
        requests = sorted(requests, key=lambda pending: pending.request.worker)
        workers = [pending.request.worker for pending in requests]
        names = {name for pending in requests for name in pending.request.tensors}
        formed = self._formed
        if (
            formed is None
            or formed.workers != workers
            or any(pending.request.group != formed.group.name for pending in requests)
        ):
            self._leave()
            name = uuid.uuid4().hex
            self._rendezvous.open(name)
        else:
            name = formed.group.name
        # 2. Answer the requests.
        reply = refer_to(published).model_copy(
            update={
                "accepted": True,
                "group": name,
                "size": len(workers) + 1,
                "tensors": sorted(names),
            }
        )
        for rank, pending in enumerate(requests, 1):
            pending.answer.set_result(reply.model_copy(update={"rank": rank}))
        newest = published.digest
        self._expected = {
            worker: digest for worker, digest in self._expected.items() if digest == newest
        } | dict.fromkeys(workers, "")
        # 3. Send.
        try:
            size = self._send(tensors, workers, name, names)
        except Exception as error:  # no error may end the thread
            if not self._closing:
                log.warning(
                    "v%d: %s; %s",
                    published.policy_version,
                    error,
                    _who(workers),
                    exc_info=not isinstance(error, WeightsError),
                )
            self._leave()
            self._broken.update(workers)
            self._write_if_unreachable(published, tensors, workers)
            return
        self._expected |= dict.fromkeys(workers, newest)
        for worker in workers:
            del self._broken[worker]
        log.info(
            "v%d: %d bytes to %s in %.3f s",
            published.policy_version,
            size,
            _who(workers),
            time.monotonic() - began,
        )

    def _write_if_unreachable(
        self, published: Published, tensors: FlatWeights, workers: list[str]
    ) -> None:
        """Write the version to disk whole if no broadcast reaches one of `workers`; else the run would wait."""
        lacking = [worker for worker in workers if self._broken[worker] >= MOST_BROKEN]
        if not lacking or self._closing:
            return
        try:
            is_new = self._write(published, tensors)
        except OSError as error:
            log.warning("v%d cannot be written to disk: %s", published.policy_version, error)
            return
        if is_new:
            log.warning(
                "v%d was written to disk whole, as no broadcast reaches %s; %s",
                published.policy_version,
                _who(lacking),
                self._transport.fix(),
            )

    def _send(self, tensors: FlatWeights, workers: list[str], name: str, names: set[str]) -> int:
        """Broadcast the tensors `names`, and return the number of bytes sent. Raises WeightsError."""
        if self._formed is None:
            store = GroupStore(partial(self._rendezvous.change, name), join_deadline())
            member = Member(name, 0, len(workers) + 1)
            self._formed = _Formed(join(self._transport, member, store), workers)
        return self._formed.group.broadcast(tensors, names, lambda: self._closing)

    def _leave(self) -> None:
        if self._formed is not None:
            self._formed.group.close()
            self._formed = None


def refer_to(newest: Published) -> TransferReply:
    """Return the answer that refers a worker to the newest version: it must ask again for that one."""
    return TransferReply(
        accepted=False,
        policy_version=newest.policy_version,
        path=str(newest.path),
        digest=newest.digest,
    )


def _who(workers: list[str]) -> str:
    return ", ".join(workers)
