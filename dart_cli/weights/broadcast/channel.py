"""The trainer's end of the channels `gloo` and `nccl`.

A version is published as with `file`, a manifest on disk, but its tensors stay in the trainer's memory
(each `whole_every`th is written to disk too: for resumption, for `dart eval`, and for times without a
trainer). Training continues while they are sent: what is sent is an immutable copy on the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import torch

from bus.errors import ProtocolError, RefusedError, WeightsError
from bus.messages import Reply, Request
from bus.weights import (
    ManifestReply,
    ManifestRequest,
    RendezvousRequest,
    TransferReply,
    TransferRequest,
)
from dart_cli.weights.base import KnownVersion, Publication, Published, TensorStream
from dart_cli.weights.broadcast.group import Transport
from dart_cli.weights.broadcast.rendezvous import Rendezvous
from dart_cli.weights.broadcast.rounds import RoundsThread, refer_to
from dart_cli.weights.file import FileChannel, Version
from dart_cli.weights.manifest import read_manifest

HOLD_S = 3.0
"""A request is held so long before its worker is told to ask again."""


class BroadcastChannel:
    """See WeightChannel, and the module."""

    def __init__(self, files: FileChannel, transport: Transport) -> None:
        """`files` keeps copies on disk, and the newest version in memory."""
        self._files = files
        self._rendezvous = Rendezvous()
        self._rounds = RoundsThread(lambda: files.last, transport, self._rendezvous)

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Copy the tensors; write the manifest beside, and the tensors too where a whole set is due."""
        return self._files.begin(tensors, policy_version)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Begin a publication and wait for its result."""
        return self._files.publish(tensors, policy_version)

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
        """What a worker asks of the trainer. Raises ProtocolError, RefusedError."""
        if isinstance(request, RendezvousRequest):
            return self._rendezvous.answer(request)
        version = self._files.last
        if version is None:
            raise RefusedError("the trainer has published nothing yet")
        if isinstance(request, ManifestRequest):
            return await _manifest(request, version)
        if isinstance(request, TransferRequest):
            return await self._take_part(request, version)
        raise ProtocolError(f"the trainer answers no {type(request).__name__}")

    async def _take_part(self, request: TransferRequest, version: Version) -> TransferReply:
        newest = version.published
        if (request.policy_version, request.digest) != (newest.policy_version, newest.digest):
            return refer_to(newest)
        unknown = set(request.tensors) - version.tensors.tensors.keys()
        if unknown:
            raise ProtocolError(f"TransferRequest.tensors: {min(unknown)} does not exist")
        asked = self._rounds.ask(request)
        answer = asyncio.wrap_future(asked)
        try:
            await asyncio.wait([answer], timeout=HOLD_S)
        finally:
            has_left = asked.cancel()  # false once its round has begun
        return refer_to(newest) if has_left else await answer

    def close(self) -> None:
        """Stop sending; leave the newest version whole on disk."""
        self._rounds.close()
        self._files.close()


async def _manifest(request: ManifestRequest, version: Version) -> ManifestReply:
    newest = version.published
    if (request.policy_version, request.digest) != (newest.policy_version, newest.digest):
        raise RefusedError(f"the trainer is at v{newest.policy_version} now")
    try:
        manifest = await asyncio.to_thread(read_manifest, newest.path)
    except WeightsError as error:  # removed since
        raise RefusedError(str(error)) from None
    return ManifestReply(text=manifest.text().encode())
