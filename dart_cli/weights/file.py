"""Weights as files: one directory a version, complete or absent, never changed.

    FileChannel    publishes versions and removes old ones (the trainer's end)
    publish        tensors -> DIRECTORY/v000012/{model.safetensors, manifest.json}, atomically
    newest         the newest complete version in a directory
    read_manifest  what a version says of itself
    holds          is it exactly these weights?
    load           the tensors of a version, if it holds what it says and fits this model

A version is written under another name, synced to disk and renamed, so a reader sees all of it or
nothing. Old versions are removed: a reader that has its files open keeps them (POSIX), one that
comes too late gets a WeightsError and takes the newest instead (dart_cli/rollout/sync.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bus.errors import WeightsError
from dart_cli.weights.base import Published
from dart_cli.weights.whole import whole_directory

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
_VERSION = re.compile(r"v(\d{6,})")
_CHUNK_BYTES = 1 << 20
_LARGEST_MANIFEST_BYTES = 64 << 20


class TensorInfo(BaseModel):
    """One tensor of a set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shape: list[int]
    dtype: str  # as torch prints it, without the prefix: float32, bfloat16


class Manifest(BaseModel):
    """What a weight set says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy_version: int
    digest: str  # BLAKE2b of model.safetensors, hex
    size_bytes: int  # of model.safetensors
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class FileChannel:
    """Weight sets in `directory`, of which the newest `keep` stay. See WeightChannel."""

    directory: Path
    keep: int = 3

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Write a version and remove those that are too old."""
        published = publish(tensors, self.directory, policy_version)
        for version in _versions(self.directory)[: -self.keep]:
            # A version that cannot be removed is tried again after the next publication.
            shutil.rmtree(_path(self.directory, version), ignore_errors=True)
        return published

    def newest(self) -> Published | None:
        """The newest complete version, None before the first."""
        return newest(self.directory)

    def resume(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Publish the weights of a trainer that starts or starts again, at `policy_version` or later.

        A trainer that fell back to its checkpoint holds other weights than the versions it had
        published after it. These numbers are taken: its weights become the next one, so that to
        the workers versions only ever rise and each number means one set of weights.
        """
        last = max([policy_version, *_versions(self.directory)])
        taken = _path(self.directory, last).exists()
        if taken and not holds(_path(self.directory, last), tensors):
            last += 1
        return self.publish(tensors, last)


def publish(tensors: Mapping[str, torch.Tensor], directory: Path, policy_version: int) -> Published:
    """Write `tensors` as `directory`/v<version>, complete at once.

    Publishing the same weights as the same version again changes nothing. Raises WeightsError if
    the version exists with other weights, or the disk refuses.
    """
    target = _path(directory, policy_version)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if target.exists():
        if not holds(target, kept):
            raise WeightsError(
                f"{target} exists with other weights; a version is never published twice"
            )
        return _published(target, read_manifest(target))
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
    return _published(target, manifest)


def holds(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the version at `path` is complete and holds exactly `tensors`."""
    try:
        held = load(path, tensors)
    except WeightsError:
        return False
    return all(torch.equal(held[name], tensor.cpu()) for name, tensor in tensors.items())


def newest(directory: Path) -> Published | None:
    """The newest version in `directory` whose manifest reads; None if there is none."""
    for version in reversed(_versions(directory)):
        path = _path(directory, version)
        with contextlib.suppress(WeightsError):  # removed between listing and reading
            return _published(path, read_manifest(path))
    return None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the version at `path`. Raises WeightsError if it is absent or no manifest."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > _LARGEST_MANIFEST_BYTES:
            raise WeightsError(f"{file} is too large for a manifest")
        manifest = Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise WeightsError(f"{file}: {error.strerror}; removed or never complete") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise WeightsError(f"{file} is no manifest ({where}: {first['msg']})") from None
    return manifest


def load(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a version, checked whole against the model's tensors `expected`, by name.

    Raises WeightsError for a truncated or altered file, for names, shapes or dtypes that are not
    the model's, and for values that are not finite. Touches nothing of `expected`.
    """
    manifest = read_manifest(path)
    _check_fit(path, manifest, expected)
    file = path / WEIGHTS
    try:
        size = file.stat().st_size
        if size != manifest.size_bytes:
            raise WeightsError(f"{file} has {size} bytes, its manifest says {manifest.size_bytes}")
        if digest_of(file) != manifest.digest:
            raise WeightsError(f"{file} is not what its manifest says: the digest differs")
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


def _path(directory: Path, policy_version: int) -> Path:
    if policy_version < 0:
        raise WeightsError(f"policy version {policy_version} cannot be published")
    return directory / f"v{policy_version:06d}"


def _published(path: Path, manifest: Manifest) -> Published:
    digest = hashlib.blake2b(json.dumps(manifest.model_dump(), sort_keys=True).encode()).hexdigest()
    return Published(manifest.policy_version, path, digest, manifest.size_bytes)


def _versions(directory: Path) -> list[int]:
    """Versions in `directory`, oldest first."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _VERSION.fullmatch(name)))


def digest_of(file: Path) -> str:
    """BLAKE2b of a file, hex."""
    digest = hashlib.blake2b()
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
