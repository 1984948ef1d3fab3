"""A worker's end of the channels `gloo` and `nccl`.

    BroadcastReceiver   takes part in the trainer's broadcasts
    Mirror              the worker's own copy, into which they are received

The worker asks the trainer as soon as it hears of a new version, so that all workers receive in one
broadcast, into copies of their own, while their engines serve; each swap then waits for its permit and
reads that copy. What came is checked against the manifest's digests before the engine is touched.
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
from dart_cli.weights.receiver import Received
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds that the trainer may take to answer; it answers beside its training, and holds a request for less."""
ASK_AGAIN_S = 0.1
"""Shortest time between two requests for one version, where the trainer does not hold them: two workers of one
name take each other's place."""
MOST_REFUSED = 3
"""Versions that may fail to come in a row before the error names another channel."""


class BroadcastReceiver:
    """See dart_cli.weights.receiver.Receiver."""

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
        self.mirror = Mirror(directory)  # the copy, into which broadcasts are received
        self._transport = transport
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._joined: ByteGroup | None = None
        self._broken = 0  # broadcasts in a row that broke off
        self._refused = 0  # versions in a row that did not come
        self._is_closed = False
        self.read_bytes = 0

    @property
    def group(self) -> str:
        """The name of the group that it is in; empty for none."""
        return "" if self._joined is None else self._joined.name

    async def prepare(self, policy_version: int) -> None:
        """Receive the trainer's newest version, if that is `policy_version` or later."""
        try:
            await self._receive(policy_version)
        except (WeightsError, BusError) as error:
            log.info("v%d did not come from the trainer yet: %s", policy_version, error)

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """Return the announced version or a later one; or the announced one from disk if the trainer sends none.

        Where broadcasts have broken off `MOST_BROKEN` times in a row, files come first, and `prepare` alone tries
        whether a broadcast arrives again. Raises WeightsError.
        """
        is_on_disk = partial(_is_whole, path, policy_version, digest)
        if self._broken >= MOST_BROKEN and await asyncio.to_thread(is_on_disk):
            log.info("no broadcast arrives; loading %s from disk", path)
            self._refused = 0
            return Received(path, policy_version)
        try:
            await self._receive(policy_version, KnownVersion(policy_version, digest))
        except (WeightsError, BusError) as error:
            if await asyncio.to_thread(is_on_disk):
                log.warning("%s; loading %s from disk", error, path)
                self._refused = 0
                return Received(path, policy_version)
            self._refused += 1
            cure = f"; {self._transport.cure()}" if self._refused >= MOST_REFUSED else ""
            raise WeightsError(
                f"v{policy_version} did not come from the trainer: {error}{cure}"
            ) from None
        self._refused = 0
        held = self.mirror.held
        assert held is not None
        return Received(self.mirror, held.policy_version)

    def close(self) -> None:
        """Leave the group and remove the copy."""
        self._is_closed = True
        self._leave()
        self.mirror.close()

    async def _receive(self, policy_version: int, announced: KnownVersion | None = None) -> None:
        """Hold `policy_version`, which is `announced` if that is known, or a later one. Raises WeightsError, BusError."""
        held = self.mirror.held
        if held is not None and (
            held == announced
            or held.policy_version > policy_version
            or (announced is None and held.policy_version == policy_version)
        ):
            return
        wanted, manifest = KnownVersion(-1, ""), None
        give_up = time.monotonic() + self._deadline_s
        while True:
            asked = time.monotonic()
            reply = await self._ask(wanted, manifest)
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
            if self.mirror.held == newest:
                return
            if time.monotonic() > give_up:
                raise WeightsError(f"the trainer began no broadcast in {self._deadline_s:g} s")
            if newest != wanted:
                wanted, manifest = newest, await self._manifest(reply)
                await asyncio.to_thread(self.mirror.reserve, manifest)
            else:
                await asyncio.sleep(max(0.0, asked + ASK_AGAIN_S - time.monotonic()))

    async def _ask(self, wanted: KnownVersion, manifest: Manifest | None) -> TransferReply:
        """Ask to take part in the broadcast of `wanted`; without a manifest, which version is the newest."""
        request = TransferRequest(
            worker=self._worker,
            policy_version=wanted.policy_version,
            digest=wanted.digest,
            group=self.group,
            tensors=[] if manifest is None else sorted(self.mirror.lacks(manifest)),
        )
        reply = await self._train.request(request, ASK_S)
        assert isinstance(reply, TransferReply)
        return reply

    async def _manifest(self, newest: TransferReply) -> Manifest:
        """Of the trainer's newest version: from its folder, or from the trainer where that is another host's."""
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
        if self._joined is None or self.group != reply.group:
            self._leave()
            member = Member(reply.group, reply.rank, reply.size)
            deadline = join_deadline()
            keys = over_bus(self._train, self._loop, reply.group, deadline)
            store = GroupStore(keys, deadline)
            self._joined = join(self._transport, member, store)
            if self._is_closed:
                raise WeightsError("this worker is closing")
        flat = self.mirror.change(manifest)
        names = set(reply.tensors)
        self.read_bytes += self._joined.broadcast(flat, names, lambda: self._is_closed)

    def _check(self, reply: TransferReply, manifest: Manifest) -> None:
        """Compare what came with its digests, and hold it. Raises WeightsError."""
        flat = self.mirror.change(manifest)
        try:
            flat.check(manifest, set(reply.tensors), "what the trainer has sent")
        except WeightsError:
            self._leave()
            raise
        self.mirror.hold(manifest, KnownVersion(reply.policy_version, reply.digest))

    def _leave(self) -> None:
        group, self._joined = self._joined, None
        if group is not None:
            group.close()


def _is_whole(path: Path, policy_version: int, digest: str) -> bool:
    """Whether the announced version's files are on this host."""
    try:
        check_announced(path, policy_version, digest)
    except WeightsError:  # not on this host, or removed
        return False
    return (path / WEIGHTS).is_file()


class Mirror:
    """A worker's own copy of the newest version that it received; a CheckedSet. One owner, one thread at a time.

    manifest.json beside model.safetensors, the latter in shared memory if it fits, changed in place: broadcasts
    are received into it, and engines load it as they load a published directory. Its tensors are checked
    against the manifest before it reports the version as held; while it changes it holds no version.
    """

    def __init__(self, directory: Path) -> None:
        """Start empty: files left in `directory` are removed. Raises RunDirectoryError."""
        self.directory = make_private_dir(directory)
        self.held: KnownVersion | None = None
        self._manifest: Manifest | None = None
        self._flat: FlatWeights | None = None
        self._storage: Storage | None = None
        self._empty()

    def reserve(self, manifest: Manifest) -> None:
        """Allocate its files, where those held do not fit `manifest`. Raises WeightsError."""
        if self._flat is None or self._flat.layout != layout_of(manifest.tensors):
            self.change(manifest)

    def change(self, manifest: Manifest) -> FlatWeights:
        """Start a change to `manifest`; the caller fills the tensors and calls `hold`. Raises WeightsError."""
        self.held = None
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
            raise self._no_room(error) from None
        return self._flat

    def _no_room(self, error: OSError) -> WeightsError:
        return WeightsError(f"{self.directory} has no room for weights: {error}")

    def hold(self, manifest: Manifest, held: KnownVersion) -> None:
        """End a change: the tensors were checked and are those of `manifest`. Raises WeightsError."""
        try:
            file = self.directory / MANIFEST
            file.write_text(manifest.text(), encoding="utf-8")
        except OSError as error:
            raise self._no_room(error) from None
        self._manifest, self.held = manifest, held

    def lacks(self, manifest: Manifest) -> set[str]:
        """Return the tensors of `manifest` that it does not hold, bit for bit."""
        if self.held is None or self._manifest is None or self._flat is None:
            return set(manifest.tensors)
        if self._flat.layout != layout_of(manifest.tensors):  # its files must be created again
            return set(manifest.tensors)
        held = self._manifest.tensors
        return {name for name, info in manifest.tensors.items() if held.get(name) != info}

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors; they change with the next version. Raises WeightsError."""
        if self.held is None or self._manifest is None or self._flat is None:
            raise WeightsError(f"{self.directory} holds no version")
        check_fit(self.directory, self._manifest, expected)
        check_finite(self.directory, self._flat.tensors.items())
        return dict(self._flat.tensors)

    def close(self) -> None:
        """Remove the copy."""
        if self._storage is not None:
            self._storage.close()
        self.held = self._flat = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _empty(self) -> None:
        """Remove the files, also those of an earlier process."""
        self._flat = None
        for name in (MANIFEST, WEIGHTS):
            (self.directory / name).unlink(missing_ok=True)
