"""Weights from the trainer's memory to each worker in turn, by torch.distributed.

    CollectiveChannel   the trainer's end: publishes, and answers TransferRequest
    TransferThread      its thread: sends the requested tensors, one worker after the other
    CollectiveReceiver  a worker's end: requests, joins, receives into its own copy, checks

A version is published as with `file`, a manifest on disk, but its tensors stay in the trainer's memory
(each `whole_every`th is written to disk too: for resumption, for `dart eval`, and for times without a
trainer). A worker with a permit from the data process asks the trainer for the tensors whose digests
differ from those that it holds. Both ends know the layout of the set, so only ranges of bytes are
sent. What arrives is checked against the manifest's digests before the engine is touched.

Training continues meanwhile: what is sent is an immutable copy on the host. Memory holds the newest
version, those still to be sent (at most one per worker), and the one that is being made.

The two ends make a group by the name in the request, and keep it for the next version. Any error on
either side closes it: a dead or hanging peer costs the other end `JOIN_S`, or the transfer's deadline.
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

import torch

from bus.endpoints import make_private_dir
from bus.errors import BusError, ProtocolError, RefusedError, WeightsError
from bus.messages import Reply, Request, TransferReply, TransferRequest
from bus.requester import RequestClient
from dart_cli.weights.base import KnownVersion, Publication, Published, Received, TensorStream
from dart_cli.weights.delta_chain import HeldVersion, routes
from dart_cli.weights.file import FileChannel, Version
from dart_cli.weights.layout import layout_of, ranges
from dart_cli.weights.manifest import Manifest, check_announced
from dart_cli.weights.mirror import Mirror, update_mirror
from dart_cli.weights.transfer_group import BUCKET_BYTES, JOIN_S, RECEIVER, SENDER, TransferGroup

log = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds that the trainer may take to answer; it answers beside its training."""
MOST_NEWER = 5
"""How often a worker is referred to a newer version before it gives up."""
_GROUP = re.compile(r"[0-9a-f]{32}")


def meeting_place(run_dir: Path) -> Path:
    """Where the two ends of a group find each other."""
    return run_dir / "transfer"


# --- the trainer's end ------------------------------------------------------------------------


@dataclass(frozen=True)
class _PendingTransfer:
    request: TransferRequest
    version: Version
    deadline: float  # monotonic seconds


class TransferThread:
    """Sends versions from a daemon thread. Holds at most one pending transfer per worker."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        """Meets workers in `directory`; a transfer may take `deadline_s`, its time in the queue included."""
        shutil.rmtree(directory, ignore_errors=True)  # of a trainer that was killed
        self._directory = make_private_dir(directory)
        self._deadline_s = deadline_s
        self._pending: OrderedDict[str, _PendingTransfer] = OrderedDict()
        self._groups: dict[str, TransferGroup] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="transfer_thread", daemon=True)
        self._thread.start()

    def send(self, request: TransferRequest, version: Version) -> None:
        """Queue the requested tensors behind the transfers that are pending."""
        with self._changed:
            self._pending.pop(request.worker, None)
            deadline = time.monotonic() + self._deadline_s
            self._pending[request.worker] = _PendingTransfer(request, version, deadline)
            self._changed.notify()

    def knows(self, worker: str, group: str) -> bool:
        """Whether this trainer is in `group` with `worker`."""
        joined = self._groups.get(worker)
        return joined is not None and joined.name == group

    def close(self) -> None:
        """Accept no more; a transfer under way stops at its next message."""
        with self._changed:
            self._closing = True
            self._pending.clear()
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while (transfer := self._next()) is not None:
            worker, began = transfer.request.worker, time.monotonic()
            try:
                size = self._deliver(transfer)
            except WeightsError as error:
                log.warning("%s did not get v%d: %s", worker, _version(transfer), error)
                self._leave(worker)
            else:
                log.debug("%s got %d bytes in %.3f s", worker, size, time.monotonic() - began)
        for worker in list(self._groups):
            self._leave(worker)

    def _next(self) -> _PendingTransfer | None:
        with self._changed:
            while not (self._pending or self._closing):
                self._changed.wait()
            return None if self._closing else self._pending.popitem(last=False)[1]

    def _deliver(self, transfer: _PendingTransfer) -> int:
        """Send the tensors; returns the bytes sent. Raises WeightsError."""
        request, flat = transfer.request, transfer.version.tensors
        group = self._groups.get(request.worker)
        if group is None or group.name != request.group:
            self._leave(request.worker)
            group = self._groups[request.worker] = TransferGroup(
                self._directory / request.group, SENDER
            )
        size = 0
        for begin, end in ranges(flat.layout, set(request.tensors), BUCKET_BYTES):
            if self._closing:
                raise WeightsError("the trainer is closing")
            group.send(flat.data[begin:end], transfer.deadline)
            size += end - begin
        return size

    def _leave(self, worker: str) -> None:
        group = self._groups.pop(worker, None)
        if group is not None:
            group.close()
            (self._directory / group.name).unlink(missing_ok=True)


def _version(transfer: _PendingTransfer) -> int:
    return transfer.version.published.policy_version


class CollectiveChannel:
    """See WeightChannel, and the module."""

    def __init__(self, files: FileChannel, directory: Path, deadline_s: float) -> None:
        """`files` keeps copies on disk; workers meet this end in `directory`. Raises RunDirectoryError."""
        self._files = files
        self._transfer_thread = TransferThread(directory, deadline_s)

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Copy the tensors, then write the manifest, and the tensors too where a whole set is due."""
        return self._files.begin(tensors, policy_version)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Begin a publication and wait for it."""
        return self.begin(tensors, policy_version).result()

    def newest(self) -> Published | None:
        """The newest version on disk that can be rebuilt."""
        return self._files.newest()

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
        known: KnownVersion | None = None,
    ) -> Published:
        """As FileChannel.resume; frozen tensors are recognised by their digests."""
        return self._files.resume(tensors, policy_version, frozen, known)

    async def answer(self, _client: str, request: Request) -> Reply:
        """Send the requested tensors, or answer with the newer version. Raises ProtocolError, RefusedError."""
        if not isinstance(request, TransferRequest):
            raise ProtocolError(f"the trainer answers no {type(request).__name__}")
        version = self._files.last
        if version is None:
            raise RefusedError("the trainer has published nothing yet")
        if not _GROUP.fullmatch(request.group):
            raise ProtocolError(f"TransferRequest.group: {request.group[:40]!r} is no group name")
        newest = version.published
        requested = (request.policy_version, request.digest)
        accepted = requested == (newest.policy_version, newest.digest) and (
            request.is_new or self._transfer_thread.knows(request.worker, request.group)
        )
        if accepted:
            unknown = set(request.tensors) - version.tensors.tensors.keys()
            if unknown:
                raise ProtocolError(f"TransferRequest.tensors: {min(unknown)} does not exist")
            self._transfer_thread.send(request, version)
        return TransferReply(
            accepted=accepted,
            policy_version=newest.policy_version,
            path=str(newest.path),
            digest=newest.digest,
        )

    def close(self) -> None:
        """Stop sending; leave the newest version whole on disk."""
        self._transfer_thread.close()
        self._files.close()


# --- a worker's end ---------------------------------------------------------------------------


class CollectiveReceiver:
    """See dart_cli.weights.base.Receiver."""

    def __init__(
        self, worker: str, train: RequestClient, directory: Path, meeting: Path, deadline_s: float
    ) -> None:
        """Keeps its copy in `directory`; a transfer may take `deadline_s`."""
        self._worker = worker
        self._train = train
        self._mirror = Mirror(directory)
        self._meeting = meeting
        self._deadline_s = deadline_s
        self._group: TransferGroup | None = None
        self.read_bytes = 0

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced version, or the trainer's newest; or the announced one from disk if the trainer sends none.

        Raises WeightsError.
        """
        wanted = path, HeldVersion(policy_version, digest)
        manifest = await asyncio.to_thread(check_announced, path, policy_version, digest)
        try:
            for _ in range(MOST_NEWER):
                if (
                    self._mirror.held == wanted[1]
                ):  # the engine refused it before, or it is requested twice
                    return Received(self._mirror, wanted[1].policy_version)
                reply, group, names = await self._request(manifest, wanted[1])
                if reply.accepted:
                    await _in_daemon(partial(self._take, manifest, wanted[1], group, names))
                    return Received(self._mirror, wanted[1].policy_version)
                if reply.policy_version < policy_version:
                    raise WeightsError(f"the trainer is at v{reply.policy_version}, which is older")
                newer = Path(reply.path), HeldVersion(reply.policy_version, reply.digest)
                if newer[1] == wanted[1]:
                    self._leave()  # the group belongs to a trainer that has exited
                wanted = newer
                manifest = await asyncio.to_thread(
                    check_announced, wanted[0], reply.policy_version, reply.digest
                )
            raise WeightsError("the trainer publishes faster than its weights can be requested")
        except (WeightsError, BusError) as error:
            self._leave()  # an accepted transfer may still arrive, and must not meet another request
            return await self._from_disk(path, policy_version, digest, error)

    def close(self) -> None:
        """Leave the group and remove the copy."""
        self._leave()
        self._mirror.close()

    async def _request(
        self, manifest: Manifest, wanted: HeldVersion
    ) -> tuple[TransferReply, str, frozenset[str]]:
        """The trainer's answer, the group to join, and the tensors that it will send there."""
        group = self._group.name if self._group is not None else uuid.uuid4().hex
        names = frozenset(self._mirror.lacks(manifest))
        request = TransferRequest(
            worker=self._worker,
            policy_version=wanted.policy_version,
            digest=wanted.digest,
            group=group,
            is_new=self._group is None,
            tensors=sorted(names),
        )
        reply = await self._train.request(request, ASK_S)
        assert isinstance(reply, TransferReply)
        return reply, group, names

    def _take(
        self, manifest: Manifest, wanted: HeldVersion, group: str, names: frozenset[str]
    ) -> None:
        """Receive `names` into the copy and check them. Raises WeightsError."""
        deadline = time.monotonic() + self._deadline_s
        buckets = list(ranges(layout_of(manifest.tensors), names, BUCKET_BYTES))
        flat = self._mirror.change(manifest)
        if self._group is None:
            self._group = TransferGroup(self._meeting / group, RECEIVER)
        for begin, end in buckets:
            self._group.receive(flat.data[begin:end], deadline)
            self.read_bytes += end - begin
        flat.check(manifest, names, "what the trainer has sent")
        self._mirror.hold(manifest, wanted)

    async def _from_disk(
        self, path: Path, policy_version: int, digest: str, error: Exception
    ) -> Received:
        """The announced version from its files, if they exist. Raises WeightsError."""

        def take() -> None:
            manifest = check_announced(path, policy_version, digest)
            if not routes(path, manifest):
                raise WeightsError(f"v{policy_version} did not come from the trainer: {error}")
            log.warning("%s; loading %s from disk", error, path)
            update_mirror(self._mirror, path, manifest, self._count)

        await asyncio.to_thread(take)
        return Received(self._mirror, policy_version)

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


async def _in_daemon(work: Callable[[], None]) -> None:
    """Run `work`, which has its own deadline, in a daemon thread: the process exits without it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(finish, failed)

    threading.Thread(target=run, name="transfer", daemon=True).start()
    await done
