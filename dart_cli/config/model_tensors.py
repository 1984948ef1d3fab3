"""The weights of a model folder, as the headers of its safetensors files tell them: no torch, no data.

read_tensors     every tensor of the folder: dtype, shape, place
check_tensors    whether they are those that config.json asks for, in a type that can be trained
parameter_count  how many numbers they hold
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from bus.errors import ModelError
from dart_cli.config.architecture import canonical, expected_tensors
from dart_cli.config.model_files import read_json
from dart_cli.config.pointer_head import ID_KEYS, PREFIX

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""safetensors' names of the types that can be loaded, and their bytes."""
_BYTES = FLOATS | {
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
}
_HEAD_CURE = ": make the folder again with `dart model add-pointer`, of the model without a head"
_LENGTH_BYTES = 8  # a file begins with the length of its JSON header
_MAX_HEADER_BYTES = 100_000_000


class Tensor(NamedTuple):
    """One tensor; its bytes are `file[begin:end]`."""

    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder's weights by their names in the files.

    Raises ModelError for a file that is missing, cut off or broken, and for an index that names a
    tensor which its file does not have.
    """
    if not (folder / INDEX).is_file():
        return _tensors_of(folder / SINGLE)
    index = read_json(folder, INDEX)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(at, str) for at in placed.values()):
        raise ModelError(f"{folder / INDEX} has no weight_map; copy it again")
    shards = {name: _tensors_of(folder / name) for name in sorted(set(placed.values()))}
    for name, shard in placed.items():
        if name not in shards[shard]:
            raise ModelError(
                f"{folder / shard} has no tensor {name}, which {INDEX} names; copy both again"
            )
    return {name: shards[shard][name] for name, shard in placed.items()}


def parameter_count(folder: Path) -> int:
    """Numbers in a folder's weights. Raises ModelError where they cannot be read."""
    return sum(prod(tensor.shape) for tensor in read_tensors(folder).values())


def check_tensors(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError unless the folder's weights are what its config.json asks for.

    Tensors beyond those are not looked at: nothing loads them.
    """
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ModelError(
            f"{folder / 'config.json'} has a quantization_config ({method or 'unnamed'}): quantised "
            "weights cannot be trained; fetch the model's float32, float16 or bfloat16 weights"
        )
    try:
        expected = expected_tensors(config)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}; copy it again") from None
    found = {canonical(name): (name, tensor) for name, tensor in read_tensors(folder).items()}
    missing = [name for name in expected if name not in found]
    if missing and all(name.startswith(PREFIX) for name in missing):
        raise ModelError(
            f"{folder}: config.json tells of a pointer head ({ID_KEYS[0]}), but {len(missing)} of its "
            f"tensors are missing, the first is {missing[0]}; copy every file again, or take the keys "
            "pointer_..._token_id out of config.json"
        )
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of the {len(expected)} tensors that config.json asks for are "
            f"missing, the first is {missing[0]}; the folder is incomplete, or its config.json is "
            "another model's"
        )
    _check_types({name: found[name] for name in expected})
    wrong = [name for name, shape in expected.items() if found[name][1].shape != shape]
    if wrong:
        name, tensor = found[wrong[0]]
        raise ModelError(
            f"{tensor.file}: {name} has the shape {list(tensor.shape)}, config.json asks for "
            f"{list(expected[wrong[0]])}{_others(wrong)}; weights and config.json belong to "
            f"different models{_HEAD_CURE if wrong[0].startswith(PREFIX) else ''}"
        )


def _check_types(used: Mapping[str, tuple[str, Tensor]]) -> None:
    integers = [name for name, (_, tensor) in used.items() if tensor.dtype not in FLOATS]
    if integers:
        name, tensor = used[integers[0]]
        raise ModelError(
            f"{tensor.file}: {name} is {tensor.dtype}{_others(integers)}; only float32, float16 and "
            "bfloat16 weights can be loaded, fetch the model's unquantised weights"
        )


def _others(names: list[str]) -> str:
    return f" ({len(names)} tensors in all)" if len(names) > 1 else ""


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of one file; its header is checked against its size."""
    header, begin, size = _header(path)
    tensors = {
        name: _tensor(path, name, entry, begin)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end = max((tensor.end for tensor in tensors.values()), default=begin)
    if end > size:
        raise ModelError(
            f"{path} is cut off: it has {size} bytes, its header tells of {end}; copy it again"
        )
    if end < size or (ordered and ordered[0][1].begin != begin):
        raise ModelError(f"{path} has bytes of no tensor; copy it again")
    for (before, one), (name, other) in pairwise(ordered):
        if other.begin != one.end:
            what = "overlaps" if other.begin < one.end else "does not follow"
            raise ModelError(f"{path} is broken: {name} {what} {before}; copy it again")
    return tensors


def _tensor(path: Path, name: str, entry: Any, begin: int) -> Tensor:
    """One entry of a header; offsets count from `begin`, where the header ends."""
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, last = entry["data_offsets"]
        whole = all(type(each) is int and each >= 0 for each in (*shape, first, last))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or last < first:
        raise ModelError(f"{path} is broken: its header has no place or shape for {name[:80]!r}")
    if dtype in _BYTES and last - first != prod(shape) * _BYTES[dtype]:
        raise ModelError(
            f"{path} is broken: {name} has {last - first} bytes, {dtype} {list(shape)} takes "
            f"{prod(shape) * _BYTES[dtype]}; copy it again"
        )
    return Tensor(dtype, shape, path, begin + first, begin + last)


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where it ends, size of the file), in bytes."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        size = path.stat().st_size
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; only safetensors weights can be loaded, copy every file of them"
        ) from None
    except (OSError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ModelError(
            f"{path} is no safetensors file; fetch it again (a git clone without LFS leaves pointers)"
        )
    return header, _LENGTH_BYTES + length, size
