"""A worker's own copy of the newest version that it received: one set of files, changed in place.

    Mirror          manifest.json beside model.safetensors, the latter in shared memory if it fits
    update_mirror   update it to a published version, by deltas or from a whole set
    DeltaReceiver   a worker's end of the channel `file` with deltas

Deltas are applied to it and broadcasts are received into it; engines load it as they load a
published directory. Its tensors are checked against the manifest before it reports the version as
held; while it changes it holds no version.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bus.endpoints import make_private_dir
from bus.errors import WeightsError
from dart_cli.weights.base import Received
from dart_cli.weights.delta_chain import HeldVersion, Route, rebuild, routes, take_first_working
from dart_cli.weights.flat_weights import FlatWeights, check_finite, check_fit
from dart_cli.weights.layout import layout_of
from dart_cli.weights.manifest import MANIFEST, WEIGHTS, Manifest, check_announced, published
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)


class Mirror:
    """See the module; a CheckedSet. One owner, one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Starts empty: files left in `directory` are removed. Raises RunDirectoryError."""
        self.directory = make_private_dir(directory)
        self.held: HeldVersion | None = None
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

    def hold(self, manifest: Manifest, held: HeldVersion) -> None:
        """End a change: the tensors were checked and are those of `manifest`. Raises WeightsError."""
        plain = manifest.model_copy(update={"frozen": []})  # one file holds all tensors here
        try:
            file = self.directory / MANIFEST
            file.write_text(plain.text(), encoding="utf-8")
        except OSError as error:
            raise self._no_room(error) from None
        self._manifest, self.held = manifest, held

    def lacks(self, manifest: Manifest) -> set[str]:
        """The tensors of `manifest` that it does not hold, bit for bit."""
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


class DeltaReceiver:
    """See dart_cli.weights.base.Receiver."""

    def __init__(self, directory: Path) -> None:
        """Keeps its copy in `directory`. Raises RunDirectoryError."""
        self._mirror = Mirror(directory)
        self.read_bytes = 0  # of whole sets and deltas

    async def prepare(self, policy_version: int) -> None:
        """Nothing: files are read when it is this worker's turn."""

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced version. Raises WeightsError if it cannot be rebuilt."""
        await asyncio.to_thread(self._take, path, policy_version, digest)
        return Received(self._mirror, policy_version)

    def _take(self, path: Path, policy_version: int, digest: str) -> None:
        update_mirror(
            self._mirror, path, check_announced(path, policy_version, digest), self._count
        )

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def close(self) -> None:
        """Remove the copy."""
        self._mirror.close()


def update_mirror(
    mirror: Mirror, path: Path, manifest: Manifest, count: Callable[[int], None]
) -> None:
    """Update the copy to the version at `path`; `count` is called with the bytes that each try reads.

    Raises WeightsError, with the copy then empty, if the version cannot be rebuilt.
    """
    goal = HeldVersion(manifest.policy_version, published(path, manifest).digest)
    if mirror.held == goal:  # the engine refused it before
        return
    candidates = routes(path, manifest, mirror.held)
    target = mirror.change(manifest)

    def take(route: Route) -> None:
        count(route.size_bytes(manifest.size_bytes))
        rebuild(route, manifest, target)

    absent = f"{path} is not whole, and no chain of deltas leads to it"
    for error in take_first_working(candidates, take, absent):
        log.warning("%s; reading a whole set instead", error)
    mirror.hold(manifest, goal)
