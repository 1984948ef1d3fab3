"""The offset of each tensor of a weight set in a safetensors file; without torch.

    Layout       the header of such a file, and the bytes of each tensor behind it
    layout_of    the layout that we write: the widest types first, then by name, without gaps
    read_layout  the layout of a file, checked against its length
    ranges       the bytes of some tensors, neighbours joined, in pieces of a bounded size

A file, the trainer's copy of its newest version and a worker's copy of what it serves have the
same layout, so sets are sent between them as plain ranges of bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bus.errors import WeightsError

CODES = {
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
_NAMES = {code: name for name, (code, _) in CODES.items()}
_LARGEST_HEADER_BYTES = 64 << 20
_CURE = "copy it again, or use another version"


class ShapeAndType(Protocol):
    """What a layout needs of a tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Its axes."""
        ...

    @property
    def dtype(self) -> str:
        """As torch prints it, without the prefix."""
        ...


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: bytes [begin, end) behind the header."""

    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """A safetensors file: its header as bytes, then `size_bytes` of tensors."""

    header: bytes
    entries: dict[str, TensorEntry]  # in the order of the file
    size_bytes: int


def layout_of(
    tensors: Mapping[str, ShapeAndType], metadata: Mapping[str, str] | None = None
) -> Layout:
    """The layout of a set. `metadata` joins the header's own, which safetensors keeps as text.

    Raises WeightsError for a dtype that the format lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise WeightsError(f"{name} is {tensor.dtype}, which safetensors does not hold")
    order = sorted(tensors, key=lambda name: (-CODES[tensors[name].dtype][1], name))
    tree: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in order:
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        code, width = CODES[dtype]
        begin, end = end, end + math.prod(shape) * width
        entries[name] = TensorEntry(shape, dtype, begin, end)
        tree[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return Layout(len(text).to_bytes(8, "little") + text, entries, end)


def read_layout(file: Path) -> Layout:
    """The layout of a safetensors file, whose length must match its header. Raises WeightsError."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise WeightsError(
                    f"{file} is no safetensors file: its header is too large; {_CURE}"
                )
            text = handle.read(length)
            size = handle.seek(0, 2)
        tree = json.loads(text)
        entries = {name: _entry(header) for name, header in tree.items() if name != "__metadata__"}
    except OSError as error:
        raise WeightsError(f"{file}: removed while it was read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise WeightsError(
            f"{file} is no safetensors file: its header cannot be read; {_CURE}"
        ) from None
    end = 0
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    for entry in entries.values():
        if entry.begin != end:
            raise WeightsError(f"{file} is no safetensors file: its tensors leave gaps; {_CURE}")
        end = entry.end
    if size != 8 + length + end:
        raise WeightsError(
            f"{file} has {size} bytes, but {8 + length + end} by its header; {_CURE}"
        )
    return Layout(length.to_bytes(8, "little") + text, entries, end)


def ranges(layout: Layout, names: Collection[str], most: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of the tensors `names`, in order, neighbours joined, at most `most` bytes each."""
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
    """One entry of a header. Raises ValueError, TypeError, KeyError for an invalid one."""
    dtype = _NAMES[str(header["dtype"])]
    shape, offsets = header["shape"], header["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    begin, end = offsets
    if any(type(each) is not int or each < 0 for each in (*shape, begin, end)):
        raise ValueError
    if end - begin != math.prod(shape) * CODES[dtype][1]:
        raise ValueError
    return TensorEntry(tuple(shape), dtype, begin, end)
