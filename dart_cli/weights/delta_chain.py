"""The ways to a version: its own whole file, or an older set and the deltas from there.

Route      where to start, and what to apply
routes     the ways to a version, the cheapest first
rebuild    take one: the tensors of a version, checked, in memory or wherever they are to be
newest     the newest version in a directory that there is a way to
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bus.errors import WeightsError
from dart_cli.weights.base import Published
from dart_cli.weights.delta import Delta, apply, read
from dart_cli.weights.flat_weights import FlatSet
from dart_cli.weights.manifest import (
    WEIGHTS,
    Manifest,
    files_of,
    path_of,
    published,
    read_manifest,
    versions,
)


@dataclass(frozen=True)
class Held:
    """A version that a worker has, as it was announced."""

    policy_version: int
    digest: str


@dataclass(frozen=True)
class Route:
    """Start at the whole set `whole`, or (None) at what is held; apply `deltas` in order."""

    whole: Path | None
    deltas: tuple[tuple[Path, Delta], ...]

    def size_bytes(self, whole_bytes: int) -> int:
        """Bytes to read."""
        return (whole_bytes if self.whole else 0) + sum(each.size_bytes for _, each in self.deltas)


def routes(path: Path, manifest: Manifest, held: Held | None = None) -> list[Route]:
    """The ways to the version at `path` from `held` and from whole sets, the cheapest first.

    Deltas are followed back until they are together no smaller than the set: what publishes them sees
    to it that a whole set comes first. Empty where the chain is broken on the way to each.
    """
    found: list[Route] = []
    deltas: tuple[tuple[Path, Delta], ...] = ()
    here, version, read_bytes = path, manifest.policy_version, 0
    while read_bytes < manifest.size_bytes:
        if (here / WEIGHTS).is_file():  # not so for a link to memory that has gone
            found.append(Route(here, deltas))
        try:
            delta = read(here)
        except WeightsError:
            break
        if delta.policy_version != version or not 0 <= delta.base_version < version:
            break
        read_bytes += delta.size_bytes
        deltas = ((here, delta), *deltas)
        if held == Held(delta.base_version, delta.base_digest):
            found.append(Route(None, deltas))
            break
        version = delta.base_version
        here = path_of(path.parent, version)
    return sorted(found, key=lambda route: route.size_bytes(manifest.size_bytes))


def rebuild(route: Route, manifest: Manifest, target: FlatSet) -> None:
    """Make `target` what `manifest` says; where the route starts at what is held, it holds that.

    Raises WeightsError, naming the tensor, if a set or a delta on the way is not what it says;
    `target` then holds no version.
    """
    if route.whole is not None:
        base = read_manifest(route.whole)
        for file in files_of(route.whole, base):
            part = FlatSet.of_file(file)
            if part.tensors.keys() - target.tensors.keys():
                raise WeightsError(f"{file} holds other tensors than its manifest lists")
            for name, tensor in part.tensors.items():
                if tensor.shape != target.tensors[name].shape:
                    raise WeightsError(f"{file} holds other tensors than its manifest lists")
                target.tensors[name].copy_(tensor)
    for path, delta in route.deltas:
        apply(path, delta, target)
    last = route.deltas[-1][0] if route.deltas else route.whole
    target.check(manifest, manifest.tensors.keys(), str(last))


def newest(directory: Path) -> Published | None:
    """The newest version in `directory` that is whole, or that deltas lead to; None if there is none."""
    for version in reversed(versions(directory)):
        path = path_of(directory, version)
        try:
            manifest = read_manifest(path)
        except WeightsError:  # removed between listing and reading, or no set
            continue
        if routes(path, manifest):
            return published(path, manifest)
    return None


def along(ways: list[Route], take: Callable[[Route], None], absent: str) -> list[WeightsError]:
    """Take the first of `ways` that leads there; the errors of those that did not.

    What is held is lost with the first that did not, so only whole sets are tried then. Raises the
    last error if none does, or WeightsError(`absent`) where there is none.
    """
    failed: list[WeightsError] = []
    for way in ways:
        if failed and way.whole is None:
            continue
        try:
            take(way)
        except WeightsError as error:
            failed.append(error)
        else:
            return failed
    raise failed[-1] if failed else WeightsError(absent)
