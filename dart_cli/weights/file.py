"""Weights as files: one directory per version, complete or absent, never changed.

    FileChannel    the trainer's end: publishes versions beside training and removes old ones
    Publication    a version that is being published: copied first, then digested and written
    load           reads the tensors of a version, checked against its manifest and the model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; its manifest describes it (manifest.py). Old versions are removed. A reader that has the
files open can still read them (POSIX); a later reader gets a WeightsError and requests the newest version
instead (dart_cli/rollout/sync.py).

A publication copies the tensors to host memory (flat_weights.TensorCopy); a thread then computes digests
and writes the files. There is one publication at a time, because the copy is as large as the whole set. Its
memory is used again by the next publication.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from bus.errors import WeightsError, cure_of
from dart_cli.config.schema import LoraConfig
from dart_cli.hardware import accelerator
from dart_cli.weights.flat_weights import (
    FlatWeights,
    TensorCopy,
    TensorStream,
    check_finite,
    check_fit,
    read_whole,
    stream_of,
)
from dart_cli.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    KnownVersion,
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

T = TypeVar("T")
PUBLISH_S = 900.0
"""Most seconds for a publication: some 100 GB on a slow disk."""


class Publication:
    """A version that a daemon thread publishes. Any thread may call it, and each wait has a deadline.

    If the work in the background fails, each later wait raises its error.
    """

    def __init__(
        self,
        target: Path,
        policy_version: int,
        copy: Callable[[], FlatWeights],
        finish: Callable[[FlatWeights], Published],
        began: float | None = None,
    ) -> None:
        """Run `copy`, then `finish` on its result. `began` is in monotonic seconds, by default now."""
        self.policy_version = policy_version
        self._target = target
        self._began = time.monotonic() if began is None else began
        self._took = 0.0
        self._is_reported = False  # a wait has raised the error
        self._copied: Future[None] = Future()
        self._over: Future[Published] = Future()
        threading.Thread(
            target=self._run, args=(copy, finish), name="publication", daemon=True
        ).start()

    @property
    def is_copied(self) -> bool:
        """True if `wait_until_copied` returns or raises at once."""
        return self._copied.done()

    @property
    def is_over(self) -> bool:
        """True if `result` returns or raises at once."""
        return self._over.done()

    @property
    def seconds(self) -> float:
        """Seconds since it began; once it is over, the seconds that it took."""
        return self._took if self.is_over else time.monotonic() - self._began

    def wait_until_copied(self) -> None:
        """Wait until the channel has a copy, so that the tensors may change. Raises WeightsError."""
        self._wait(self._copied, "copied")

    def result(self) -> Published:
        """Wait until the version is complete, with digests and files, and return it. Raises WeightsError."""
        return self._wait(self._over, "complete")

    def settle(self) -> None:
        """Wait until the publication is over. Raises its error unless a wait has raised it already."""
        if not (self.is_over and self._is_reported):
            self.result()

    def _wait(self, future: Future[T], state: str) -> T:
        """Return the result of a future, by the deadline. Raises WeightsError, or the error of the work."""
        left_s = max(self._began + PUBLISH_S - time.monotonic(), 0.0)
        if not wait([future], left_s).done:
            raise WeightsError(
                f"{self._target} is not {state} after {PUBLISH_S:.0f} s; does its disk hang?"
            )
        if self.is_over and (error := self._over.exception()) is not None:
            self._is_reported = True
            raise error
        return future.result()

    # `copy` and `finish` hold the tensors; as arguments of the thread they are freed with it.
    def _run(
        self, copy: Callable[[], FlatWeights], finish: Callable[[FlatWeights], Published]
    ) -> None:
        try:
            copied = copy()
            self._copied.set_result(None)
            complete = finish(copied)
        except BaseException as error:  # noqa: BLE001 - raised by the next wait
            self._took = time.monotonic() - self._began
            self._over.set_exception(error)
            if not self.is_copied:
                self._copied.set_result(None)
            return
        self._took = time.monotonic() - self._began
        self._over.set_result(complete)


class FileChannel:
    """The trainer's end of the channel `file`: weight sets in `directory`.

    A published version never changes.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        *,
        shared: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Keep the newest `keep` versions.

        With `shared` the tensors are put into shared memory if they fit. `lora` are the settings of the
        adapters that are published; they are stored with each version.
        """
        self.directory = directory
        self._keep = keep
        self._shared = shared
        self._lora = lora
        self._opened: Storage | None = None
        self._publication: Publication | None = None
        self._buffer: FlatWeights | None = None  # to which sets are copied before they are written

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Begin to publish `tensors`, by name, as `policy_version`.

        They must not change until `Publication.wait_until_copied` has returned. There is one publication at a
        time: a call waits until the one before is over, and raises its error if no wait has raised it yet.
        A publication fails with WeightsError if the version exists with other weights or cannot be
        written.
        """
        if self._publication is not None:
            self._publication.settle()
        began = time.monotonic()
        stream = tensors if isinstance(tensors, TensorStream) else stream_of(tensors)
        target = path_of(self.directory, policy_version)
        source = TensorCopy(stream)

        def copy() -> FlatWeights:
            return source.into(self._memory(stream.specs))

        if stream.is_gathered:
            flat = copy()
            copy = lambda: flat  # noqa: E731
        finish = partial(self._complete, target, policy_version)
        self._publication = Publication(target, policy_version, copy, finish, began)
        return self._publication

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Publish tensors: begin, wait, and return the result. Raises WeightsError."""
        return self.begin(tensors, policy_version).result()

    def newest(self) -> Published | None:
        """Return the newest whole version; None before the first."""
        return newest_version(self.directory)

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        in_ledger: KnownVersion | None = None,
    ) -> Published:
        """Publish the weights of a trainer that starts or restarts, as `policy_version` or a later version.

        Return the version. Raises WeightsError.

        `in_ledger` is the newest version in the run's ledger. The directory may lack it, if it was moved,
        copied or emptied.

        A trainer that resumed from its checkpoint has other weights than the versions that were published
        after that checkpoint. The numbers of these are used up, and so is every number up to `in_ledger`.
        The trainer's weights become the next version, so that version numbers only rise and each number
        means one set of weights.
        """
        newest = max(
            [-1 if in_ledger is None else in_ledger.policy_version, *versions(self.directory)]
        )
        if policy_version <= newest and not self._is_the_same(newest, tensors, in_ledger):
            return self.publish(tensors, newest + 1)
        return self.publish(tensors, max(policy_version, newest))

    def _is_the_same(
        self, version: int, tensors: Mapping[str, torch.Tensor], in_ledger: KnownVersion | None
    ) -> bool:
        """Return True if the directory has `version` with these weights, and the ledger has no others."""
        path = path_of(self.directory, version)
        if not path.exists() or not self._holds(path, tensors):
            return False
        if in_ledger is None or in_ledger.policy_version != version:
            return True
        return published(path, read_manifest(path)).digest == in_ledger.digest

    def close(self) -> None:
        """Wait for the publication that is under way, and move all versions to disk. Raises WeightsError."""
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
                        f"{self.directory}: its weights cannot be written to disk: {error}; "
                        f"{cure_of(error, 'is it full?')}"
                    ) from None
                self._opened.close()
                self._opened = self._buffer = None

    def _to_disk(self, storage: Storage) -> None:
        """Copy the tensors of all versions from shared memory to disk, the newest first."""
        for version in reversed(versions(self.directory)):
            storage.keep(path_of(self.directory, version) / WEIGHTS)

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
        """Return the buffer for the next set: the last one if it fits, since allocating is slow."""
        if self._buffer is None or self._buffer.layout != layout_of(specs):
            self._buffer = None  # freed before the next is allocated
            self._buffer = FlatWeights.in_memory(specs, pinned=accelerator.is_in_use())
        return self._buffer

    def _complete(self, target: Path, policy_version: int, copied: FlatWeights) -> Published:
        """Return the version at `target`, written now or before with the same weights. Raises WeightsError."""
        if not target.exists():
            complete = self._write(target, policy_version, copied)
        elif self._holds(target, copied.tensors):
            complete = published(target, read_manifest(target))
        else:
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        self._remove_old()
        return complete

    def _holds(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if the version at `path` is complete, with `tensors` and these adapter settings."""
        try:
            loaded = load(path, tensors)
            settings = read_manifest(path).lora
        except WeightsError:
            return False
        return settings == self._lora and all(
            torch.equal(loaded[name], tensor.cpu()) for name, tensor in tensors.items()
        )

    def _write(self, target: Path, policy_version: int, copied: FlatWeights) -> Published:
        """Write the manifest, and the tensors if `_is_due`. Raises WeightsError."""
        storage = self._storage  # makes the directory
        try:
            with atomic_directory(target) as draft:
                if self._is_due(copied):
                    file = storage.make(draft / WEIGHTS, copied.layout.size_bytes)
                    digests = copied.write(file)
                else:
                    digests = copied.digests()
                manifest = copied.manifest(policy_version, digests, self._lora)
                (draft / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            fix = cure_of(error, "is the disk full?")
            raise WeightsError(f"{target} cannot be written: {error}; {fix}") from None
        return published(target, manifest)

    def _is_due(self, _copied: FlatWeights) -> bool:
        """Return True if the tensors of this version are to be written."""
        return True

    def _remove_old(self) -> None:
        """Remove old versions, except the newest `keep` and the newest whole one of the same age or older."""
        present = versions(self.directory)
        oldest = present[-self._keep :][0]
        whole = [
            version
            for version in present
            if version <= oldest and (path_of(self.directory, version) / WEIGHTS).exists()
        ]
        for version in present:
            if version < max(whole, default=oldest):
                # If a version cannot be removed, the next publication tries it again.
                shutil.rmtree(path_of(self.directory, version), ignore_errors=True)
        self._storage.sweep()


def load(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, by name, checked against the model's tensors `expected`.

    Raises WeightsError for a truncated or altered file, for names, shapes or dtypes that differ from
    the model, and for values that are not finite. `expected` is not changed.
    """
    manifest = read_manifest(path)
    check_fit(path, manifest, expected)
    check_files(path, manifest)
    tensors = read_whole(path, manifest)
    check_finite(path, tensors.items())
    return tensors
