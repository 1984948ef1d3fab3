"""Weights as files: one directory a version, complete or absent, never changed.

    FileChannel    publishes versions and removes old ones (the trainer's end)
    publish        tensors -> DIRECTORY/v000012/{model.safetensors, manifest.json}, atomically
    holds          is it exactly these weights?
    load           the tensors of a version, if it holds what it says and fits this model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing; what it says of itself is its manifest (manifest.py). Old versions are removed: a reader
that has its files open keeps them (POSIX), one that comes too late gets a WeightsError and asks for
the newest instead (dart_cli/rollout/sync.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bus.errors import WeightsError
from dart_cli.weights.base import Published
from dart_cli.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    Manifest,
    TensorInfo,
    check_file,
    digest_of,
    newest,
    path_of,
    published,
    read_manifest,
    versions,
)
from dart_cli.weights.whole import whole_directory

__all__ = [
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
class FileChannel:
    """Weight sets in `directory`, of which the newest `keep` stay. See WeightChannel."""

    directory: Path
    keep: int = 3

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Write a version and remove those that are too old."""
        complete = publish(tensors, self.directory, policy_version)
        for version in versions(self.directory)[: -self.keep]:
            # A version that cannot be removed is tried again after the next publication.
            shutil.rmtree(path_of(self.directory, version), ignore_errors=True)
        return complete

    def newest(self) -> Published | None:
        """The newest complete version, None before the first."""
        return newest(self.directory)

    def resume(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Publish the weights of a trainer that starts or starts again, at `policy_version` or later.

        A trainer that fell back to its checkpoint holds other weights than the versions it had
        published after it. These numbers are taken: its weights become the next one, so that to
        the workers versions only ever rise and each number means one set of weights.
        """
        last = max([policy_version, *versions(self.directory)])
        taken = path_of(self.directory, last).exists()
        if taken and not holds(path_of(self.directory, last), tensors):
            last += 1
        return self.publish(tensors, last)


def publish(tensors: Mapping[str, torch.Tensor], directory: Path, policy_version: int) -> Published:
    """Write `tensors` as `directory`/v<version>, complete at once.

    Publishing the same weights as the same version again changes nothing. Raises WeightsError if
    the version exists with other weights, or the disk refuses.
    """
    target = path_of(directory, policy_version)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if target.exists():
        if not holds(target, kept):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        return published(target, read_manifest(target))
    try:
        with whole_directory(target) as draft:
            save_file(kept, draft / WEIGHTS, metadata={"format": "pt"})
            manifest = Manifest(
                policy_version=policy_version,
                digest=digest_of(draft / WEIGHTS),
                size_bytes=(draft / WEIGHTS).stat().st_size,
                tensors={name: _info(tensor) for name, tensor in kept.items()},
            )
            (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
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
    _check_fit(path, manifest, expected)
    check_file(path, manifest)
    file = path / WEIGHTS
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, RuntimeError) as error:  # torch raises the latter for a file that has gone
        raise WeightsError(f"{file}: removed while it was read, or unreadable ({error})") from None
    except SafetensorError as error:
        raise WeightsError(f"{file} is no safetensors file: {error}") from None
    if {name: _info(tensor) for name, tensor in tensors.items()} != manifest.tensors:
        raise WeightsError(f"{file} holds other tensors than its manifest lists")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise WeightsError(f"{file}: {name} has values that are not finite")
    return tensors


def _check_fit(path: Path, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> None:
    """Names, shapes and dtypes of a manifest against a model's."""
    given = manifest.tensors
    for name in sorted(expected.keys() - given.keys()):
        raise WeightsError(f"{path} lacks {name}, which the model has")
    for name in sorted(given.keys() - expected.keys()):
        raise WeightsError(f"{path} holds {name}, which the model has not")
    for name, tensor in expected.items():
        wanted = _info(tensor)
        if given[name] != wanted:
            raise WeightsError(
                f"{path}: {name} is {given[name].dtype}{given[name].shape}, "
                f"the model's is {wanted.dtype}{wanted.shape}"
            )


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
