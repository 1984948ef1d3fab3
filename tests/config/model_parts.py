"""Small model folders: everything that a check reads is in them, their weights are all 0."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

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
    width = {"F32": 4, "BF16": 2}[dtype]
    return {
        name: (dtype, shape, bytes(width * prod(shape)))
        for name, shape in _shapes(json.dumps(config)).items()
    }


@cache
def _shapes(config: str) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        write_json(Path(folder), "config.json", json.loads(config))
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def write_tensors(path: Path, tensors: Mapping[str, Entry]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
