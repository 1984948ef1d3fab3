"""How a version can be rebuilt: from its own whole file, or from an older set and a chain of deltas.

HeldVersion         a version that a worker has
Route               where to start, and which deltas to apply
routes              the routes to a version, the cheapest first
rebuild             follow one: the tensors of a version, checked, in memory or in a file
take_first_working  follow the first route that succeeds
newest_version      the newest version in a directory that can be rebuilt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bus.errors import WeightsError
from dart_cli.weights.base import Published
from dart_cli.weights.delta import Delta, apply, read
from dart_cli.weights.flat_weights import FlatWeights, read_whole
from dart_cli.weights.manifest import (
    WEIGHTS,
    Manifest,
    path_of,
    published,
    read_manifest,
    versions,
)


@dataclass(frozen=True)
class HeldVersion:
    """A version that a worker has, as it was announced."""

    policy_version: int
    digest: str


@dataclass(frozen=True)
class Route:
    """Start at the whole set `whole`, or (None) at the version held; apply `deltas` in order."""

    whole: Path | None
    deltas: tuple[tuple[Path, Delta], ...]

    def size_bytes(self, whole_bytes: int) -> int:
        """Bytes to read, where a whole set has `whole_bytes`."""
        return (whole_bytes if self.whole else 0) + sum(each.size_bytes for _, each in self.deltas)


def routes(path: Path, manifest: Manifest, held: HeldVersion | None = None) -> list[Route]:
    """The routes to the version at `path` from `held` and from whole sets, the cheapest first.

    Deltas are followed back until together they are no smaller than the set: the publisher writes a
    whole set before that. Empty where the chain to each start is broken.
    """
    found: list[Route] = []
    deltas: tuple[tuple[Path, Delta], ...] = ()
    here, version, read_bytes = path, manifest.policy_version, 0
    while read_bytes < manifest.size_bytes:
        if (here / WEIGHTS).is_file():  # false for a link into shared memory that was freed
            found.append(Route(here, deltas))
        try:
            delta = read(here)
        except WeightsError:
            break
        if delta.policy_version != version or not 0 <= delta.base_version < version:
            break
        read_bytes += delta.size_bytes
        deltas = ((here, delta), *deltas)
        if held == HeldVersion(delta.base_version, delta.base_digest):
            found.append(Route(None, deltas))
            break
        version = delta.base_version
        here = path_of(path.parent, version)
    return sorted(found, key=lambda route: route.size_bytes(manifest.size_bytes))


def rebuild(route: Route, manifest: Manifest, target: FlatWeights) -> None:
    """Make `target` the version of `manifest`; for a route without `whole`, it holds the version held.

    Raises WeightsError, naming the tensor, if a set or a delta of the route is damaged; `target`
    then holds no version.
    """
    if route.whole is not None:
        tensors = read_whole(route.whole, read_manifest(route.whole))
        if _shapes(tensors) != _shapes(target.tensors):
            raise WeightsError(
                f"{route.whole} has other tensors than v{manifest.policy_version}, which its deltas "
                "lead to"
            )
        target.fill(tensors)
    for path, delta in route.deltas:
        apply(path, delta, target)
    last = route.deltas[-1][0] if route.deltas else route.whole
    target.check(manifest, manifest.tensors.keys(), str(last))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def newest_version(directory: Path) -> Published | None:
    """The newest version in `directory` that can be rebuilt; None if there is none."""
    for version in reversed(versions(directory)):
        path = path_of(directory, version)
        try:
            manifest = read_manifest(path)
        except WeightsError:  # removed after it was listed, or no weight set
            continue
        if routes(path, manifest):
            return published(path, manifest)
    return None


def take_first_working(
    candidates: list[Route], take: Callable[[Route], None], absent: str
) -> list[WeightsError]:
    """Take the first of `candidates` that succeeds; returns the errors of those that failed.

    The first failure destroys the version held, so only routes from whole sets are tried after it.
    Raises the last error if all fail, or WeightsError(`absent`) where there are no candidates.
    """
    failed: list[WeightsError] = []
    for route in candidates:
        if failed and route.whole is None:
            continue
        try:
            take(route)
        except WeightsError as error:
            failed.append(error)
        else:
            return failed
    raise failed[-1] if failed else WeightsError(absent)
