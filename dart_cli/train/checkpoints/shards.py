"""A flat dict of tensors on any number of ranks, as safetensors files; read on any other number.

    stage          what this rank holds of the tensors, copied to main memory
    write          the copies -> safetensors files, with a digest of each, computed while writing
    SavedTensors   the tensors in such files: names and shapes; `fill` reads into tensors in place

Each rank writes what it holds of a DTensor; of a plain tensor, which all ranks hold alike, rank 0
writes the whole. A file names the place of each of its parts by `saved_offsets` in its header, as
torch.distributed.checkpoint's HuggingFaceStorageWriter does, so its HuggingFaceStorageReader reads
these files, too. We write and read them ourselves because that writer holds each file in memory once
more and knows no digests, and because its ranks exchange their plans as pickles. Which part goes where
is computed by the same library's planners, on each rank alone: the files say all that a plan needs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bus.errors import CheckpointError, WeightsError
from dart_cli.hardware import accelerator
from dart_cli.weights.flat_weights import specs_of
from dart_cli.weights.manifest import layout_of, on_cores, read_layout

FILE_BYTES = 1 << 30
"""A file takes no more tensors once it has so many bytes: files are written and checked side by side."""
MOST_WRITERS = 4
"""Files of one rank that are written at once."""
BLOCK_BYTES = 1 << 28
"""Of main memory that parts are copied to: the least limit of a block that is tried."""
_ALIGNED = 64
_PIECE_BYTES = 8 << 20
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of the header's metadata: JSON, name -> {"saved_offsets": [one for each axis]}."""

State = Mapping[str, torch.Tensor]
"""Name -> tensor; some may be DTensors."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of one tensor, in main memory."""

    name: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    tensor: torch.Tensor


class Staging:
    """The buffers of the parts, used again by each save: pinned memory is slow to allocate.

    Torch takes pinned memory in powers of two: parts one by one would take up to twice their bytes
    (174 GB for the 91 GB of a 7B), so they share blocks.
    """

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, bool]] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def buffers(self, held: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return main memory for tensors like those of `held`: that of the last save, if they are alike."""
        kinds = {
            name: (each.shape, each.dtype, accelerator.is_gpu(each.device))
            for name, each in held.items()
        }
        if kinds != self._kinds:
            self._kinds, self._buffers = {}, {}  # freed before the next are allocated
            for pinned in (False, True):
                sizes = {
                    name: each.nbytes
                    for name, each in held.items()
                    if accelerator.is_gpu(each.device) == pinned
                }
                for size, places in blocks(sizes):
                    used = max(end for _, end in places.values())
                    block = accelerator.host_bytes(size if pinned else used, pinned=pinned)
                    for name, (begin, end) in places.items():
                        flat = block[begin:end].view(held[name].dtype)
                        self._buffers[name] = flat.view(held[name].shape)
            self._kinds = kinds
        return self._buffers


def blocks(sizes: Mapping[str, int]) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """Which of some `sizes` in bytes share a block: its bytes, a power of two, and [begin, end) of each.

    Of some limits of a block's bytes, the one with which all blocks together take least.
    """
    least = max([BLOCK_BYTES, *(_power_of_two(size) for size in sizes.values())])
    tried = (_packed(sizes, least << more) for more in range(5))
    return min(tried, key=lambda found: sum(size for size, _ in found))


def _packed(sizes: Mapping[str, int], most: int) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """`blocks` of at most `most` bytes: largest first, each into the first block that has room."""
    found: list[dict[str, tuple[int, int]]] = []
    used: list[int] = []
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        size = -(-sizes[name] // _ALIGNED) * _ALIGNED
        index = next((i for i, end in enumerate(used) if end + size <= most), len(used))
        if index == len(used):
            found.append({})
            used.append(0)
        found[index][name] = used[index], used[index] + sizes[name]
        used[index] += size
    return [(_power_of_two(end), places) for end, places in zip(used, found, strict=True)]


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@torch.no_grad()
def stage(tensors: State, staging: Staging, *, rank: int = 0) -> list[Part]:
    """Return copies of what this rank holds. The tensors may change once this returns."""
    held = list(_held(tensors, rank))
    buffers = staging.buffers({name: tensor for name, _, tensor in held})
    parts = [
        Part(name, offsets, buffers[name].copy_(tensor, non_blocking=True))
        for name, offsets, tensor in held
    ]
    if accelerator.is_in_use():
        accelerator.synchronize()
    return parts


def write(
    directory: Path, parts: Sequence[Part], *, rank: int = 0, file_bytes: int = FILE_BYTES
) -> dict[str, str]:
    """Write the parts, synced to disk; file name -> its BLAKE2b. Raises OSError."""
    files = {
        f"r{rank:03d}-{number:03d}.safetensors": group
        for number, group in enumerate(_grouped(parts, file_bytes))
    }
    digests = on_cores(
        lambda name: _write_file(directory / name, files[name]), list(files), most=MOST_WRITERS
    )
    return dict(zip(files, digests, strict=True))


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor, in a file."""

    file: Path
    name: str  # in the file
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Saved:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class SavedTensors:
    """The tensors in some files. Reads no values before `fill` or `whole`."""

    def __init__(self, saved: Mapping[str, _Saved]) -> None:
        self._saved = dict(saved)

    @classmethod
    def of_files(cls, files: Sequence[Path]) -> SavedTensors:
        """Those in the files; together these must hold each tensor whole. Raises CheckpointError."""
        found: dict[str, list[tuple[torch.dtype, _Chunk]]] = {}
        for file in files:
            for dtype, chunk in _chunks(file):
                found.setdefault(chunk.name, []).append((dtype, chunk))
        return cls({name: _joined(name, chunks) for name, chunks in found.items()})

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._saved)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of them."""
        return self._saved[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of one of them."""
        return self._saved[name].dtype

    def only(self, names: Iterable[str]) -> SavedTensors:
        """Those of these names."""
        return SavedTensors({name: self._saved[name] for name in names})

    @torch.no_grad()
    def fill(self, targets: State) -> None:
        """Read into `targets`, each whole or, of a DTensor, what this rank holds of it.

        Values are converted to the targets' dtypes. Raises ValueError for a name that is not here and
        for another shape, before a target has changed; CheckpointError if a file cannot be read.
        """
        for name, target in targets.items():
            if name not in self._saved:
                raise ValueError(f"it holds no {name}")
            if tuple(target.shape) != self.shape(name):
                raise ValueError(
                    f"its {name} is {list(self.shape(name))}, the model's {list(target.shape)}"
                )
        reads: dict[Path, list[tuple[_Chunk, tuple[slice, ...], torch.Tensor]]] = {}
        for chunk, where, target in self._reads(targets):
            reads.setdefault(chunk.file, []).append((chunk, where, target))
        for file, wanted in reads.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    for chunk, where, target in wanted:
                        value = (
                            opened.get_slice(chunk.name)[where]
                            if where
                            else opened.get_tensor(chunk.name)
                        )
                        target.copy_(value)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from None

    def whole(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own. Raises as `fill` does."""
        target = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill({name: target})
        return target

    def _reads(self, targets: State) -> Iterator[tuple[_Chunk, tuple[slice, ...], torch.Tensor]]:
        """(part, what of it, the piece of a target that it belongs in), for all that is needed."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        described: dict[str, Any] = {}
        places: dict[MetadataIndex, _Chunk] = {}
        for name in targets:
            saved = self._saved[name]
            chunks = [each for each in saved.chunks if math.prod(each.sizes)]
            places |= {MetadataIndex(name, torch.Size(each.offsets)): each for each in chunks}
            described[name] = TensorStorageMetadata(
                TensorProperties(saved.dtype),
                torch.Size(saved.shape),
                [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks],
            )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), Metadata(described), is_coordinator=True)
        for item in planner.create_local_plan().items:
            where = tuple(
                slice(begin, begin + length)
                for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            yield places[item.storage_index], where, target


def _held(tensors: State, rank: int) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """(name, offsets, tensor) of what this rank writes."""
    sharded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if _is_sharded(tensor):
            if not _is_a_copy(tensor):
                sharded[name] = tensor
        elif rank == 0:
            yield name, (0,) * tensor.ndim, tensor.detach()
    if not sharded:
        return
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(sharded, None, is_coordinator=rank == 0)
    for item in planner.create_local_plan().items:
        part = planner.resolve_data(item)
        assert isinstance(part, torch.Tensor)
        assert item.tensor_data is not None
        yield item.index.fqn, tuple(item.tensor_data.chunk.offsets), part


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; loads torch.distributed only where something else has."""
    return hasattr(tensor, "device_mesh")


def _is_a_copy(tensor: Any) -> bool:
    """Whether another rank holds the same part of the DTensor, and writes it."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is None or any(
        placement.is_replicate() and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


def _grouped(parts: Sequence[Part], file_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts of each file: at least one file, so that each rank has something to show."""
    group: list[Part] = []
    size = 0
    for part in parts:
        if group and size >= file_bytes:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.tensor.numel() * part.tensor.element_size()
    yield group


def _write_file(file: Path, parts: Sequence[Part]) -> str:
    """Write one file; its digest."""
    tensors = {part.name: part.tensor for part in parts}
    offsets = {part.name: {"saved_offsets": list(part.offsets)} for part in parts}
    layout = layout_of(specs_of(tensors), {_OFFSETS: json.dumps(offsets, sort_keys=True)})
    digest = blake2b(layout.header)
    with file.open("xb") as handle:
        handle.write(layout.header)
        for name in layout.entries:
            data = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                digest.update(piece)
                handle.write(piece)
        handle.flush()
        os.fsync(handle.fileno())
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[tuple[torch.dtype, _Chunk]]:
    """Yield the parts in a file, with their dtypes. Raises CheckpointError."""
    try:
        layout = read_layout(file)
        metadata = json.loads(layout.header[8:]).get("__metadata__", {})
        offsets = json.loads(metadata.get(_OFFSETS, "{}"))
        for name, entry in layout.entries.items():
            default = {"saved_offsets": [0] * len(entry.shape)}
            begin = tuple(int(each) for each in offsets.get(name, default)["saved_offsets"])
            if len(begin) != len(entry.shape) or min(begin, default=0) < 0:
                raise CheckpointError(f"{file}: {name} has no valid place")
            yield getattr(torch, entry.dtype), _Chunk(file, name, begin, entry.shape)
    except WeightsError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{file}: the places of its tensors cannot be read") from None


def _joined(name: str, found: Sequence[tuple[torch.dtype, _Chunk]]) -> _Saved:
    """One tensor from its parts, which must cover it once. Raises CheckpointError."""
    chunks = [chunk for _, chunk in found]
    ends = [
        [begin + size for begin, size in zip(each.offsets, each.sizes, strict=True)]
        for each in chunks
    ]
    if len({dtype for dtype, _ in found}) > 1 or len({len(end) for end in ends}) > 1:
        raise CheckpointError(f"the parts of {name} are of several tensors")
    shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    if sum(math.prod(each.sizes) for each in chunks) != math.prod(shape):
        raise CheckpointError(f"the files hold only parts of {name}")
    return _Saved(found[0][0], shape, tuple(chunks))
