"""Weights as files: one directory per version, complete or absent, never changed.

    FileChannel    publishes versions beside training and removes old ones (the trainer's end)
    publish        tensors -> DIRECTORY/v000012/{model.safetensors, manifest.json}, atomically
    holds          whether a version is exactly these weights
    load           the tensors of a version, checked against its manifest and the model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; its manifest describes it (manifest.py). Old versions are removed: a reader that has the
files open keeps them (POSIX); a later reader gets a WeightsError and requests the newest instead
(dart_cli/rollout/sync.py).

A publication copies the tensors to host memory; from there they are digested and written in a thread
(publication.py). One publication at a time: the copy is a set's size, and lasts until the next one has
its own.

The directory of a version that is not whole holds the manifest and, with `delta`, the changes since
the version before (delta.py). Every `whole_every`th is whole, and the last one when the trainer exits.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig
from dart_cli.weights import delta
from dart_cli.weights.atomic_directory import atomic_directory
from dart_cli.weights.base import KnownVersion, Publication, Published, TensorStream
from dart_cli.weights.delta_chain import newest_version, rebuild, routes, take_first_working
from dart_cli.weights.flat_weights import FlatWeights, check_finite, check_fit, read_whole, specs_of
from dart_cli.weights.layout import Layout, ShapeAndType, layout_of
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
from dart_cli.weights.publication import (
    BackgroundPublication,
    TensorCopy,
    is_on_gpu,
    stream_of,
)
from dart_cli.weights.storage import Storage

log = logging.getLogger(__name__)


class Version:
    """A published version and the trainer's own copy of it."""

    def __init__(self, published: Published, tensors: FlatWeights) -> None:
        self.published = published
        self.tensors = tensors
        self._lock = threading.Lock()  # of what follows
        self._readers = 0
        self._is_taken = False

    @contextmanager
    def read(self) -> Iterator[FlatWeights]:
        """The copy, which does not change inside. Raises WeightsError if a later version has its memory."""
        with self._lock:
            if self._is_taken:
                raise WeightsError(f"v{self.published.policy_version} is no longer in memory")
            self._readers += 1
        try:
            yield self.tensors
        finally:
            with self._lock:
                self._readers -= 1

    def take(self, layout: Layout) -> FlatWeights | None:
        """Its memory, for a later version of `layout`; None if it is read now, or another size."""
        with self._lock:
            if self._readers or self._is_taken or self.tensors.layout != layout:
                return None
            self._is_taken = True
            return self.tensors


@dataclass
class FileChannel:
    """Weight sets in `directory`, of which the newest `keep` are kept. See WeightChannel.

    `lora` has the settings of the adapters that are published, and is stored with each version.
    `shared` puts the tensors into shared memory if they fit. With `delta` or `copies` the newest
    version is kept in memory as `last`, and only each `whole_every`th is written whole, and also a
    version whose chain of deltas would be no smaller than a whole set. The memory of the one before is
    the next one's, since allocating takes longer than copying.
    """

    directory: Path
    keep: int = 3
    shared: bool = False
    delta: bool = False
    copies: bool = False
    whole_every: int = 1
    lora: LoraConfig | None = None
    last: Version | None = field(default=None, init=False)
    _replaced: Version | None = field(default=None, init=False)  # by `last`
    _frozen: frozenset[str] = field(default=frozenset(), init=False)
    _since_whole: int = field(default=0, init=False)  # versions
    _chain_bytes: int = field(default=0, init=False)  # of deltas since then
    _before: Path | None = field(default=None, init=False)  # the last version of this process
    _opened: Storage | None = field(default=None, init=False)
    _publication: BackgroundPublication[_Copied] | None = field(default=None, init=False)
    _buffer: FlatWeights | None = field(default=None, init=False)  # see _reused

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Copy the tensors, then write a version and remove old ones. See WeightChannel."""
        if self._publication is not None:
            self._publication.settle()
        began = time.monotonic()
        stream = tensors if isinstance(tensors, TensorStream) else stream_of(tensors)
        target = path_of(self.directory, policy_version)
        finish: Callable[[_Copied], Published]
        if target.exists():
            flat = None
            finish = partial(self._republish, target)
        elif self._copies:
            flat = self._taken(stream.specs)
            finish = partial(self._publish_copy, target, policy_version)
        else:
            flat = self._reused({n: s for n, s in stream.specs.items() if n not in self._frozen})
            finish = partial(self._publish_whole, target, policy_version)
        source = TensorCopy(stream)

        def copy() -> _Copied:
            into = flat or FlatWeights.in_memory(stream.specs, pinned=is_on_gpu())
            return _Copied(into, source.into(into))

        if stream.is_gathered:
            made = copy()
            copy = lambda: made  # noqa: E731
        self._publication = BackgroundPublication(
            target, policy_version, copy, partial(self._complete, finish), began=began
        )
        return self._publication

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Write a version and remove old ones. See WeightChannel."""
        return self.begin(tensors, policy_version).result()

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
        publication, self._publication = self._publication, None
        try:
            if publication is not None:
                publication.settle()
        finally:
            self._close()

    def _close(self) -> None:
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
        self._opened = self.last = self._replaced = self._buffer = None

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

    def _reused(self, specs: Mapping[str, ShapeAndType]) -> FlatWeights:
        """The memory that sets are copied to before they are written; allocating it takes long."""
        if self._buffer is None or self._buffer.layout != layout_of(specs):
            self._buffer = None  # freed before the next is allocated
            self._buffer = FlatWeights.in_memory(specs, pinned=is_on_gpu())
        return self._buffer

    def _taken(self, specs: Mapping[str, ShapeAndType]) -> FlatWeights | None:
        """The memory of the version before the last; None if there is none that fits and is not read."""
        replaced, self._replaced = self._replaced, None
        return None if replaced is None else replaced.take(layout_of(specs))

    # --- in the publication's thread ----------------------------------------------------------

    def _complete(self, finish: Callable[[_Copied], Published], copied: _Copied) -> Published:
        complete = finish(copied)
        self._before = complete.path
        self._remove_old()
        return complete

    def _republish(self, target: Path, copied: _Copied) -> Published:
        """Return the existing version if it holds these weights; else raise WeightsError."""
        tensors = copied.flat.tensors
        if not holds(target, tensors, self.lora):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        complete = published(target, read_manifest(target))
        if self._copies and (self.last is None or self.last.published != complete):
            self._replaced, self.last = self.last, Version(complete, copied.flat)
            self._since_whole = (
                self.whole_every
            )  # the last whole version is unknown: the next is whole
        return complete

    def _publish_whole(self, target: Path, policy_version: int, copied: _Copied) -> Published:
        """Write the whole set, and frozen tensors where the version before has not got them."""
        return _write_version(
            target,
            policy_version,
            copied,
            self._storage,
            before=self._before,
            lora=self.lora,
        )

    def _publish_copy(self, target: Path, policy_version: int, copied: _Copied) -> Published:
        """Write the changes, or the whole set where it is due or no larger."""
        copy = copied.flat
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
        self._replaced, self.last = before, Version(published(target, manifest), copy)
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
    trained = {name: each for name, each in tensors.items() if name not in frozen}
    unchanged = {name: each for name, each in tensors.items() if name in frozen}
    copied = _Copied(FlatWeights.in_memory(specs_of(trained)).fill(trained), unchanged)
    try:
        storage = storage or Storage(directory, shared=False)
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
    return _write_version(target, policy_version, copied, storage, before=before, lora=lora)


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


@dataclass(frozen=True)
class _Copied:
    """The copy of a set."""

    flat: FlatWeights
    frozen: Mapping[str, torch.Tensor]  # those that are not in it: the model's own


def _write_version(
    target: Path,
    policy_version: int,
    copied: _Copied,
    storage: Storage,
    *,
    before: Path | None,
    lora: LoraConfig | None,
) -> Published:
    """Write a whole version. Raises WeightsError."""
    flat = copied.flat
    try:
        with atomic_directory(target) as draft:
            file = storage.make(draft / WEIGHTS, flat.layout.size_bytes)
            manifest = flat.manifest(policy_version, flat.write_digested(file))
            if copied.frozen:
                manifest = _joined(manifest, _write_frozen(copied.frozen, draft, before, storage))
            manifest = manifest.model_copy(update={"lora": lora})
            _write_manifest(draft, manifest)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None
    return published(target, manifest)


def _write_frozen(
    tensors: Mapping[str, torch.Tensor], draft: Path, before: Path | None, storage: Storage
) -> Manifest:
    """The manifest of the frozen tensors' file, linked from `before` if that holds the same tensors."""
    known = read_manifest(before) if before is not None else None
    if before is None or known is None or set(known.frozen) != tensors.keys():
        size = sum(tensor.nbytes for tensor in tensors.values())
        file = storage.make(draft / FROZEN, size)
        return FlatWeights.in_file(specs_of(tensors), file).fill(tensors).manifest(0)
    os.link(before / FROZEN, draft / FROZEN, follow_symlinks=False)
    size = sum(tensor.nbytes for tensor in tensors.values())
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
