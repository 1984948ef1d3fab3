"""Weights as files: one directory per version, complete or absent, never changed.

    FileChannel    publishes versions and removes old ones (the trainer's end)
    publish        tensors -> DIRECTORY/v000012/{model.safetensors, manifest.json}, atomically
    holds          whether a version is exactly these weights
    load           the tensors of a version, checked against its manifest and the model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; its manifest describes it (manifest.py). Old versions are removed: a reader that has the
files open keeps them (POSIX); a later reader gets a WeightsError and requests the newest instead
(dart_cli/rollout/sync.py).

The directory of a version that is not whole holds the manifest and, with `delta`, the changes since
the version before (delta.py). Every `whole_every`th is whole, and the last one when the trainer exits.
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

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig
from dart_cli.weights import delta
from dart_cli.weights.atomic_directory import atomic_directory
from dart_cli.weights.base import KnownVersion, Published
from dart_cli.weights.delta_chain import newest_version, rebuild, routes, take_first_working
from dart_cli.weights.flat_weights import FlatWeights, check_finite, check_fit, read_whole, specs_of
from dart_cli.weights.manifest import (
    FROZEN,
    MANIFEST,
    WEIGHTS,
    Manifest,
    check_files,
    path_of,
    published,
    read_manifest,
    versions,
)
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """A published version and the trainer's own copy of it."""

    published: Published
    tensors: FlatWeights


@dataclass
class FileChannel:
    """Weight sets in `directory`, of which the newest `keep` are kept. See WeightChannel.

    `lora` has the settings of the adapters that are published, and is stored with each version.
    `shared` puts the tensors into shared memory if they fit. With `delta` or `copies` the newest
    version is kept in memory as `last`, and only each `whole_every`th is written whole, and also a
    version whose chain of deltas would be no smaller than a whole set.
    """

    directory: Path
    keep: int = 3
    shared: bool = False
    delta: bool = False
    copies: bool = False
    whole_every: int = 1
    lora: LoraConfig | None = None
    last: Version | None = field(default=None, init=False)
    _frozen: frozenset[str] = field(default=frozenset(), init=False)
    _since_whole: int = field(default=0, init=False)  # versions
    _chain_bytes: int = field(default=0, init=False)  # of deltas since then
    _before: Path | None = field(default=None, init=False)  # the last version of this process
    _opened: Storage | None = field(default=None, init=False)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Write a version and remove old ones."""
        target = path_of(self.directory, policy_version)
        if target.exists():
            complete = self._republish(target, tensors)
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
                lora=self.lora,
            )
        self._before = complete.path
        self._remove_old()
        return complete

    def newest(self) -> Published | None:
        """The newest version that can be rebuilt, None before the first."""
        return newest_version(self.directory)

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
        known: KnownVersion | None = None,
    ) -> Published:
        """Publish the weights of a trainer that starts or restarts, at `policy_version` or later.

        A trainer that resumed from its checkpoint has other weights than the versions published after
        that checkpoint. Those numbers are taken, and so is every number up to that of `known`: its
        weights become the next version, so that for the workers versions only rise and each number
        means one set of weights.
        """
        self._frozen = frozenset(frozen) if not self._copies else frozenset()
        taken = max([-1 if known is None else known.policy_version, *versions(self.directory)])
        if policy_version <= taken and not self._is_the_same(taken, tensors, known):
            return self.publish(tensors, taken + 1)
        return self.publish(tensors, max(policy_version, taken))

    def _is_the_same(
        self, version: int, tensors: Mapping[str, torch.Tensor], known: KnownVersion | None
    ) -> bool:
        """Whether `version` is here with these weights, and means no others to the run's ledger."""
        path = path_of(self.directory, version)
        if not path.exists() or not holds(path, tensors, self.lora):
            return False
        if known is None or known.policy_version != version:
            return True
        return published(path, read_manifest(path)).digest == known.digest

    def close(self) -> None:
        """Move the kept versions to disk, the newest whole. Raises WeightsError."""
        if self._opened is None:
            return
        try:
            if self.last is not None and not (self.last.published.path / WEIGHTS).exists():
                draft = self.last.published.path / f".{WEIGHTS}.draft"
                self.last.tensors.write(draft)
                draft.replace(self.last.published.path / WEIGHTS)
            for version in reversed(versions(self.directory)):
                for file in (WEIGHTS, FROZEN):
                    self._opened.keep(path_of(self.directory, version) / file)
        except OSError as error:
            raise WeightsError(
                f"{self.directory}: its weights cannot be written to disk: {error}; is it full?"
            ) from None
        self._opened.close()
        self._opened = self.last = None

    @property
    def _copies(self) -> bool:
        return self.delta or self.copies

    @property
    def _storage(self) -> Storage:
        if self._opened is None:
            try:
                self._opened = Storage(self.directory, shared=self.shared)
            except OSError as error:
                raise WeightsError(f"{self.directory} cannot be written: {error}") from None
        return self._opened

    def _republish(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> Published:
        """Return the existing version if it holds these weights; else raise WeightsError."""
        if not holds(target, tensors, self.lora):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        complete = published(target, read_manifest(target))
        if self._copies and (self.last is None or self.last.published != complete):
            self.last = Version(complete, FlatWeights.in_memory(specs_of(tensors)).fill(tensors))
            self._since_whole = (
                self.whole_every
            )  # the last whole version is unknown: the next is whole
        return complete

    def _publish_copy(
        self, tensors: Mapping[str, torch.Tensor], target: Path, policy_version: int
    ) -> Published:
        """Write the changes, or the whole set where it is due or no larger."""
        copy = FlatWeights.in_memory(specs_of(tensors)).fill(tensors)
        manifest = copy.manifest(policy_version).model_copy(update={"lora": self.lora})
        before = self.last
        fits = before is not None and before.tensors.layout == copy.layout
        is_whole = not fits or self._since_whole + 1 >= self.whole_every
        storage = self._storage  # makes the directory
        try:
            with atomic_directory(target) as draft:
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
                    copy.write(storage.make(draft / WEIGHTS, manifest.size_bytes))
                _write_manifest(draft, manifest)
        except OSError as error:
            raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
        self._since_whole = 0 if is_whole else self._since_whole + 1
        self._chain_bytes = 0 if is_whole else self._chain_bytes
        self.last = Version(published(target, manifest), copy)
        return self.last.published

    def _remove_old(self) -> None:
        """Remove all but the newest `keep` and the versions from which these can be rebuilt."""
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
    lora: LoraConfig | None = None,
) -> Published:
    """Write `tensors` as `directory`/v<version>, complete at once.

    Publishing the same weights as the same version again changes nothing. Tensors named by `frozen`
    have a file of their own, which is linked from the version at `before` if that has it. `lora` has
    the settings of adapters. Raises WeightsError if the version exists with other weights, or cannot be written.
    """
    target = path_of(directory, policy_version)
    if target.exists():
        if not holds(target, tensors, lora):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        return published(target, read_manifest(target))
    try:
        storage = storage or Storage(directory, shared=False)
        with atomic_directory(target) as draft:
            trained = {name: each for name, each in tensors.items() if name not in frozen}
            manifest = _write_set(trained, draft / WEIGHTS, policy_version, storage)
            if frozen:
                unchanged = {name: each for name, each in tensors.items() if name in frozen}
                manifest = _joined(manifest, _write_frozen(unchanged, draft, before, storage))
            manifest = manifest.model_copy(update={"lora": lora})
            _write_manifest(draft, manifest)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
    return published(target, manifest)


def holds(path: Path, tensors: Mapping[str, torch.Tensor], lora: LoraConfig | None = None) -> bool:
    """Whether the version at `path` is complete and holds exactly `tensors`, adapters of `lora`."""
    try:
        held = load(path, tensors)
        settings = read_manifest(path).lora
    except WeightsError:
        return False
    return settings == lora and all(
        torch.equal(held[name], tensor.cpu()) for name, tensor in tensors.items()
    )


def load(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a version, all checked against the model's tensors `expected`, by name.

    Raises WeightsError for a truncated or altered file, for names, shapes or dtypes that are not
    the model's, and for values that are not finite. Does not change `expected`.
    """
    manifest = read_manifest(path)
    check_fit(path, manifest, expected)
    tensors = _read(path, manifest)
    check_finite(path, tensors.items())
    return tensors


def _read(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a version, from its own files or by deltas. Raises WeightsError."""
    candidates = routes(path, manifest)
    if not candidates or (path / WEIGHTS).exists():
        check_files(path, manifest)
        return read_whole(path, manifest)
    target = FlatWeights.in_memory(manifest.tensors)
    take_first_working(candidates, lambda route: rebuild(route, manifest, target), "")
    return target.tensors


def _write_set(
    tensors: Mapping[str, torch.Tensor], file: Path, policy_version: int, storage: Storage
) -> Manifest:
    """Write a safetensors file; returns its manifest."""
    infos = specs_of(tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return (
        FlatWeights.in_file(infos, storage.make(file, size)).fill(tensors).manifest(policy_version)
    )


def _write_frozen(
    tensors: Mapping[str, torch.Tensor], draft: Path, before: Path | None, storage: Storage
) -> Manifest:
    """The manifest of the frozen tensors' file, linked from `before` if that holds the same tensors."""
    known = read_manifest(before) if before is not None else None
    if before is None or known is None or set(known.frozen) != tensors.keys():
        return _write_set(tensors, draft / FROZEN, 0, storage)
    os.link(before / FROZEN, draft / FROZEN, follow_symlinks=False)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    kept = {name: known.tensors[name] for name in known.frozen}
    return Manifest(policy_version=known.policy_version, size_bytes=size, tensors=kept)


def _joined(trained: Manifest, frozen: Manifest) -> Manifest:
    return trained.model_copy(
        update={
            "size_bytes": trained.size_bytes + frozen.size_bytes,
            "tensors": trained.tensors | frozen.tensors,
            "frozen": sorted(frozen.tensors),
        }
    )


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / MANIFEST).write_text(manifest.text(), encoding="utf-8")
