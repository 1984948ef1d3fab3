"""The trainer's end of the channels `gloo` and `nccl`.

    BroadcastChannel   publishes, and answers the workers' requests

A version is published like one of the channel `file`, with a manifest on disk, but its tensors stay in the
trainer's memory. Each `WHOLE_EVERY`th version is written to disk too: for resumption, for `dart eval`, and
for times without a trainer. A version is also written if broadcasts fail to bring it to a worker. Training
continues during a broadcast, which sends an immutable copy in host memory. The next version uses the memory
of the version before the last, since allocating takes longer than copying.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

from bus.errors import ProtocolError, RefusedError, WeightsError
from bus.messages import Reply, Request
from bus.weights import (
    ManifestReply,
    ManifestRequest,
    RendezvousRequest,
    TransferReply,
    TransferRequest,
)
from dart_cli.config.schema import LoraConfig
from dart_cli.config.schema.weights import WHOLE_EVERY
from dart_cli.hardware import accelerator
from dart_cli.weights.broadcast.broadcaster import RoundsThread, Version, refer_to
from dart_cli.weights.broadcast.rendezvous import Rendezvous
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import FileChannel
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.manifest import (
    WEIGHTS,
    Published,
    TensorSpec,
    layout_of,
    read_manifest,
)
from dart_cli.weights.storage import Storage

HOLD_S = 3.0
"""Seconds for which a request is held; then its worker is told to ask again."""


class BroadcastChannel(FileChannel):
    """A FileChannel whose newest version stays in memory and is sent to the workers that ask."""

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        keep: int = 3,
        *,
        shared: bool = False,
        lora: LoraConfig | None = None,
        whole_every: int = WHOLE_EVERY,
    ) -> None:
        """Write one version in `whole_every` to disk whole; the other arguments are as in FileChannel."""
        super().__init__(directory, keep, shared=shared, lora=lora)
        self.last: Version | None = None
        self._replaced: Version | None = None  # by `last`
        self._whole_every = whole_every
        self._since_whole = 0  # number of versions since the last whole one
        self._rendezvous = Rendezvous()
        self._writing = threading.Lock()  # held while the tensors of a version are written later
        self._rounds = RoundsThread(
            lambda: self.last, transport, self._rendezvous, self._write_whole
        )

    async def answer(self, _client: str, request: Request) -> Reply:
        """Return the answer to a worker's request.

        Raises ProtocolError for a request that no worker sends, RefusedError if the trainer has no such
        version.
        """
        if isinstance(request, RendezvousRequest):
            return self._rendezvous.answer(request)
        version = self.last
        if version is None:
            raise RefusedError("the trainer has published nothing yet")
        if isinstance(request, ManifestRequest):
            return await _manifest(request, version)
        if isinstance(request, TransferRequest):
            return await self._take_part(request, version)
        raise ProtocolError(f"the trainer answers no {type(request).__name__}")

    async def _take_part(self, request: TransferRequest, version: Version) -> TransferReply:
        """Hold the request until its round begins, for at most HOLD_S. Raises ProtocolError."""
        newest = version.published
        if (request.policy_version, request.digest) != (newest.policy_version, newest.digest):
            return refer_to(newest)
        unknown = set(request.tensors) - version.tensors.tensors.keys()
        if unknown:
            raise ProtocolError(f"TransferRequest.tensors: {min(unknown)} does not exist")
        pending = self._rounds.ask(request)
        answer = asyncio.wrap_future(pending)
        try:
            await asyncio.wait([answer], timeout=HOLD_S)
        finally:
            has_left = pending.cancel()  # False if its round has begun
        return refer_to(newest) if has_left else await answer

    def close(self) -> None:
        """Stop sending, and leave the newest version whole on disk."""
        self._rounds.close()
        super().close()
        self.last = self._replaced = None

    def _to_disk(self, storage: Storage) -> None:
        if self.last is not None:
            self._write_whole(self.last.published, self.last.tensors)
        super()._to_disk(storage)

    def _write_whole(self, published: Published, tensors: FlatWeights) -> bool:
        """Write the tensors of a version beside its manifest; return False if they exist. Raises OSError."""
        with self._writing:  # may last as long as the disk takes
            if (published.path / WEIGHTS).exists():
                return False
            draft = published.path / f".{WEIGHTS}.draft"
            try:
                tensors.write(draft)
                draft.replace(published.path / WEIGHTS)
            finally:
                draft.unlink(missing_ok=True)  # a partial file would keep a full disk full
            return True

    # --- in the publication's thread ----------------------------------------------------------

    def _memory(self, specs: Mapping[str, TensorSpec]) -> FlatWeights:
        """Return the memory of the version before the last, or new memory if that cannot be used."""
        replaced, self._replaced = self._replaced, None
        reused = None if replaced is None else replaced.take(layout_of(specs))
        return reused or FlatWeights.in_memory(specs, pinned=accelerator.is_in_use())

    def _complete(self, target: Path, policy_version: int, copied: FlatWeights) -> Published:
        """Complete a publication; the version becomes the newest, which is kept in memory."""
        if target.exists():
            # It is not known which version was the last whole one, so the next one is written whole.
            self._since_whole = self._whole_every
        complete = super()._complete(target, policy_version, copied)
        if self.last is None or self.last.published != complete:
            self._replaced, self.last = self.last, Version(complete, copied)
        return complete

    def _is_due(self, copied: FlatWeights) -> bool:
        """Return True if this version is to be written whole, and count the versions since the last one."""
        before = self.last
        is_whole = (
            before is None
            or before.tensors.layout != copied.layout
            or self._since_whole + 1 >= self._whole_every
        )
        self._since_whole = 0 if is_whole else self._since_whole + 1
        return is_whole


async def _manifest(request: ManifestRequest, version: Version) -> ManifestReply:
    """Return the manifest of the newest version. Raises RefusedError if another one is requested."""
    newest = version.published
    if (request.policy_version, request.digest) != (newest.policy_version, newest.digest):
        raise RefusedError(f"the trainer is at v{newest.policy_version} now")
    try:
        manifest = await asyncio.to_thread(read_manifest, newest.path)
    except WeightsError as error:  # removed since
        raise RefusedError(str(error)) from None
    return ManifestReply(text=manifest.text().encode())
