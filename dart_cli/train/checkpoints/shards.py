"""A flat dict of tensors on any number of ranks, as safetensors files; read on any other number.

    stage          copies the parts of the tensors that this rank holds to main memory
    write          writes the copies as safetensors files, and computes their digests while writing
    SavedTensors   the tensors in such files: names and shapes; `fill` reads into tensors in place

Each rank writes its part of a DTensor. A plain tensor is the same on all ranks, and rank 0 writes it.
A file has the place of each of its parts as `saved_offsets` in its header, like the files of
torch.distributed.checkpoint's HuggingFaceStorageWriter, so its HuggingFaceStorageReader can read
these files too. We write and read them ourselves because that writer holds each file in memory once
more and has no digests, and because its ranks exchange their plans as pickles. The same library's planners
compute which part goes where, on each rank alone: the headers of the files have all that a plan needs.
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
"""A file gets no more tensors once it has so many bytes, so that files are written and checked in
parallel."""
MOST_WRITERS = 4
"""Most files of one rank that are written at once."""
BLOCK_BYTES = 1 << 28
"""The smallest limit that is tried for the bytes of a block of main memory."""
_ALIGNED = 64
_PIECE_BYTES = 8 << 20
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of the header's metadata: JSON, name -> {"saved_offsets": [one for each axis]}."""

State = Mapping[str, torch.Tensor]
"""Name -> tensor; some may be DTensors."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank holds, in main memory."""

    name: str
    offsets: tuple[int, ...]  # place of its first element in the whole tensor
    tensor: torch.Tensor


class Staging:
    """The buffers of the parts. Each save uses them again, since pinned memory is slow to allocate.

    Torch allocates pinned memory in powers of two. Buffers for single parts would take up to twice their
    bytes (174 GB for the 91 GB of a 7B), so parts share blocks.
    """

    def __init__(self) -> None:
        """Begin without a buffer; `buffers` allocates them."""
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, bool]] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def buffers(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return buffers in main memory for `parts`.

        These are the buffers of the last save, if shapes and types are the same.
        """
        kinds = {
            name: (part.shape, part.dtype, accelerator.is_gpu(part.device))
            for name, part in parts.items()
        }
        if kinds != self._kinds:
            self._kinds, self._buffers = {}, {}  # freed before the next are allocated
            for pinned in (False, True):
                sizes = {
                    name: part.nbytes
                    for name, part in parts.items()
                    if accelerator.is_gpu(part.device) == pinned
                }
                for size, places in blocks(sizes):
                    used = max(end for _, end in places.values())
                    block = accelerator.host_bytes(size if pinned else used, pinned=pinned)
                    for name, (begin, end) in places.items():
                        flat = block[begin:end].view(parts[name].dtype)
                        self._buffers[name] = flat.view(parts[name].shape)
            self._kinds = kinds
        return self._buffers


def blocks(sizes: Mapping[str, int]) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """Divide parts of `sizes` in bytes into blocks; return the bytes of each and [begin, end) of its parts.

    The bytes of a block are a power of two. Several limits for them are tried, and the division with the
    fewest bytes in total is returned.
    """
    least = max([BLOCK_BYTES, *(_power_of_two(size) for size in sizes.values())])
    divisions = (_first_fit(sizes, least << more) for more in range(5))
    return min(divisions, key=lambda division: sum(size for size, _ in division))


def _first_fit(sizes: Mapping[str, int], most: int) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """Return blocks of at most `most` bytes: the largest part first, each in the first block with space."""
    divided: list[dict[str, tuple[int, int]]] = []
    used: list[int] = []
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        size = -(-sizes[name] // _ALIGNED) * _ALIGNED
        index = next((i for i, end in enumerate(used) if end + size <= most), len(used))
        if index == len(used):
            divided.append({})
            used.append(0)
        divided[index][name] = used[index], used[index] + sizes[name]
        used[index] += size
    return [(_power_of_two(end), places) for end, places in zip(used, divided, strict=True)]


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@torch.no_grad()
def stage(tensors: State, staging: Staging, *, rank: int = 0) -> list[Part]:
    """Return copies of the parts that this rank writes. The tensors may change once this returns."""
    own_parts = list(_parts_of_rank(tensors, rank))
    buffers = staging.buffers({name: tensor for name, _, tensor in own_parts})
    parts = [
        Part(name, offsets, buffers[name].copy_(tensor, non_blocking=True))
        for name, offsets, tensor in own_parts
    ]
    if accelerator.is_in_use():
        accelerator.synchronize()
    return parts


def write(
    directory: Path, parts: Sequence[Part], *, rank: int = 0, file_bytes: int = FILE_BYTES
) -> dict[str, str]:
    """Write the parts, synced to disk; return the BLAKE2b of each file by its name. Raises OSError."""
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
class _SavedTensor:
    """A tensor in files, as the list of its parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class SavedTensors:
    """The tensors in some files. Only `fill` and `whole` read their values."""

    def __init__(self, saved: Mapping[str, _SavedTensor]) -> None:
        self._saved = dict(saved)

    @classmethod
    def of_files(cls, files: Sequence[Path]) -> SavedTensors:
        """Return the tensors in the files, which together must hold each tensor whole.

        Raises CheckpointError.
        """
        by_name: dict[str, list[tuple[torch.dtype, _Chunk]]] = {}
        for file in files:
            for dtype, chunk in _chunks(file):
                by_name.setdefault(chunk.name, []).append((dtype, chunk))
        return cls({name: _join(name, chunks) for name, chunks in by_name.items()})

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._saved)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._saved[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self._saved[name].dtype

    def only(self, names: Iterable[str]) -> SavedTensors:
        """Return the tensors with these names."""
        return SavedTensors({name: self._saved[name] for name in names})

    @torch.no_grad()
    def fill(self, targets: State) -> None:
        """Read the saved values into `targets`; into a DTensor only the part that this rank holds.

        Values are converted to the targets' dtypes. Raises ValueError if a name is missing or a shape
        differs, before a target has changed, and CheckpointError if a file cannot be read.
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
        for file, of_file in reads.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    for chunk, where, target in of_file:
                        value = (
                            opened.get_slice(chunk.name)[where]
                            if where
                            else opened.get_tensor(chunk.name)
                        )
                        target.copy_(value)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from None

    def whole(self, name: str) -> torch.Tensor:
        """Return one tensor, read into new memory. Raises as `fill` does."""
        target = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill({name: target})
        return target

    def _reads(self, targets: State) -> Iterator[tuple[_Chunk, tuple[slice, ...], torch.Tensor]]:
        """Yield (chunk, slices of it, the piece of a target that they fill) until all targets are filled."""
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
            chunks = [chunk for chunk in saved.chunks if math.prod(chunk.sizes)]
            places |= {MetadataIndex(name, torch.Size(chunk.offsets)): chunk for chunk in chunks}
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


def _parts_of_rank(
    tensors: State, rank: int
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Yield (name, offsets, tensor) of each part that this rank writes."""
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
    """Return True for a DTensor. Unlike isinstance, this does not import torch.distributed."""
    return hasattr(tensor, "device_mesh")


def _is_a_copy(tensor: Any) -> bool:
    """Return True if another rank holds the same part of a DTensor and writes it."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is None or any(
        placement.is_replicate() and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


def _grouped(parts: Sequence[Part], file_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts of each file. There is at least one file, so that each rank has a digest to report."""
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
    """Write one file and return its digest."""
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
    """Yield the chunks in a file, with their dtypes. Raises CheckpointError."""
    try:
        layout = read_layout(file)
        metadata = json.loads(layout.header[8:]).get("__metadata__", {})
        offsets = json.loads(metadata.get(_OFFSETS, "{}"))
        for name, entry in layout.entries.items():
            default = {"saved_offsets": [0] * len(entry.shape)}
            begin = tuple(int(offset) for offset in offsets.get(name, default)["saved_offsets"])
            if len(begin) != len(entry.shape) or min(begin, default=0) < 0:
                raise CheckpointError(f"{file}: {name} has no valid place")
            yield getattr(torch, entry.dtype), _Chunk(file, name, begin, entry.shape)
    except WeightsError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{file}: the places of its tensors cannot be read") from None


def _join(name: str, typed_chunks: Sequence[tuple[torch.dtype, _Chunk]]) -> _SavedTensor:
    """Return the tensor `name`, which the chunks must cover once. Raises CheckpointError if they do not."""
    chunks = [chunk for _, chunk in typed_chunks]
    ends = [
        [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in chunks
    ]
    if len({dtype for dtype, _ in typed_chunks}) > 1 or len({len(end) for end in ends}) > 1:
        raise CheckpointError(f"the parts of {name} are of several tensors")
    shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise CheckpointError(f"the files hold only parts of {name}")
    return _SavedTensor(typed_chunks[0][0], shape, tuple(chunks))
