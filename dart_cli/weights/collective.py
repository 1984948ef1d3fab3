"""Weights from the trainer's memory to each worker in turn, by torch.distributed.

    CollectiveChannel   the trainer's end: publishes, and answers TransferRequest
    TransferThread             its thread: sends what is asked for, one worker after the other
    CollectiveReceiver  a worker's end: asks, joins, receives into its own copy, checks

A version is published as with `file`, a manifest on disk, but its tensors stay in the trainer's memory
(each `whole_every`th is written too: for resumption, `dart eval`, and a trainer that is away). A
worker that has a permit of data asks the trainer for the tensors whose digests differ from those
that it holds. Both ends know the layout of the set, so all that flows is ranges of bytes. What
comes is checked against the manifest's digests before the engine is touched.

The training goes on meanwhile: what is sent is an immutable copy on the host. In memory are the
newest version, those still asked for (at most one a worker), and the one that is being made.

The two ends make a group by the name in the request, and keep it for the next version. Any error on
either side closes it: a dead or hanging peer costs the other `JOIN_S`, or the transfer's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from bus.endpoints import make_private_dir
from bus.errors import BusError, ProtocolError, RefusedError, WeightsError
from bus.messages import Reply, Request, TransferReply, TransferRequest
from dart_cli.weights.base import Published, Received
from dart_cli.weights.delta_chain import Held, routes
from dart_cli.weights.file import FileChannel, Version
from dart_cli.weights.layout import layout_of, ranges
from dart_cli.weights.manifest import Manifest, check
from dart_cli.weights.mirror import Mirror, take_files
from dart_cli.weights.transfer_group import BUCKET_BYTES, JOIN_S, SENDER, TAKER, Pair

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How long the trainer may take to answer; it does so beside its training."""
MOST_NEWER = 5
"""Newer versions that a worker is sent on to before it gives up."""
_GROUP = re.compile(r"[0-9a-f]{32}")


def meeting_place(run_dir: Path) -> Path:
    """Where the two ends of a group find each other."""
    return run_dir / "transfer"


# --- the trainer's end ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Transfer:
    request: TransferRequest
    version: Version
    deadline: float  # monotonic seconds


class TransferThread:
    """Sends versions from a daemon thread. Holds at most one job for each worker."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        """Meets workers in `directory`; a transfer may take `deadline_s`, its wait included."""
        shutil.rmtree(directory, ignore_errors=True)  # of a trainer that was killed
        self._directory = make_private_dir(directory)
        self._deadline_s = deadline_s
        self._jobs: OrderedDict[str, _Transfer] = OrderedDict()
        self._pairs: dict[str, Pair] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="transfer_thread", daemon=True)
        self._thread.start()

    def send(self, request: TransferRequest, version: Version) -> None:
        """Send what is asked for, after those who asked before."""
        with self._changed:
            self._jobs.pop(request.worker, None)
            deadline = time.monotonic() + self._deadline_s
            self._jobs[request.worker] = _Transfer(request, version, deadline)
            self._changed.notify()

    def knows(self, worker: str, group: str) -> bool:
        """Whether this trainer is in the group."""
        pair = self._pairs.get(worker)
        return pair is not None and pair.name == group

    def close(self) -> None:
        """Take no more; a transfer in work has until its next message."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            worker, began = job.request.worker, time.monotonic()
            try:
                size = self._deliver(job)
            except WeightsError as error:
                log.warning("%s did not get v%d: %s", worker, _version(job), error)
                self._leave(worker)
            else:
                log.debug("%s got %d bytes in %.3f s", worker, size, time.monotonic() - began)
        for worker in list(self._pairs):
            self._leave(worker)

    def _next(self) -> _Transfer | None:
        with self._changed:
            while not (self._jobs or self._closing):
                self._changed.wait()
            return None if self._closing else self._jobs.popitem(last=False)[1]

    def _deliver(self, job: _Transfer) -> int:
        """Send the tensors; how many bytes. Raises WeightsError."""
        request, flat = job.request, job.version.tensors
        pair = self._pairs.get(request.worker)
        if pair is None or pair.name != request.group:
            self._leave(request.worker)
            pair = self._pairs[request.worker] = Pair(self._directory / request.group, SENDER)
        size = 0
        for begin, end in ranges(flat.layout, set(request.tensors), BUCKET_BYTES):
            if self._closing:
                raise WeightsError("the trainer ends")
            pair.send(flat.data[begin:end], job.deadline)
            size += end - begin
        return size

    def _leave(self, worker: str) -> None:
        pair = self._pairs.pop(worker, None)
        if pair is not None:
            pair.close()
            (self._directory / pair.name).unlink(missing_ok=True)


def _version(job: _Transfer) -> int:
    return job.version.published.policy_version


class CollectiveChannel:
    """See WeightChannel, and the module."""

    def __init__(self, files: FileChannel, directory: Path, deadline_s: float) -> None:
        """`files` keeps copies; workers are met in `directory`. Raises RunDirectoryError."""
        self._files = files
        self._transfer_thread = TransferThread(directory, deadline_s)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Copy the tensors, and write the manifest, the set too where it is due."""
        return self._files.publish(tensors, policy_version)

    def newest(self) -> Published | None:
        """The newest version that a trainer which is away has left on disk."""
        return self._files.newest()

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
    ) -> Published:
        """As FileChannel.resume; what is frozen is found by its digest."""
        return self._files.resume(tensors, policy_version, frozen)

    async def answer(self, _client: str, request: Request) -> Reply:
        """Send what is asked for, or say what is newer. Raises ProtocolError, RefusedError."""
        if not isinstance(request, TransferRequest):
            raise ProtocolError(f"the trainer answers no {type(request).__name__}")
        version = self._files.last
        if version is None:
            raise RefusedError("the trainer has published nothing yet")
        if not _GROUP.fullmatch(request.group):
            raise ProtocolError(f"TransferRequest.group: {request.group[:40]!r} is no name of one")
        newest = version.published
        wanted = (request.policy_version, request.digest)
        accepted = wanted == (newest.policy_version, newest.digest) and (
            request.is_new or self._transfer_thread.knows(request.worker, request.group)
        )
        if accepted:
            unknown = set(request.tensors) - version.tensors.tensors.keys()
            if unknown:
                raise ProtocolError(f"TransferRequest.tensors: there is no {min(unknown)}")
            self._transfer_thread.send(request, version)
        return TransferReply(
            accepted=accepted,
            policy_version=newest.policy_version,
            path=str(newest.path),
            digest=newest.digest,
        )

    def close(self) -> None:
        """Send nothing more; leave the newest version whole on disk."""
        self._transfer_thread.close()
        self._files.close()


# --- a worker's end ---------------------------------------------------------------------------


class Asks(Protocol):
    """The part of bus.sockets.Requester that is needed here."""

    async def request(self, message: Request, deadline_s: float) -> Reply:
        """The trainer's answer. Raises BusError: a passed deadline, and what it refuses with."""
        ...


class CollectiveReceiver:
    """See dart_cli.weights.base.Receiver."""

    def __init__(
        self, worker: str, train: Asks, directory: Path, meeting: Path, deadline_s: float
    ) -> None:
        """Keeps its copy in `directory`; a transfer may take `deadline_s`."""
        self._worker = worker
        self._train = train
        self._mirror = Mirror(directory)
        self._meeting = meeting
        self._deadline_s = deadline_s
        self._pair: Pair | None = None
        self.read_bytes = 0

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced version, or the trainer's newest; from disk if it sends none and it is there.

        Raises WeightsError.
        """
        wanted = path, Held(policy_version, digest)
        manifest = await asyncio.to_thread(check, path, policy_version, digest)
        try:
            for _ in range(MOST_NEWER):
                if self._mirror.held == wanted[1]:  # refused before, or asked for by mistake
                    return Received(self._mirror, wanted[1].policy_version)
                reply, group, names = await self._ask(manifest, wanted[1])
                if reply.accepted:
                    await _in_daemon(partial(self._take, manifest, wanted[1], group, names))
                    return Received(self._mirror, wanted[1].policy_version)
                if reply.policy_version < policy_version:
                    raise WeightsError(f"the trainer is at v{reply.policy_version}, an older one")
                newer = Path(reply.path), Held(reply.policy_version, reply.digest)
                if newer[1] == wanted[1]:
                    self._leave()  # the group is of a trainer that is gone
                wanted = newer
                manifest = await asyncio.to_thread(
                    check, wanted[0], reply.policy_version, reply.digest
                )
            raise WeightsError("the trainer publishes faster than its weights can be asked for")
        except (WeightsError, BusError) as error:
            self._leave()  # what was accepted may come still, and must not meet another question
            return await self._from_disk(path, policy_version, digest, error)

    def close(self) -> None:
        """Leave the group and remove the copy."""
        self._leave()
        self._mirror.close()

    async def _ask(
        self, manifest: Manifest, wanted: Held
    ) -> tuple[TransferReply, str, frozenset[str]]:
        """The trainer's answer, the group to join, and what it is then to send there."""
        group = self._pair.name if self._pair is not None else uuid.uuid4().hex
        names = frozenset(self._mirror.lacks(manifest))
        request = TransferRequest(
            worker=self._worker,
            policy_version=wanted.policy_version,
            digest=wanted.digest,
            group=group,
            is_new=self._pair is None,
            tensors=sorted(names),
        )
        reply = await self._train.request(request, ASK_S)
        assert isinstance(reply, TransferReply)
        return reply, group, names

    def _take(self, manifest: Manifest, wanted: Held, group: str, names: frozenset[str]) -> None:
        """Receive `names` into the copy and check them. Raises WeightsError."""
        deadline = time.monotonic() + self._deadline_s
        buckets = list(ranges(layout_of(manifest.tensors), names, BUCKET_BYTES))
        flat = self._mirror.change(manifest)
        if self._pair is None:
            self._pair = Pair(self._meeting / group, TAKER)
        for begin, end in buckets:
            self._pair.receive(flat.data[begin:end], deadline)
            self.read_bytes += end - begin
        flat.check(manifest, names, "what the trainer has sent")
        self._mirror.hold(manifest, wanted)

    async def _from_disk(
        self, path: Path, policy_version: int, digest: str, error: Exception
    ) -> Received:
        """The announced version from its files, if they are there. Raises WeightsError."""

        def take() -> None:
            manifest = check(path, policy_version, digest)
            if not routes(path, manifest):
                raise WeightsError(f"v{policy_version} did not come from the trainer: {error}")
            log.warning("%s; takes %s from disk", error, path)
            take_files(self._mirror, path, manifest, self._count)

        await asyncio.to_thread(take)
        return Received(self._mirror, policy_version)

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def _leave(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None


async def _in_daemon(work: Callable[[], None]) -> None:
    """Run `work`, which ends by its own deadline, in a thread that no end of the process waits for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=run, name="transfer", daemon=True).start()
    await done
