"""A worker's end of the channels `gloo` and `nccl`.

    BroadcastReceiver   takes part in the trainer's broadcasts
    Mirror              the worker's own copy of the weights, into which broadcasts are received

A worker asks the trainer as soon as a new version is announced. So all workers receive it in one broadcast,
into their own copies, while their engines serve. Each worker then waits for its permit to swap, and its
engine reads the copy. The received tensors are checked against the digests of the manifest before the
engine reads them.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from bus.endpoints import make_private_dir
from bus.errors import BusError, WeightsError
from bus.requests import RequestClient
from bus.weights import ManifestReply, ManifestRequest, TransferReply, TransferRequest
from dart_cli.runtime.background import in_daemon_thread
from dart_cli.weights.broadcast.group import join
from dart_cli.weights.broadcast.rendezvous import GroupStore, over_bus
from dart_cli.weights.broadcast.transport import (
    MOST_BROKEN,
    ByteGroup,
    Member,
    Transport,
    join_deadline,
)
from dart_cli.weights.flat_weights import FlatWeights, check_finite, check_fit
from dart_cli.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    KnownVersion,
    Manifest,
    check_announced,
    check_is_announced,
    layout_of,
    parse_manifest,
)
from dart_cli.weights.receiver import ReceivedWeights
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds within which the trainer must answer; it answers beside its training, and holds requests for
less."""
ASK_AGAIN_S = 0.1
"""Least time between two requests for one version. It matters if the trainer does not hold them: two
workers with one name replace each other's requests."""
MOST_REFUSED = 3
"""Number of versions in a row that did not arrive, from which on the error suggests another channel."""


class BroadcastReceiver:
    """A Receiver (dart_cli/weights/receiver.py) of broadcasts."""

    def __init__(
        self,
        worker: str,
        train: RequestClient,
        directory: Path,
        transport: Transport,
        deadline_s: float,
    ) -> None:
        """Keep the copy in `directory`; a broadcast must begin within `deadline_s`."""
        self._worker = worker
        self._train = train
        self.mirror = Mirror(directory)
        self._transport = transport
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._group: ByteGroup | None = None
        self._broken = 0  # broadcasts in a row that broke off
        self._refused = 0  # versions in a row that did not come
        self._is_closed = False
        self.read_bytes = 0

    @property
    def group(self) -> str:
        """The name of the group that this worker is in; empty for none."""
        return "" if self._group is None else self._group.name

    async def prepare(self, policy_version: int) -> None:
        """Receive the newest version if it is `policy_version` or later; an error is only logged."""
        try:
            await self._receive(policy_version)
        except (WeightsError, BusError) as error:
            log.info("v%d did not come from the trainer yet: %s", policy_version, error)

    async def receive(self, path: Path, policy_version: int, digest: str) -> ReceivedWeights:
        """Return the announced version, or a later one that the trainer sends instead.

        If the trainer sends none, the announced version is read from disk. After `MOST_BROKEN` broadcasts
        in a row that broke off, files are tried first, and only `prepare` tries whether a broadcast arrives
        again. Raises WeightsError.
        """
        is_on_disk = partial(_is_whole, path, policy_version, digest)
        if self._broken >= MOST_BROKEN and await asyncio.to_thread(is_on_disk):
            log.info("no broadcast arrives; loading %s from disk", path)
            self._refused = 0
            return ReceivedWeights(path, policy_version)
        try:
            await self._receive(policy_version, KnownVersion(policy_version, digest))
        except (WeightsError, BusError) as error:
            if await asyncio.to_thread(is_on_disk):
                log.warning("%s; loading %s from disk", error, path)
                self._refused = 0
                return ReceivedWeights(path, policy_version)
            self._refused += 1
            fix = f"; {self._transport.fix()}" if self._refused >= MOST_REFUSED else ""
            raise WeightsError(
                f"v{policy_version} did not come from the trainer: {error}{fix}"
            ) from None
        self._refused = 0
        version = self.mirror.version
        assert version is not None
        return ReceivedWeights(self.mirror, version.policy_version)

    def close(self) -> None:
        """Leave the group and remove the copy."""
        self._is_closed = True
        self._leave()
        self.mirror.close()

    async def _receive(self, policy_version: int, announced: KnownVersion | None = None) -> None:
        """Receive `policy_version`, or a later version, into the copy. Raises WeightsError, BusError.

        `announced` is the version with its digest, if the digest is known.
        """
        present = self.mirror.version
        if present is not None and (
            present == announced
            or present.policy_version > policy_version
            or (announced is None and present.policy_version == policy_version)
        ):
            return
        target, manifest = KnownVersion(-1, ""), None
        give_up = time.monotonic() + self._deadline_s
        while True:
            asked_at = time.monotonic()
            reply = await self._ask(target, manifest)
            newest = KnownVersion(reply.policy_version, reply.digest)
            if reply.accepted and manifest is not None:
                try:
                    await in_daemon_thread(partial(self._take_part, reply, manifest))
                except WeightsError as error:
                    self._leave()
                    self._broken += 1
                    if self._broken >= MOST_BROKEN or self._is_closed:
                        raise
                    log.warning("%s; asks again", error)
                    continue
                self._broken = 0
                await in_daemon_thread(partial(self._check, reply, manifest))
                return
            if newest.policy_version < policy_version:
                raise WeightsError(f"the trainer is at v{newest.policy_version}, which is older")
            if self.mirror.version == newest:
                return
            if time.monotonic() > give_up:
                raise WeightsError(f"the trainer began no broadcast in {self._deadline_s:g} s")
            if newest != target:
                target, manifest = newest, await self._manifest(reply)
                await asyncio.to_thread(self.mirror.reserve, manifest)
            else:
                await asyncio.sleep(max(0.0, asked_at + ASK_AGAIN_S - time.monotonic()))

    async def _ask(self, target: KnownVersion, manifest: Manifest | None) -> TransferReply:
        """Ask to take part in the broadcast of `target`; without a manifest, ask for the newest version."""
        request = TransferRequest(
            worker=self._worker,
            policy_version=target.policy_version,
            digest=target.digest,
            group=self.group,
            tensors=[] if manifest is None else sorted(self.mirror.lacks(manifest)),
        )
        reply = await self._train.request(request, ASK_S)
        assert isinstance(reply, TransferReply)
        return reply

    async def _manifest(self, newest: TransferReply) -> Manifest:
        """Return the manifest of the newest version: from its folder, or from a trainer on another host."""
        path, version = Path(newest.path), newest.policy_version
        try:
            return await asyncio.to_thread(check_announced, path, version, newest.digest)
        except WeightsError:
            request = ManifestRequest(policy_version=version, digest=newest.digest)
        reply = await self._train.request(request, ASK_S)
        assert isinstance(reply, ManifestReply)
        manifest = parse_manifest(reply.text, f"the trainer's manifest of v{version}")
        check_is_announced(path, manifest, version, newest.digest)
        return manifest

    def _take_part(self, reply: TransferReply, manifest: Manifest) -> None:
        """Receive the tensors of a round into the copy. Raises WeightsError."""
        if self._group is None or self.group != reply.group:
            self._leave()
            member = Member(reply.group, reply.rank, reply.size)
            deadline = join_deadline()
            keys = over_bus(self._train, self._loop, reply.group, deadline)
            store = GroupStore(keys, deadline)
            self._group = join(self._transport, member, store)
            if self._is_closed:
                raise WeightsError("this worker is closing")
        flat = self.mirror.change(manifest)
        names = set(reply.tensors)
        self.read_bytes += self._group.broadcast(flat, names, lambda: self._is_closed)

    def _check(self, reply: TransferReply, manifest: Manifest) -> None:
        """Check the received tensors against their digests, and complete the copy. Raises WeightsError."""
        flat = self.mirror.change(manifest)
        try:
            flat.check(manifest, set(reply.tensors), "what the trainer has sent")
        except WeightsError:
            self._leave()
            raise
        self.mirror.complete(manifest, KnownVersion(reply.policy_version, reply.digest))

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _is_whole(path: Path, policy_version: int, digest: str) -> bool:
    """Return True if the announced version is whole on this host."""
    try:
        check_announced(path, policy_version, digest)
    except WeightsError:  # not on this host, or removed
        return False
    return (path / WEIGHTS).is_file()


class Mirror:
    """A worker's own copy of the newest version that it received; it is a CheckedSet.

    Only one thread at a time may call it. It is a directory with manifest.json and model.safetensors, the
    latter in shared memory if it fits. Broadcasts change it in place, and engines load it like a published
    directory. `version` is set only after the tensors were checked against the manifest; while they change
    it is None.
    """

    def __init__(self, directory: Path) -> None:
        """Start empty: files left in `directory` are removed. Raises RunDirectoryError."""
        self.directory = make_private_dir(directory)
        self.version: KnownVersion | None = None
        self._manifest: Manifest | None = None
        self._flat: FlatWeights | None = None
        self._storage: Storage | None = None
        self._empty()

    def reserve(self, manifest: Manifest) -> None:
        """Allocate the file for `manifest`, unless the present one fits. Raises WeightsError."""
        if self._flat is None or self._flat.layout != layout_of(manifest.tensors):
            self.change(manifest)

    def change(self, manifest: Manifest) -> FlatWeights:
        """Begin a change to `manifest`; the caller fills the tensors and calls `complete`.

        Raises WeightsError.
        """
        self.version = None
        layout = layout_of(manifest.tensors)
        try:
            (self.directory / MANIFEST).unlink(missing_ok=True)
            if self._flat is None or self._flat.layout != layout:
                self._empty()
                self._storage = self._storage or Storage(self.directory)
                file = self._storage.make(self.directory / WEIGHTS, layout.size_bytes)
                self._flat = FlatWeights.in_file(manifest.tensors, file)
                self._storage.sweep()
        except OSError as error:
            raise self._disk_error(error) from None
        return self._flat

    def _disk_error(self, error: OSError) -> WeightsError:
        return WeightsError(f"{self.directory} has no room for weights: {error}")

    def complete(self, manifest: Manifest, version: KnownVersion) -> None:
        """End a change after its tensors were checked against `manifest`. Raises WeightsError."""
        try:
            file = self.directory / MANIFEST
            file.write_text(manifest.text(), encoding="utf-8")
        except OSError as error:
            raise self._disk_error(error) from None
        self._manifest, self.version = manifest, version

    def lacks(self, manifest: Manifest) -> set[str]:
        """Return the names of the tensors of `manifest` that the copy does not hold, bit for bit."""
        if self.version is None or self._manifest is None or self._flat is None:
            return set(manifest.tensors)
        if self._flat.layout != layout_of(manifest.tensors):  # the file must be made anew
            return set(manifest.tensors)
        present = self._manifest.tensors
        return {name for name, info in manifest.tensors.items() if present.get(name) != info}

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors, as views of the copy, which change when the next version is received.

        Raises WeightsError if there is no version, if they do not fit `expected`, or are not finite.
        """
        if self.version is None or self._manifest is None or self._flat is None:
            raise WeightsError(f"{self.directory} holds no version")
        check_fit(self.directory, self._manifest, expected)
        check_finite(self.directory, self._flat.tensors.items())
        return dict(self._flat.tensors)

    def close(self) -> None:
        """Remove the copy."""
        if self._storage is not None:
            self._storage.close()
        self.version = self._flat = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _empty(self) -> None:
        """Remove the files, including files of an earlier process."""
        self._flat = None
        for name in (MANIFEST, WEIGHTS):
            (self.directory / name).unlink(missing_ok=True)
