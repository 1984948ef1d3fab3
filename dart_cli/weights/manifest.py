"""The manifest and the file of a weight set on disk; read without torch.

    Manifest         the content of a version's manifest.json
    read_manifest    reads and validates the manifest of a version
    parse_manifest   validates a manifest that was read or received
    check_announced  checks that a set is the one that was announced
    check_files      checks that the file of a set matches the manifest
    check_adapters   checks that the adapters of a set are those for which a process is configured
    versions         the numbers of the versions in a directory
    newest_version   the newest version in a directory whose tensors are there
    tree_digests     the digests of tensors' bytes, computed on all cores
    layout_of        the place of each tensor in the safetensors file that we write: the widest types first,
                     then by name, without gaps
    read_layout      the layout of a safetensors file, checked against its length
    ranges           the bytes of some tensors, neighbours joined, in pieces of a bounded size

The manifest holds a digest of each tensor, whichever channel carries its bytes. So the digest of the
manifest, which is part of the announcement (WeightsPublished, SyncReply), authenticates the whole set.

A file, the trainer's copy of its newest version and a worker's copy of the version that it serves have the
same layout, so sets are sent between them as plain ranges of bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bus.errors import WeightsError, cure_of
from dart_cli.config.adapters import adapter_change
from dart_cli.config.schema import LoraConfig

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
T = TypeVar("T")
R = TypeVar("R")
_VERSION = re.compile(r"v(\d{6,})")
LEAF_BYTES = 8 << 20
"""Bytes that one leaf of a tree digest covers."""
MOST_THREADS = 8
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 32
_LARGEST_MANIFEST_BYTES = 64 << 20
_CODES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""A dtype's name in torch -> its name in safetensors, and its bytes."""
_DTYPES = {code: name for name, (code, _) in _CODES.items()}
_LARGEST_HEADER_BYTES = 64 << 20
_FIX = "copy it again, or use another version"


@dataclass(frozen=True)
class Published:
    """A version that is complete and never changes."""

    policy_version: int
    path: Path  # directory with manifest.json
    digest: str  # of the manifest, which holds the tensors' digests
    size_bytes: int  # of all tensors, even if few of them are sent


class KnownVersion(NamedTuple):
    """The number of a version and the digest of its manifest, as recorded by the data service or a worker."""

    policy_version: int
    digest: str


class TensorInfo(BaseModel):
    """An entry of the manifest for one tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shape: list[int]
    dtype: str  # as torch prints it, without the prefix: float32, bfloat16
    digest: str  # of its bytes; see tree_digests


class Manifest(BaseModel):
    """The tensors of a weight set, with their digests."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy_version: int
    size_bytes: int  # of all tensors
    tensors: dict[str, TensorInfo]
    lora: LoraConfig | None = None  # settings of the adapters; None for a set of full weights

    def text(self) -> str:
        """Return the text of the file, without the key `lora` if there are no adapters."""
        return self.model_dump_json(indent=1, exclude_none=True)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the version at `path`. Raises WeightsError if it is absent or invalid."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > _LARGEST_MANIFEST_BYTES:
            raise WeightsError(f"{file} is too large for a manifest")
        text = file.read_bytes()
    except OSError as error:
        fix = cure_of(error, "removed or never complete")
        raise WeightsError(f"{file}: {error.strerror}; {fix}") from None
    except ValueError as error:  # no file can have this path, for example with a null byte
        raise WeightsError(f"{str(file)!r} is no path: {error}") from None
    return parse_manifest(text, str(file))


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Return the manifest in the text of a file or message. Raises WeightsError."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "JSON"
        raise WeightsError(f"{where} is no manifest ({place}: {first['msg']})") from None


def check_announced(path: Path, policy_version: int, digest: str) -> Manifest:
    """Return the manifest of the set at `path`, which must be the announced version.

    Raises WeightsError for another version, and for another digest; an empty `digest` is not compared.
    """
    manifest = read_manifest(path)
    check_is_announced(path, manifest, policy_version, digest)
    return manifest


def check_is_announced(path: Path, manifest: Manifest, policy_version: int, digest: str) -> None:
    """Raise WeightsError unless a manifest that was read or received is the one that was announced."""
    if manifest.policy_version != policy_version:
        raise WeightsError(f"{path} is v{manifest.policy_version}, announced was v{policy_version}")
    if digest and published(path, manifest).digest != digest:
        raise WeightsError(f"{path / MANIFEST} is not the one announced: the digest differs")


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise WeightsError unless the file holds, byte for byte, the tensors of the manifest."""
    file = path / WEIGHTS
    layout = read_layout(file)
    in_file = {name: (list(at.shape), at.dtype) for name, at in layout.entries.items()}
    listed = {name: (info.shape, info.dtype) for name, info in manifest.tensors.items()}
    if in_file != listed or layout.size_bytes != manifest.size_bytes:
        raise WeightsError(f"{file} holds other tensors than its manifest lists")
    for name, digest in _file_digests(file, layout).items():
        if digest != manifest.tensors[name].digest:
            raise WeightsError(f"{file} does not match its manifest: the digest differs")


def check_adapters(path: Path, lora: LoraConfig | None) -> None:
    """Raise WeightsError if the version at `path` has adapters with other settings than `lora`."""
    manifest = read_manifest(path)
    if manifest.lora is not None and (problem := adapter_change(manifest.lora, lora)):
        raise WeightsError(
            f"{path}: {problem} when it was published; set it to the trainer's value"
        )


def path_of(directory: Path, policy_version: int) -> Path:
    """Return the path of a version, whether it exists or not. Raises WeightsError for a negative number."""
    if policy_version < 0:
        raise WeightsError(f"policy version {policy_version} cannot be published")
    return directory / f"v{policy_version:06d}"


def published(path: Path, manifest: Manifest) -> Published:
    """Return the version at `path` with the digest of its manifest, as it is announced to workers."""
    values = manifest.model_dump(exclude_none=True)
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return Published(manifest.policy_version, path, digest, manifest.size_bytes)


def versions(directory: Path) -> list[int]:
    """Return the numbers of the versions in `directory`, oldest first; none if it cannot be read."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))


def newest_version(directory: Path, announced: Mapping[int, str] | None = None) -> Published | None:
    """Return the newest version in `directory` whose tensors are there; None if there is none.

    With `announced` (version -> digest) only these versions are considered.
    """
    for version in reversed(versions(directory)):
        path = path_of(directory, version)
        try:
            manifest = read_manifest(path)
        except WeightsError:  # it was removed after it was listed, or is no weight set
            continue
        if not (path / WEIGHTS).is_file():  # False for a link into shared memory that was freed
            continue
        candidate = published(path, manifest)
        if announced is None or announced.get(version) == candidate.digest:
            return candidate
    return None


def digest_of(file: Path) -> str:
    """Return the BLAKE2b of a file, as hexadecimal digits."""
    digest = hashlib.blake2b()
    with file.open("rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def tree_digests(
    sizes: dict[str, int], read: Callable[[str, int, int], bytes | memoryview]
) -> dict[str, str]:
    """Return name -> digest, for names whose bytes have these `sizes`, as hexadecimal digits.

    A digest is the BLAKE2b of the BLAKE2b of each `LEAF_BYTES` of the bytes. `read(name, begin, end)` returns
    a part of them; it is called from several threads, so that a set is read on several cores.
    """
    pieces = [
        (name, begin, min(begin + LEAF_BYTES, size))
        for name, size in sizes.items()
        for begin in range(0, size, LEAF_BYTES)
    ]

    def leaf(piece: tuple[str, int, int]) -> bytes:
        return hashlib.blake2b(read(*piece), digest_size=_DIGEST_BYTES).digest()

    leaves: dict[str, list[bytes]] = {name: [] for name in sizes}
    leaf_digests = on_cores(leaf, pieces, most=sum(sizes.values()) // LEAF_BYTES)
    for (name, _, _), digest in zip(pieces, leaf_digests, strict=True):
        leaves[name].append(digest)
    return {
        name: hashlib.blake2b(b"".join(digests), digest_size=_DIGEST_BYTES).hexdigest()
        for name, digests in leaves.items()
    }


def on_cores(work: Callable[[T], R], items: Sequence[T], most: int) -> list[R]:
    """Return the result of `work` for each item, computed by at most `most` threads.

    This helps if the work releases the interpreter's lock.
    """
    count = min(most, MOST_THREADS, os.cpu_count() or 1)
    if count < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count, "weights") as threads:
        return list(threads.map(work, items))


def _file_digests(file: Path, layout: Layout) -> dict[str, str]:
    """Return the digest of each tensor in a file. Raises WeightsError if the file is removed meanwhile."""
    offset = len(layout.header)
    try:
        with file.open("rb") as handle:

            def read(name: str, begin: int, end: int) -> bytes:
                at = offset + layout.entries[name].begin
                return os.pread(handle.fileno(), end - begin, at + begin)

            sizes = {name: entry.end - entry.begin for name, entry in layout.entries.items()}
            return tree_digests(sizes, read)
    except OSError as error:
        fix = cure_of(error, "removed while it was read")
        raise WeightsError(f"{file}: {fix} ({error.strerror})") from None


# --- the layout of a file -------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: list[int]
    dtype: str  # as torch prints it, without the prefix: float32, bfloat16


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in a file: bytes [begin, end) after the header."""

    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The layout of a safetensors file: its header as bytes, then `size_bytes` of tensors."""

    header: bytes
    entries: dict[str, TensorEntry]  # in the order of the file
    size_bytes: int


def layout_of(
    tensors: Mapping[str, TensorSpec | TensorInfo], metadata: Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a set.

    `metadata` is added to the metadata that safetensors stores in the header. Raises WeightsError for a
    dtype that the format lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise WeightsError(f"{name} is {tensor.dtype}, which safetensors does not hold")
    order = sorted(tensors, key=lambda name: (-_CODES[tensors[name].dtype][1], name))
    tree: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in order:
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        code, width = _CODES[dtype]
        begin, end = end, end + math.prod(shape) * width
        entries[name] = TensorEntry(shape, dtype, begin, end)
        tree[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return Layout(len(text).to_bytes(8, "little") + text, entries, end)


def read_layout(file: Path) -> Layout:
    """Return the layout of a safetensors file, whose length must match its header. Raises WeightsError."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise WeightsError(
                    f"{file} is no safetensors file: its header is too large; {_FIX}"
                )
            text = handle.read(length)
            size = handle.seek(0, 2)
        tree = json.loads(text)
        entries = {name: _entry(header) for name, header in tree.items() if name != "__metadata__"}
    except OSError as error:
        cause = (
            "removed while it was read, or of a version that was broadcast and not written whole"
        )
        raise WeightsError(f"{file}: {cure_of(error, cause)} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise WeightsError(
            f"{file} is no safetensors file: its header cannot be read; {_FIX}"
        ) from None
    end = 0
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    for entry in entries.values():
        if entry.begin != end:
            raise WeightsError(f"{file} is no safetensors file: its tensors leave gaps; {_FIX}")
        end = entry.end
    if size != 8 + length + end:
        raise WeightsError(f"{file} has {size} bytes, but {8 + length + end} by its header; {_FIX}")
    return Layout(length.to_bytes(8, "little") + text, entries, end)


def ranges(layout: Layout, names: Collection[str], most: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of the bytes of the tensors `names`, in the order of the file.

    Neighbouring tensors are joined; then ranges are cut into pieces of at most `most` bytes.
    """
    joined: list[tuple[int, int]] = []
    for name, entry in layout.entries.items():
        if name not in names or entry.begin == entry.end:
            continue
        if joined and joined[-1][1] == entry.begin:
            joined[-1] = joined[-1][0], entry.end
        else:
            joined.append((entry.begin, entry.end))
    for begin, end in joined:
        for start in range(begin, end, most):
            yield start, min(start + most, end)


def _entry(header: dict[str, object]) -> TensorEntry:
    """Return an entry of a header. Raises ValueError, TypeError or KeyError if it is invalid."""
    dtype = _DTYPES[str(header["dtype"])]
    shape, offsets = header["shape"], header["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    begin, end = offsets
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError
    if end - begin != math.prod(shape) * _CODES[dtype][1]:
        raise ValueError
    return TensorEntry(tuple(shape), dtype, begin, end)
