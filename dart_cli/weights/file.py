"""Weights as files: one directory a version, complete or absent, never changed.

    FileChannel    publishes versions and removes old ones (the trainer's end)
    publish        tensors -> DIRECTORY/v000012/{model.safetensors, manifest.json}, atomically
    holds          is it exactly these weights?
    load           the tensors of a version, if it holds what it says and fits this model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; what it says of itself is its manifest (manifest.py). Old versions are removed: a reader
that has its files open keeps them (POSIX), one that comes too late gets a WeightsError and asks for
the newest instead (dart_cli/rollout/sync.py).

Of a version that is not whole the directory holds the manifest, and with `delta` what changed since
the one before (delta.py). Every `whole_every`th is whole, and the last when the trainer ends.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bus.errors import WeightsError
from dart_cli.weights import delta
from dart_cli.weights.atomic_directory import whole_directory
from dart_cli.weights.base import Published
from dart_cli.weights.delta_chain import along, newest, rebuild, routes
from dart_cli.weights.flat_weights import FlatSet, check_finite, check_fit, infos_of
from dart_cli.weights.manifest import (
    FROZEN,
    MANIFEST,
    WEIGHTS,
    Manifest,
    check_files,
    digest_of,
    files_of,
    path_of,
    published,
    read_manifest,
    versions,
)
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)

__all__ = [
    "FROZEN",
    "MANIFEST",
    "WEIGHTS",
    "FileChannel",
    "digest_of",
    "holds",
    "load",
    "newest",
    "publish",
    "read_manifest",
]


@dataclass(frozen=True)
class Version:
    """A published version and the trainer's own copy of it."""

    published: Published
    tensors: FlatSet


@dataclass
class FileChannel:
    """Weight sets in `directory`, of which the newest `keep` stay. See WeightChannel.

    `shared` puts the tensors into shared memory where it has room. With `delta`, or `copies`, the
    newest version is kept in memory as `last`, and only each `whole_every`th is written whole; one
    to which deltas would lead that are together no smaller than a set, too.
    """

    directory: Path
    keep: int = 3
    shared: bool = False
    delta: bool = False
    copies: bool = False
    whole_every: int = 1
    last: Version | None = field(default=None, init=False)
    _frozen: frozenset[str] = field(default=frozenset(), init=False)
    _since_whole: int = field(default=0, init=False)  # versions
    _chain_bytes: int = field(default=0, init=False)  # of deltas since then
    _before: Path | None = field(default=None, init=False)  # the last of this process
    _made: Storage | None = field(default=None, init=False)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Write a version and remove those that are too old."""
        target = path_of(self.directory, policy_version)
        if target.exists():
            complete = self._again(target, tensors)
        elif self._copies:
            complete = self._publish_copy(tensors, target, policy_version)
        else:
            complete = publish(
                tensors,
                self.directory,
                policy_version,
                self._storage,
                frozen=self._frozen,
                before=self._before,
            )
        self._before = complete.path
        self._remove_old()
        return complete

    def newest(self) -> Published | None:
        """The newest version that can be had, None before the first."""
        return newest(self.directory)

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
    ) -> Published:
        """Publish the weights of a trainer that starts or starts again, at `policy_version` or later.

        A trainer that fell back to its checkpoint holds other weights than the versions it had
        published after it. These numbers are taken: its weights become the next one, so that to
        the workers versions only ever rise and each number means one set of weights.
        """
        self._frozen = frozenset(frozen) if not self._copies else frozenset()
        last = max([policy_version, *versions(self.directory)])
        taken = path_of(self.directory, last).exists()
        if taken and not holds(path_of(self.directory, last), tensors):
            last += 1
        return self.publish(tensors, last)

    def close(self) -> None:
        """Bring what is kept to disk, the newest whole. Raises WeightsError."""
        if self._made is None:
            return
        try:
            if self.last is not None and not (self.last.published.path / WEIGHTS).exists():
                draft = self.last.published.path / f".{WEIGHTS}.draft"
                self.last.tensors.write(draft)
                draft.replace(self.last.published.path / WEIGHTS)
            for version in reversed(versions(self.directory)):
                for file in (WEIGHTS, FROZEN):
                    self._made.keep(path_of(self.directory, version) / file)
        except OSError as error:
            raise WeightsError(
                f"{self.directory}: its weights cannot be brought to disk: {error}; is it full?"
            ) from None
        self._made.close()
        self._made = self.last = None

    @property
    def _copies(self) -> bool:
        return self.delta or self.copies

    @property
    def _storage(self) -> Storage:
        if self._made is None:
            try:
                self._made = Storage(self.directory, shared=self.shared)
            except OSError as error:
                raise WeightsError(f"{self.directory} cannot be written: {error}") from None
        return self._made

    def _again(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> Published:
        """A version that is there: kept if it is these weights."""
        if not holds(target, tensors):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        complete = published(target, read_manifest(target))
        if self._copies and (self.last is None or self.last.published != complete):
            self.last = Version(complete, FlatSet.in_memory(infos_of(tensors)).fill(tensors))
            self._since_whole = self.whole_every  # how long ago is not known: the next is whole
        return complete

    def _publish_copy(
        self, tensors: Mapping[str, torch.Tensor], target: Path, policy_version: int
    ) -> Published:
        """Write what changed, or all of it where that is due or not more."""
        copy = FlatSet.in_memory(infos_of(tensors)).fill(tensors)
        manifest = copy.manifest(policy_version)
        before = self.last
        fits = before is not None and before.tensors.layout == copy.layout
        is_whole = not fits or self._since_whole + 1 >= self.whole_every
        try:
            with whole_directory(target) as draft:
                if self.delta and fits and before is not None:
                    base = before.published.policy_version, before.published.digest
                    made = delta.write(draft, base, policy_version, before.tensors, copy)
                    self._chain_bytes += made.size_bytes
                    is_whole = is_whole or self._chain_bytes >= manifest.size_bytes
                    log.info(
                        "v%d: %d of %d values changed since v%d, %.2f of %.2f MB",
                        *(policy_version, made.changed, made.values, base[0]),
                        *(made.size_bytes / 1e6, manifest.size_bytes / 1e6),
                    )
                if is_whole:
                    copy.write(self._storage.make(draft / WEIGHTS, manifest.size_bytes))
                _write_manifest(draft, manifest)
        except OSError as error:
            raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
        self._since_whole = 0 if is_whole else self._since_whole + 1
        self._chain_bytes = 0 if is_whole else self._chain_bytes
        self.last = Version(published(target, manifest), copy)
        return self.last.published

    def _remove_old(self) -> None:
        """All but the newest `keep`, and what a worker needs to come from a whole set to these."""
        present = versions(self.directory)
        oldest = present[-self.keep :][0]
        needed = max(
            (
                version
                for version in present
                if version <= oldest and (path_of(self.directory, version) / WEIGHTS).exists()
            ),
            default=oldest,
        )
        for version in present:
            if version < needed:
                # A version that cannot be removed is tried again after the next publication.
                shutil.rmtree(path_of(self.directory, version), ignore_errors=True)
        self._storage.sweep()


def publish(
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    policy_version: int,
    storage: Storage | None = None,
    *,
    frozen: Collection[str] = (),
    before: Path | None = None,
) -> Published:
    """Write `tensors` as `directory`/v<version>, complete at once.

    Publishing the same weights as the same version again changes nothing. Tensors named by `frozen`
    have a file of their own, which is not written again if the version at `before` has it. Raises
    WeightsError if the version exists with other weights, or the disk refuses.
    """
    target = path_of(directory, policy_version)
    if target.exists():
        if not holds(target, tensors):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        return published(target, read_manifest(target))
    try:
        storage = storage or Storage(directory, shared=False)
        with whole_directory(target) as draft:
            moving = {name: each for name, each in tensors.items() if name not in frozen}
            manifest = _write_set(moving, draft / WEIGHTS, policy_version, storage)
            if frozen:
                still = {name: each for name, each in tensors.items() if name in frozen}
                manifest = _joined(manifest, _frozen(still, draft, before, storage))
            _write_manifest(draft, manifest)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
    return published(target, manifest)


def holds(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the version at `path` is complete and holds exactly `tensors`."""
    try:
        held = load(path, tensors)
    except WeightsError:
        return False
    return all(torch.equal(held[name], tensor.cpu()) for name, tensor in tensors.items())


def load(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a version, checked whole against the model's tensors `expected`, by name.

    Raises WeightsError for a truncated or altered file, for names, shapes or dtypes that are not
    the model's, and for values that are not finite. Touches nothing of `expected`.
    """
    manifest = read_manifest(path)
    check_fit(path, manifest, expected)
    tensors = _read(path, manifest)
    check_finite(path, tensors.items())
    return tensors


def _read(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a version, from its own files or by deltas. Raises WeightsError."""
    ways = routes(path, manifest)
    if not ways or (path / WEIGHTS).exists():
        check_files(path, manifest)
        tensors: dict[str, torch.Tensor] = {}
        for file in files_of(path, manifest):
            try:
                tensors |= load_file(file)
            except (
                OSError,
                RuntimeError,
            ) as error:  # torch raises the latter for one that has gone
                raise WeightsError(
                    f"{file}: removed while it was read, or unreadable ({error})"
                ) from None
            except SafetensorError as error:
                raise WeightsError(f"{file} is no safetensors file: {error}") from None
        return tensors
    target = FlatSet.in_memory(manifest.tensors)
    along(ways, lambda way: rebuild(way, manifest, target), "")
    return target.tensors


def _write_set(
    tensors: Mapping[str, torch.Tensor], file: Path, policy_version: int, storage: Storage
) -> Manifest:
    """Write a safetensors file; what is in it."""
    infos = infos_of(tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return FlatSet.in_file(infos, storage.make(file, size)).fill(tensors).manifest(policy_version)


def _frozen(
    tensors: Mapping[str, torch.Tensor], draft: Path, before: Path | None, storage: Storage
) -> Manifest:
    """What is in the file of the frozen tensors, which is that of `before` if there is one."""
    known = read_manifest(before) if before is not None else None
    if before is None or known is None or set(known.frozen) != tensors.keys():
        return _write_set(tensors, draft / FROZEN, 0, storage)
    os.link(before / FROZEN, draft / FROZEN, follow_symlinks=False)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    kept = {name: known.tensors[name] for name in known.frozen}
    return Manifest(policy_version=known.policy_version, size_bytes=size, tensors=kept)


def _joined(moving: Manifest, still: Manifest) -> Manifest:
    return moving.model_copy(
        update={
            "size_bytes": moving.size_bytes + still.size_bytes,
            "tensors": moving.tensors | still.tensors,
            "frozen": sorted(still.tensors),
        }
    )


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
