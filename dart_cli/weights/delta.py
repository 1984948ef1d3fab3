"""What changed between two versions of a weight set, bit for bit.

    Delta     delta.json: from which version to which, and where its patches are in delta.bin
    write     the difference of two sets -> DIRECTORY/{delta.json, delta.bin}
    read      a version's delta.json, checked
    apply     old set + delta -> new set, in place

The bits of each value are read as an integer: an update moves a weight by a few units in the last
place, so the difference of the integers is small where the difference of the floats is not (in
bfloat16, at the learning rates of RL, most differences are 0). Each block of `BLOCK` values becomes a
patch of differences in zigzag order (0, -1, 1, -2, ...). Where fewer than one value in `SPARSE`
changed, the patch holds the changed values alone and the gaps between them, otherwise all values.
Both are split into byte planes, the lowest bytes first; planes of zeros at the top are left out, and
each other plane is deflated by run lengths and Huffman codes where that makes it smaller.
docs/weights.md has the sizes against XOR, plain deflate and index-value pairs.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import WeightsError
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.layout import CODES, Layout
from dart_cli.weights.manifest import digest_of, on_cores

DELTA = "delta.json"
PATCHES = "delta.bin"
BLOCK = 1 << 20
"""Most values of a patch."""
SPARSE = 4
"""Where fewer than one value in so many changed, the patch holds changes and their positions."""
_SAMPLE_BYTES = 1 << 16
_WORTH = 0.97
"""If deflating the first bytes of a plane leaves more than this share, it is stored as it is: noise."""

PackedCount = Field(ge=0)
Words = NDArray[Any]  # unsigned integers, one for each value


class Plane(BaseModel):
    """One byte of each of `values` integers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int = PackedCount  # bytes in delta.bin
    deflated: bool


class Patch(BaseModel):
    """What changed in the values [begin, end) of the set's words of `width` bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int  # bytes of a value
    begin: int = PackedCount  # byte in the set at which the block begins
    values: int = Field(ge=1, le=BLOCK)
    changed: int = Field(ge=1, le=BLOCK)
    gaps: list[Plane]  # unchanged values before each change; empty if the patch holds all values
    differences: list[Plane]


class Delta(BaseModel):
    """What leads from one version to the next."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    base_version: int
    base_digest: str  # of the base's manifest, as it was announced
    policy_version: int
    size_bytes: int = PackedCount  # of delta.bin
    digest: str  # BLAKE2b of delta.bin, hex
    changed: int = PackedCount  # values
    values: int = PackedCount  # of the whole set
    patches: list[Patch]


def write(
    directory: Path, base: tuple[int, str], version: int, old: FlatWeights, new: FlatWeights
) -> Delta:
    """Write the delta from `old`, whose version and digest are `base`, to `new`.

    Both have the same layout. Raises OSError.
    """
    patches: list[Patch] = []
    digest = hashlib.blake2b()
    before, after = _bytes(old), _bytes(new)
    blocks = list(_blocks(new.layout))
    made = on_cores(lambda block: _encode(before, after, *block), blocks, most=len(blocks))
    with (directory / PATCHES).open("wb") as file:
        for patch, chunks in filter(None, made):
            patches.append(patch)
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        size = file.tell()
    delta = Delta(
        base_version=base[0],
        base_digest=base[1],
        policy_version=version,
        size_bytes=size,
        digest=digest.hexdigest(),
        changed=sum(patch.changed for patch in patches),
        values=sum(values for _, _, values in blocks),
        patches=patches,
    )
    (directory / DELTA).write_text(delta.model_dump_json(), encoding="utf-8")
    return delta


def read(path: Path) -> Delta:
    """The delta of the version at `path`. Raises WeightsError if it is absent or no delta."""
    file = path / DELTA
    try:
        return Delta.model_validate_json(file.read_bytes())
    except OSError as error:
        raise WeightsError(f"{file}: {error.strerror}; removed or never complete") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise WeightsError(f"{file} is no delta ({where}: {first['msg']})") from None


def apply(path: Path, delta: Delta, target: FlatWeights) -> None:
    """Make `target`, which is the delta's base, what the version at `path` is.

    Raises WeightsError if the patches are damaged; `target` may then hold a part of them. The digest
    of delta.bin is checked first; the caller checks the result by its digests.
    """
    file = path / PATCHES
    data = _bytes(target)
    try:
        if digest_of(file) != delta.digest:
            raise WeightsError(f"{file} does not match {DELTA}: the digest differs")
        with file.open("rb") as handle:
            for patch in delta.patches:
                size = sum(plane.size for plane in (*patch.gaps, *patch.differences))
                _decode(data, patch, handle.read(size))
    except OSError as error:
        raise WeightsError(f"{file}: removed while it was read ({error.strerror})") from None
    except (ValueError, IndexError, zlib.error) as error:
        raise WeightsError(f"{file} does not fit v{delta.base_version}: {error}") from None


# --- a block --------------------------------------------------------------------------------


def _blocks(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(width, first byte, values) of blocks of values of one width, across tensors."""
    regions: dict[int, tuple[int, int]] = {}
    for entry in layout.entries.values():  # those of one width are neighbours
        width = CODES[entry.dtype][1]
        regions[width] = regions.get(width, (entry.begin, 0))[0], entry.end
    for width, (begin, end) in regions.items():
        for at in range(begin, end, BLOCK * width):
            yield width, at, (min(at + BLOCK * width, end) - at) // width


def _encode(
    before: NDArray[np.uint8], after: NDArray[np.uint8], width: int, begin: int, values: int
) -> tuple[Patch, list[bytes]] | None:
    """The patch of a block, and the bytes of its planes; None where nothing changed."""
    old, new = (_words(data, width, begin, values) for data in (before, after))
    (changed,) = np.nonzero(old != new)
    if not len(changed):
        return None
    gaps: list[tuple[Plane, bytes]] = []
    if SPARSE * len(changed) < values:
        gaps = list(_planes((np.diff(changed, prepend=-1) - 1).astype(np.uint32)))
        old, new = old[changed], new[changed]
    differences = list(_planes(_zigzag(new - old)))
    patch = Patch(
        width=width,
        begin=begin,
        values=values,
        changed=len(changed),
        gaps=[plane for plane, _ in gaps],
        differences=[plane for plane, _ in differences],
    )
    return patch, [chunk for _, chunk in (*gaps, *differences)]


def _decode(data: NDArray[np.uint8], patch: Patch, chunk: bytes) -> None:
    """Apply a patch to its block. Raises ValueError, IndexError, zlib.error."""
    if patch.begin + patch.values * patch.width > len(data) or patch.begin % patch.width:
        raise ValueError("a patch lies outside of the set")
    words = _words(data, patch.width, patch.begin, patch.values)
    stored = patch.changed if patch.gaps else patch.values
    gaps, rest = _joined(patch.gaps, chunk, stored, np.dtype(np.uint32))
    steps, rest = _joined(patch.differences, rest, stored, words.dtype)
    if rest:
        raise ValueError("a patch is longer than its planes")
    if patch.gaps:
        words[np.cumsum(gaps.astype(np.int64) + 1) - 1] += _unzigzag(steps)
    else:
        words += _unzigzag(steps)


def _planes(words: Words) -> Iterator[tuple[Plane, bytes]]:
    """The bytes of unsigned integers, lowest first, without those that are 0 in all; at least one."""
    # Little-endian, as every supported machine is.
    columns = words.view(np.uint8).reshape(-1, words.itemsize)
    used = max(1, (int(words.max()).bit_length() + 7) // 8)
    for column in range(used):
        plain = columns[:, column].tobytes()
        packed = plain
        if _deflated(plain[:_SAMPLE_BYTES], _WORTH) is not None:
            packed = _deflated(plain, 1.0) or plain
        yield Plane(size=len(packed), deflated=packed is not plain), packed


def _joined(
    planes: list[Plane], chunk: bytes, values: int, dtype: np.dtype[Any]
) -> tuple[Words, bytes]:
    """The integers that `planes` at the head of `chunk` hold, and what follows them."""
    columns = np.zeros((values, dtype.itemsize), np.uint8)
    for column, plane in enumerate(planes):
        stored, chunk = chunk[: plane.size], chunk[plane.size :]
        plain = zlib.decompressobj().decompress(stored, values) if plane.deflated else stored
        if len(plain) != values:
            raise ValueError("a plane is too short")
        columns[:, column] = np.frombuffer(plain, np.uint8)
    return columns.reshape(-1).view(dtype), chunk


def _deflated(plain: bytes, worth: float) -> bytes | None:
    """Deflated, if that leaves less than the share `worth`."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    packed = deflate.compress(plain) + deflate.flush()
    return packed if len(packed) < worth * len(plain) else None


def _zigzag(words: Words) -> Words:
    """Unsigned differences -> 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    signed = words.view(f"i{words.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * words.itemsize - 1))).view(words.dtype)


def _unzigzag(words: Words) -> Words:
    return (words >> 1) ^ (0 - (words & 1))


def _words(data: NDArray[np.uint8], width: int, begin: int, values: int) -> Words:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"values of {width} bytes")
    return data[begin : begin + values * width].view(f"u{width}")


def _bytes(flat: FlatWeights) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = flat.data.numpy()
    return found
