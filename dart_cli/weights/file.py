"""Weights as files: one directory per version, complete or absent, never changed.

    FileChannel    publishes versions beside training and removes old ones (the trainer's end)
    Publication    a version on its way: copied first, then digested and written
    load           the tensors of a version, checked against its manifest and the model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; its manifest describes it (manifest.py). Old versions are removed: a reader that has the
files open keeps them (POSIX); a later reader gets a WeightsError and requests the newest instead
(dart_cli/rollout/sync.py).

A publication copies the tensors to host memory (flat_weights.TensorCopy); from there they are digested and
written in a thread. One publication at a time: the copy is a set's size, and lasts until the next one has
its own.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig
from dart_cli.weights.flat_weights import (
    FlatWeights,
    TensorCopy,
    TensorStream,
    check_finite,
    check_fit,
    is_on_gpu,
    read_whole,
    specs_of,
    stream_of,
)
from dart_cli.weights.manifest import (
    FROZEN,
    MANIFEST,
    WEIGHTS,
    KnownVersion,
    Manifest,
    Published,
    TensorSpec,
    check_files,
    layout_of,
    newest_version,
    path_of,
    published,
    read_manifest,
    versions,
)
from dart_cli.weights.storage import Storage, atomic_directory

PUBLISH_S = 900.0
"""Longest time of a publication: some 100 GB on a slow disk."""


@dataclass(frozen=True)
class Copied:
    """The copy of a set."""

    flat: FlatWeights
    frozen: Mapping[str, torch.Tensor]  # those that are not in it: the model's own


class Publication:
    """A version on its way, in a daemon thread. Any thread may call, and each wait has a deadline.

    An error of the work in the background is raised by the first wait after it, and by each later one.
    """

    def __init__(
        self,
        target: Path,
        policy_version: int,
        copy: Callable[[], Copied],
        finish: Callable[[Copied], Published],
        began: float | None = None,
    ) -> None:
        """Runs `copy`, then `finish` on what that returned. `began` in monotonic seconds, by default now."""
        self.policy_version = policy_version
        self._target = target
        self._began = time.monotonic() if began is None else began
        self._took = 0.0
        self._published: Published | None = None
        self._error: BaseException | None = None
        self._is_told = False  # the error was raised
        self._copied, self._over = threading.Event(), threading.Event()
        threading.Thread(
            target=self._run, args=(copy, finish), name="publication", daemon=True
        ).start()

    @property
    def is_copied(self) -> bool:
        """Whether `copied` returns or raises at once."""
        return self._copied.is_set()

    @property
    def is_over(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._over.is_set()

    @property
    def seconds(self) -> float:
        """Since it began; once it is over, the seconds that it took."""
        return self._took if self.is_over else time.monotonic() - self._began

    def copied(self) -> None:
        """Wait until the tensors may change: the channel has a copy. Raises WeightsError."""
        self._wait(self._copied, "copied")

    def result(self) -> Published:
        """Wait until the version is complete: digested and written. Raises WeightsError."""
        self._wait(self._over, "complete")
        assert self._published is not None
        return self._published

    def settle(self) -> None:
        """Wait until it is over. Raises its error if no wait has raised it yet."""
        if not (self._over.is_set() and self._is_told):
            self.result()

    def _wait(self, event: threading.Event, state: str) -> None:
        left_s = self._began + PUBLISH_S - time.monotonic()
        if not event.wait(max(left_s, 0.0)):
            raise WeightsError(
                f"{self._target} is not {state} after {PUBLISH_S:.0f} s; does its disk hang?"
            )
        if self._error is not None:
            self._is_told = True
            raise self._error

    def _run(
        self, copy: Callable[[], Copied], finish: Callable[[Copied], Published]
    ) -> None:  # which hold the tensors, and go with the thread
        try:
            copied = copy()
            self._copied.set()
            self._published = finish(copied)
        except BaseException as error:  # noqa: BLE001 - raised by the next wait
            self._error = error
        self._took = time.monotonic() - self._began
        self._copied.set()
        self._over.set()


class FileChannel:
    """The trainer's end of the channel `file`: weight sets in `directory`. A published version never changes."""

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        *,
        shared: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """The newest `keep` versions are kept.

        `shared` puts the tensors into shared memory if they fit. `lora` has the settings of the adapters that
        are published, and is stored with each version.
        """
        self.directory = directory
        self._keep = keep
        self._shared = shared
        self._lora = lora
        self._frozen: frozenset[str] = frozenset()
        self._before: Path | None = None  # the last version of this process
        self._opened: Storage | None = None
        self._publication: Publication | None = None
        self._buffer: FlatWeights | None = None  # sets are copied to it before they are written

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Begin to make `tensors` by name available as `policy_version`, all at once.

        They must not change until `Publication.copied` has returned. There is one publication at a
        time: the next waits until the one before is over, and raises its error if it was not raised yet.
        A publication fails with WeightsError if the version exists with other weights or cannot be
        written.
        """
        if self._publication is not None:
            self._publication.settle()
        began = time.monotonic()
        stream = tensors if isinstance(tensors, TensorStream) else stream_of(tensors)
        target = path_of(self.directory, policy_version)
        source = TensorCopy(stream)

        def copy() -> Copied:
            into = self._memory({n: s for n, s in stream.specs.items() if n not in self._frozen})
            return Copied(into, source.into(into))

        if stream.is_gathered:
            made = copy()
            copy = lambda: made  # noqa: E731
        finish = partial(self._complete, target, policy_version)
        self._publication = Publication(target, policy_version, copy, finish, began)
        return self._publication

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Begin a publication and wait for its result. Raises WeightsError."""
        return self.begin(tensors, policy_version).result()

    def newest(self) -> Published | None:
        """The newest whole version, None before the first."""
        return newest_version(self.directory)

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
        known: KnownVersion | None = None,
    ) -> Published:
        """Publish the weights of a trainer that starts or restarts, at `policy_version` or later.

        `frozen` names the tensors that no later version will change; `known` is the newest version
        that the run's ledger has, which the directory may lack: it was moved, copied or emptied.

        A trainer that resumed from its checkpoint has other weights than the versions published after
        that checkpoint. Those numbers are taken, and so is every number up to that of `known`: its
        weights become the next version, so that for the workers versions only rise and each number
        means one set of weights.
        """
        self._frozen = frozenset(frozen)
        taken = max([-1 if known is None else known.policy_version, *versions(self.directory)])
        if policy_version <= taken and not self._is_the_same(taken, tensors, known):
            return self.publish(tensors, taken + 1)
        return self.publish(tensors, max(policy_version, taken))

    def _is_the_same(
        self, version: int, tensors: Mapping[str, torch.Tensor], known: KnownVersion | None
    ) -> bool:
        """Whether `version` is here with these weights, and means no others to the run's ledger."""
        path = path_of(self.directory, version)
        if not path.exists() or not self._holds(path, tensors):
            return False
        if known is None or known.policy_version != version:
            return True
        return published(path, read_manifest(path)).digest == known.digest

    def close(self) -> None:
        """Move the kept versions to disk, the one on its way included. Raises WeightsError."""
        publication, self._publication = self._publication, None
        try:
            if publication is not None:
                publication.settle()
        finally:
            if self._opened is not None:
                try:
                    self._to_disk(self._opened)
                except OSError as error:
                    raise WeightsError(
                        f"{self.directory}: its weights cannot be written to disk: {error}; is it full?"
                    ) from None
                self._opened.close()
                self._opened = self._buffer = None

    def _to_disk(self, storage: Storage) -> None:
        for version in reversed(versions(self.directory)):
            for file in (WEIGHTS, FROZEN):
                storage.keep(path_of(self.directory, version) / file)

    @property
    def _storage(self) -> Storage:
        if self._opened is None:
            try:
                self._opened = Storage(self.directory, shared=self._shared)
            except OSError as error:
                raise WeightsError(f"{self.directory} cannot be written: {error}") from None
        return self._opened

    # --- in the publication's thread ----------------------------------------------------------

    def _memory(self, specs: Mapping[str, TensorSpec]) -> FlatWeights:
        """What the next set is copied to; allocating it takes longer than copying."""
        if self._buffer is None or self._buffer.layout != layout_of(specs):
            self._buffer = None  # freed before the next is allocated
            self._buffer = FlatWeights.in_memory(specs, pinned=is_on_gpu())
        return self._buffer

    def _complete(self, target: Path, policy_version: int, copied: Copied) -> Published:
        if not target.exists():
            complete = self._write(target, policy_version, copied)
        elif self._holds(target, {**copied.flat.tensors, **copied.frozen}):
            complete = published(target, read_manifest(target))
        else:
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        self._before = complete.path
        self._remove_old()
        return complete

    def _holds(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the version at `path` is complete and holds exactly `tensors`, adapters of these settings."""
        try:
            held = load(path, tensors)
            settings = read_manifest(path).lora
        except WeightsError:
            return False
        return settings == self._lora and all(
            torch.equal(held[name], tensor.cpu()) for name, tensor in tensors.items()
        )

    def _write(self, target: Path, policy_version: int, copied: Copied) -> Published:
        """Write the whole set, and frozen tensors where the version before has not got them."""
        flat, storage = copied.flat, self._storage
        try:
            with atomic_directory(target) as draft:
                file = storage.make(draft / WEIGHTS, flat.layout.size_bytes)
                manifest = flat.manifest(policy_version, flat.write_digested(file))
                if copied.frozen:
                    manifest = _joined(manifest, self._write_frozen(copied.frozen, draft))
                return self._described(target, draft, manifest)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{target} cannot be written: {error}; is the disk full?") from None

    def _described(self, target: Path, draft: Path, manifest: Manifest) -> Published:
        """Write the manifest of the version that `target` will be. Raises OSError."""
        manifest = manifest.model_copy(update={"lora": self._lora})
        (draft / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        return published(target, manifest)

    def _write_frozen(self, tensors: Mapping[str, torch.Tensor], draft: Path) -> Manifest:
        """The manifest of the frozen tensors' file, linked from the version before if that holds the same."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        known = read_manifest(self._before) if self._before is not None else None
        if self._before is None or known is None or set(known.frozen) != tensors.keys():
            file = self._storage.make(draft / FROZEN, size)
            return FlatWeights.in_file(specs_of(tensors), file).fill(tensors).manifest(0)
        os.link(self._before / FROZEN, draft / FROZEN, follow_symlinks=False)
        kept = {name: known.tensors[name] for name in known.frozen}
        return Manifest(policy_version=known.policy_version, size_bytes=size, tensors=kept)

    def _remove_old(self) -> None:
        """Remove all but the newest `keep`, and the newest whole one that is no newer than these."""
        present = versions(self.directory)
        oldest = present[-self._keep :][0]
        whole = [
            version
            for version in present
            if version <= oldest and (path_of(self.directory, version) / WEIGHTS).exists()
        ]
        for version in present:
            if version < max(whole, default=oldest):
                # A version that cannot be removed is tried again after the next publication.
                shutil.rmtree(path_of(self.directory, version), ignore_errors=True)
        self._storage.sweep()


def load(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a version, all checked against the model's tensors `expected`, by name.

    Raises WeightsError for a truncated or altered file, for names, shapes or dtypes that are not
    the model's, and for values that are not finite. Does not change `expected`.
    """
    manifest = read_manifest(path)
    check_fit(path, manifest, expected)
    check_files(path, manifest)
    tensors = read_whole(path, manifest)
    check_finite(path, tensors.items())
    return tensors


def _joined(trained: Manifest, frozen: Manifest) -> Manifest:
    return trained.model_copy(
        update={
            "size_bytes": trained.size_bytes + frozen.size_bytes,
            "tensors": trained.tensors | frozen.tensors,
            "frozen": sorted(frozen.tensors),
        }
    )
