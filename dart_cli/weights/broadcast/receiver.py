"""A worker's end of the channels `gloo` and `nccl`.

The worker asks the trainer as soon as it hears of a new version, so that all workers receive in one
broadcast, into copies of their own, while their engines serve; each swap then waits for its permit and
reads that copy. What came is checked against the manifest's digests before the engine is touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from bus.errors import BusError, WeightsError
from bus.requester import RequestClient
from bus.weights import ManifestReply, ManifestRequest, TransferReply, TransferRequest
from dart_cli.runtime.background import in_daemon_thread
from dart_cli.weights.base import Received
from dart_cli.weights.broadcast.group import (
    ByteGroup,
    Member,
    Transport,
    join_deadline,
)
from dart_cli.weights.broadcast.joining import join
from dart_cli.weights.broadcast.rendezvous import BusKeys, GroupStore
from dart_cli.weights.delta_chain import HeldVersion, routes
from dart_cli.weights.manifest import (
    Manifest,
    check_announced,
    check_is_announced,
    parse_manifest,
)
from dart_cli.weights.mirror import Mirror, update_mirror

log = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds that the trainer may take to answer; it answers beside its training, and holds a request for less."""
ASK_AGAIN_S = 0.1
"""Shortest time between two requests for one version, where the trainer does not hold them: two workers of one
name take each other's place."""
MOST_BROKEN = 3
"""Broadcasts that may break off in a row before the worker gives up for now."""


class BroadcastReceiver:
    """See dart_cli.weights.base.Receiver."""

    def __init__(
        self,
        worker: str,
        train: RequestClient,
        directory: Path,
        transport: Transport,
        deadline_s: float,
    ) -> None:
        """Keeps its copy in `directory`; a broadcast must begin within `deadline_s`."""
        self._worker = worker
        self._train = train
        self._mirror = Mirror(directory)
        self._transport = transport
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._group: ByteGroup | None = None
        self._is_closed = False
        self.read_bytes = 0

    async def prepare(self, policy_version: int) -> None:
        """Receive the trainer's newest version, if that is `policy_version` or later."""
        try:
            await self._receive(policy_version)
        except (WeightsError, BusError) as error:
            log.info("v%d did not come from the trainer yet: %s", policy_version, error)

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced version or a later one; or the announced one from disk if the trainer sends none.

        Raises WeightsError.
        """
        announced = HeldVersion(policy_version, digest)
        try:
            await self._receive(policy_version, announced)
        except (WeightsError, BusError) as error:
            await asyncio.to_thread(self._from_disk, path, announced, error)
        held = self._mirror.held
        assert held is not None
        return Received(self._mirror, held.policy_version)

    def close(self) -> None:
        """Leave the group and remove the copy."""
        self._is_closed = True
        self._leave()
        self._mirror.close()

    async def _receive(self, policy_version: int, announced: HeldVersion | None = None) -> None:
        """Hold `policy_version`, which is `announced` if that is known, or a later one. Raises WeightsError, BusError."""
        held = self._mirror.held
        if held is not None and (
            held == announced
            or held.policy_version > policy_version
            or (announced is None and held.policy_version == policy_version)
        ):
            return
        wanted, manifest = HeldVersion(-1, ""), None
        broken, give_up = 0, time.monotonic() + self._deadline_s
        while True:
            asked = time.monotonic()
            reply = await self._ask(wanted, manifest)
            newest = HeldVersion(reply.policy_version, reply.digest)
            if reply.accepted and manifest is not None:
                try:
                    await in_daemon_thread(partial(self._take_part, reply, manifest))
                except WeightsError as error:
                    self._leave()
                    broken += 1
                    if broken == MOST_BROKEN or self._is_closed:
                        raise
                    log.warning("%s; asks again", error)
                    continue
                await in_daemon_thread(partial(self._check, reply, manifest))
                return
            if newest.policy_version < policy_version:
                raise WeightsError(f"the trainer is at v{newest.policy_version}, which is older")
            if self._mirror.held == newest:
                return
            if time.monotonic() > give_up:
                raise WeightsError(f"the trainer began no broadcast in {self._deadline_s:g} s")
            if newest != wanted:
                wanted, manifest = newest, await self._manifest(reply)
                await asyncio.to_thread(self._mirror.reserve, manifest)
            else:
                await asyncio.sleep(max(0.0, asked + ASK_AGAIN_S - time.monotonic()))

    async def _ask(self, wanted: HeldVersion, manifest: Manifest | None) -> TransferReply:
        """Ask to take part in the broadcast of `wanted`; without a manifest, which version is the newest."""
        request = TransferRequest(
            worker=self._worker,
            policy_version=wanted.policy_version,
            digest=wanted.digest,
            group="" if self._group is None else self._group.name,
            tensors=[] if manifest is None else sorted(self._mirror.lacks(manifest)),
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
        if self._group is None or self._group.name != reply.group:
            self._leave()
            member = Member(reply.group, reply.rank, reply.size)
            deadline = join_deadline()
            keys = BusKeys(self._train, self._loop, reply.group, deadline)
            store = GroupStore(keys, deadline)
            self._group = join(self._transport, member, store)
            if self._is_closed:
                raise WeightsError("this worker is closing")
        flat = self._mirror.change(manifest)
        names = set(reply.tensors)
        self.read_bytes += self._group.broadcast(flat, names, lambda: self._is_closed)

    def _check(self, reply: TransferReply, manifest: Manifest) -> None:
        """Compare what came with its digests, and hold it. Raises WeightsError."""
        flat = self._mirror.change(manifest)
        try:
            flat.check(manifest, set(reply.tensors), "what the trainer has sent")
        except WeightsError:
            self._leave()
            raise
        self._mirror.hold(manifest, HeldVersion(reply.policy_version, reply.digest))

    def _from_disk(self, path: Path, announced: HeldVersion, error: Exception) -> None:
        """Take the announced version from its files, if they exist. Raises WeightsError."""
        version = announced.policy_version
        try:
            manifest = check_announced(path, version, announced.digest)
            is_there = bool(routes(path, manifest))
        except WeightsError:  # not on this host, or removed
            is_there = False
        if not is_there:
            raise WeightsError(f"v{version} did not come from the trainer: {error}")
        log.warning("%s; loading %s from disk", error, path)
        update_mirror(self._mirror, path, manifest, self._count)

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
