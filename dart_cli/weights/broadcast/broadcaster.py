"""The trainer's thread that broadcasts: collects the workers that ask, forms their group, sends.

    Version        a published version and the trainer's own copy of it
    RoundsThread   the thread, from the first request to `close`

Workers that take part are expected in the next round too: it begins as soon as all of them that lack
the newest version have asked, or `GATHER_S` after the first has. One that did not ask is expected no
more, until it asks again. A round that breaks off is tried again with those who ask again; where that
breaks off too, its workers are served one by one, those of other rounds first. A version of which the rounds
with a worker have broken off `MOST_BROKEN` times in a row is written to disk, where that worker finds it.

What bounds what: requests by the number of workers, one each; groups, one; versions kept in memory, by
the round under way: between rounds none is.
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
"""A round waits so long for workers that it does not expect: several may have started together."""
GATHER_S = 2.0
"""A round waits so long for a worker that it expects."""
MOST_BROKEN_TOGETHER = 2
"""Rounds that may break off in a row before each worker of them is served alone: one of them may ask, and
yet receive nothing."""
ASKS_AGAIN_S = 1.0
"""A worker whose request was held for long enough asks again within this time: the round is not begun anew."""
_LOOK_S = 0.02


class Version:
    """A published version and the trainer's own copy of it."""

    def __init__(self, published: Published, tensors: FlatWeights) -> None:
        self.published = published
        self.tensors = tensors
        self._lock = threading.Lock()  # of what follows
        self._readers = 0
        self._is_taken = False

    @contextlib.contextmanager
    def read(self) -> Iterator[FlatWeights]:
        """Yield the copy, which does not change inside. Raises WeightsError if a later version has its memory."""
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
        """Its memory, for a later version of `layout`; None if it is read now, or another size."""
        with self._lock:
            if self._readers or self._is_taken or self.tensors.layout != layout:
                return None
            self._is_taken = True
            return self.tensors


@dataclass(eq=False)
class Ask:
    """A worker's request, and the answer that it waits for."""

    request: TransferRequest
    answer: Future[TransferReply] = field(default_factory=Future)


@dataclass(frozen=True)
class _Formed:
    group: ByteGroup
    workers: list[str]  # by rank, from 1


class RoundsThread:
    """Broadcasts versions from a daemon thread."""

    def __init__(
        self,
        source: Callable[[], Version | None],
        transport: Transport,
        rendezvous: Rendezvous,
        write: Callable[[Published, FlatWeights], bool],
    ) -> None:
        """Broadcasts the newest version, which `source` returns, to those that `ask`.

        `write` brings a version to disk whole; it returns False where that was done before.
        """
        self._source = source
        self._write = write
        self._transport = transport
        self._rendezvous = rendezvous
        self._asking: dict[str, Ask] = {}  # by worker
        self._expected: dict[str, str] = {}  # worker -> digest of what it has, as far as is known
        self._broken: Counter[str] = Counter()  # worker -> rounds with it in a row that broke off
        self._formed: _Formed | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="broadcast", daemon=True)
        self._thread.start()

    def ask(self, request: TransferRequest) -> Future[TransferReply]:
        """Enter the next round; the answer comes when that begins. Cancel it to leave."""
        ask = Ask(request)
        with self._changed:
            if before := self._asking.pop(request.worker, None):
                before.answer.cancel()
            self._asking[request.worker] = ask
            self._changed.notify()
        return ask.answer

    def close(self) -> None:
        """Accept no more; a broadcast under way stops at its next bucket."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while gathered := self._gather():
            self._begin(*gathered)
            del gathered  # the version: its memory is the channel's to free
        self._leave()

    def _begin(self, version: Version, asks: list[Ask]) -> None:
        """Answer the requests: with a round, or where a later version has this one's memory, to ask again."""
        with contextlib.ExitStack() as stack:
            try:
                tensors = stack.enter_context(version.read())
            except WeightsError:
                for ask in asks:
                    ask.answer.set_result(refer_to(version.published))
                return
            self._round(version.published, tensors, asks)

    def _gather(self) -> tuple[Version, list[Ask]] | None:
        """Return the newest version and the requests for it, of the next round; None once this is closed."""
        began = (
            asked_at
        ) = -ASKS_AGAIN_S  # the first request of this round, and the last look with one
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                version = self._source()
                if version is not None:
                    self._refer(version)
                if version is None or not self._asking:
                    version = None  # as in _serve
                    self._changed.wait()
                    continue
                if now - asked_at >= ASKS_AGAIN_S:
                    began = now
                asked_at, waited_s = now, now - began
                if waited_s < GATHER_S and (waited_s < MEET_S or self._is_one_missing(version)):
                    self._changed.wait(_LOOK_S)
                    continue
                asks = [ask for ask in self._next() if ask.answer.set_running_or_notify_cancel()]
                if asks:
                    return version, asks
            for ask in self._asking.values():
                ask.answer.cancel()
            self._asking.clear()
        return None

    def _next(self) -> list[Ask]:
        """Those of the next round, taken out: all that are trusted together, else one of the others."""
        together = [w for w in self._asking if self._broken[w] < MOST_BROKEN_TOGETHER]
        return [self._asking.pop(worker) for worker in together or list(self._asking)[:1]]

    def _refer(self, newest: Version) -> None:
        """Tell those who ask for an older version of the newest; forget those who have left."""
        for worker, ask in list(self._asking.items()):
            if ask.answer.cancelled():
                del self._asking[worker]
            elif ask.request.digest != newest.published.digest:
                del self._asking[worker]
                if ask.answer.set_running_or_notify_cancel():
                    ask.answer.set_result(refer_to(newest.published))

    def _is_one_missing(self, newest: Version) -> bool:
        """Whether a worker that is expected, and lacks the newest version, has not asked yet."""
        return any(
            digest != newest.published.digest and worker not in self._asking
            for worker, digest in self._expected.items()
        )

    def _round(self, published: Published, tensors: FlatWeights, asks: list[Ask]) -> None:
        """Broadcast what any of them lacks, in the group before if that is theirs still."""
        began = time.monotonic()
        asks = sorted(asks, key=lambda ask: ask.request.worker)
        workers = [ask.request.worker for ask in asks]
        names = {name for ask in asks for name in ask.request.tensors}
        formed = self._formed
        is_theirs = formed is not None and formed.workers == workers
        if (
            formed is None
            or not is_theirs
            or any(a.request.group != formed.group.name for a in asks)
        ):
            self._leave()
            name = uuid.uuid4().hex
            self._rendezvous.open(name)
        else:
            name = formed.group.name
        told = refer_to(published).model_copy(
            update={
                "accepted": True,
                "group": name,
                "size": len(workers) + 1,
                "tensors": sorted(names),
            }
        )
        for rank, ask in enumerate(asks, 1):
            ask.answer.set_result(told.model_copy(update={"rank": rank}))
        digest = published.digest
        self._expected = {
            worker: held for worker, held in self._expected.items() if held == digest
        } | dict.fromkeys(workers, "")
        try:
            size = self._send(tensors, workers, name, names)
        except Exception as error:  # none may end the thread
            if not self._closing:
                log.warning(
                    "v%d: %s; %s",
                    *(published.policy_version, error, _who(workers)),
                    exc_info=not isinstance(error, WeightsError),
                )
            self._leave()
            self._broken.update(workers)
            self._spare(published, tensors, workers)
            return
        self._expected |= dict.fromkeys(workers, digest)
        for worker in workers:
            del self._broken[worker]
        log.info(
            "v%d: %d bytes to %s in %.3f s",
            *(published.policy_version, size, _who(workers), time.monotonic() - began),
        )

    def _spare(self, published: Published, tensors: FlatWeights, workers: list[str]) -> None:
        """Write the version whole if no broadcast reaches one of `workers`: else the run would stand still."""
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
                *(published.policy_version, _who(lacking), self._transport.cure()),
            )

    def _send(self, tensors: FlatWeights, workers: list[str], name: str, names: set[str]) -> int:
        """Return the bytes sent. Raises WeightsError."""
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
    """Return the answer to a request for another version."""
    return TransferReply(
        accepted=False,
        policy_version=newest.policy_version,
        path=str(newest.path),
        digest=newest.digest,
    )


def _who(workers: list[str]) -> str:
    return ", ".join(workers)
