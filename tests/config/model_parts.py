"""Small model folders, written without torch: everything that a check reads is in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from dart_cli.config.architecture import expected_tensors
from scripts.small_models import EMBEDDING_ROWS, FAMILIES

IMAGE = EMBEDDING_ROWS - 1

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def write_model(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """A whole folder of one of FAMILIES, its weights all 0; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**FAMILIES[kind].config, "model_type": kind, "image_token_id": IMAGE}
    write_json(folder, "config.json", config)
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": IMAGE}]}
    write_json(folder, "tokenizer.json", vocabulary)
    write_json(folder, "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    write_json(folder, "preprocessor_config.json", FAMILIES[kind].preprocessor)
    write_tensors(folder / "model.safetensors", zeros(config))
    return folder


def write_json(folder: Path, name: str, tree: Mapping[str, Any]) -> None:
    (folder / name).write_text(json.dumps(tree), encoding="utf-8")


def change_json(folder: Path, name: str, **changes: Any) -> None:
    """Keys of a file, or (None) without them."""
    tree = {**json.loads((folder / name).read_text()), **changes}
    write_json(folder, name, {key: value for key, value in tree.items() if value is not None})


def zeros(config: Mapping[str, Any], dtype: str = "F32") -> dict[str, Entry]:
    """The tensors that a config.json asks for."""
    width = {"F32": 4, "BF16": 2, "I8": 1}[dtype]
    return {
        name: (dtype, shape, bytes(width * prod(shape)))
        for name, shape in expected_tensors(config).items()
    }


def write_tensors(path: Path, tensors: Mapping[str, Entry], **wrong: Mapping[str, Any]) -> None:
    """A safetensors file; `wrong` are entries of its header that are not what they should be."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        place = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        at += len(data)
    for name, changes in wrong.items():
        header[name] = {**header[name], **changes}
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
