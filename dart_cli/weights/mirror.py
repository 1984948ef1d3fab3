"""A worker's own copy of the newest version that it has got: one set of files, changed in place.

    Mirror          manifest.json beside model.safetensors, the latter in shared memory where it fits
    take_files      bring it up to a published version, by deltas or from a whole set
    DeltaReceiver   a worker's end of the channel `file` with deltas

Deltas are applied to it and the collective channel receives into it; engines take it as they take a
published directory. What it holds is checked against the manifest before it says that it holds it;
while it changes it holds nothing.
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
from dart_cli.weights.delta_chain import Held, Route, along, rebuild, routes
from dart_cli.weights.flat_weights import FlatSet, check_finite, check_fit
from dart_cli.weights.layout import layout_of
from dart_cli.weights.manifest import MANIFEST, WEIGHTS, Manifest, check, published
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)


class Mirror:
    """See the module; a CheckedSet. One owner, one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Begins empty, whatever `directory` held. Raises RunDirectoryError."""
        self.directory = make_private_dir(directory)
        self.held: Held | None = None
        self._manifest: Manifest | None = None
        self._flat: FlatSet | None = None
        self._storage: Storage | None = None
        self._empty()

    def change(self, manifest: Manifest) -> FlatSet:
        """The tensors, to be made those of `manifest`; `hold` ends it. Raises WeightsError."""
        self.held = None
        layout = layout_of(manifest.tensors)
        try:
            (self.directory / MANIFEST).unlink(missing_ok=True)
            if self._flat is None or self._flat.layout != layout:
                self._empty()
                self._storage = self._storage or Storage(self.directory)
                file = self._storage.make(self.directory / WEIGHTS, layout.size_bytes)
                self._flat = FlatSet.in_file(manifest.tensors, file)
                self._storage.sweep()
        except OSError as error:
            raise self._full(error) from None
        return self._flat

    def _full(self, error: OSError) -> WeightsError:
        return WeightsError(f"{self.directory} has no room for weights: {error}")

    def hold(self, manifest: Manifest, held: Held) -> None:
        """It is now, as was checked, what `manifest` says. Raises WeightsError."""
        plain = manifest.model_copy(update={"frozen": []})  # all in one file here
        try:
            file = self.directory / MANIFEST
            file.write_text(plain.model_dump_json(indent=1), encoding="utf-8")
        except OSError as error:
            raise self._full(error) from None
        self._manifest, self.held = manifest, held

    def lacks(self, manifest: Manifest) -> set[str]:
        """The tensors of `manifest` that it does not hold yet, bit for bit."""
        if self.held is None or self._manifest is None or self._flat is None:
            return set(manifest.tensors)
        if self._flat.layout != layout_of(manifest.tensors):  # its files are to be made anew
            return set(manifest.tensors)
        mine = self._manifest.tensors
        return {name for name, info in manifest.tensors.items() if mine.get(name) != info}

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors; they change with the next version. Raises WeightsError."""
        if self.held is None or self._manifest is None or self._flat is None:
            raise WeightsError(f"{self.directory} holds no version")
        check_fit(self.directory, self._manifest, expected)
        check_finite(self.directory, self._flat.tensors.items())
        return dict(self._flat.tensors)

    def close(self) -> None:
        """Remove it."""
        if self._storage is not None:
            self._storage.close()
        self.held = self._flat = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _empty(self) -> None:
        """Remove the files, of a process before this one too."""
        self._flat = None
        for name in (MANIFEST, WEIGHTS):
            (self.directory / name).unlink(missing_ok=True)


class DeltaReceiver:
    """See dart_cli.weights.base.Receiver."""

    def __init__(self, directory: Path) -> None:
        """Keeps its copy in `directory`. Raises RunDirectoryError."""
        self._mirror = Mirror(directory)
        self.read_bytes = 0  # of whole sets and deltas

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced version. Raises WeightsError if no way leads to it."""
        await asyncio.to_thread(self._take, path, policy_version, digest)
        return Received(self._mirror, policy_version)

    def _take(self, path: Path, policy_version: int, digest: str) -> None:
        take_files(self._mirror, path, check(path, policy_version, digest), self._count)

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def close(self) -> None:
        """Remove the copy."""
        self._mirror.close()


def take_files(
    mirror: Mirror, path: Path, manifest: Manifest, count: Callable[[int], None]
) -> None:
    """Make the copy what the version at `path` is; `count` is told the bytes that each try reads.

    Raises WeightsError, the copy then empty, if no way leads there.
    """
    goal = Held(manifest.policy_version, published(path, manifest).digest)
    if mirror.held == goal:  # the engine has refused it before
        return
    ways = routes(path, manifest, mirror.held)
    target = mirror.change(manifest)

    def take(way: Route) -> None:
        count(way.size_bytes(manifest.size_bytes))
        rebuild(way, manifest, target)

    absent = f"{path} is not whole, and no deltas lead to it"
    for error in along(ways, take, absent):
        log.warning("%s; takes a whole set", error)
    mirror.hold(manifest, goal)
