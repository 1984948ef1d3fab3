"""The identity of a model folder, independent of its path. Every byte is read, without torch.

model_identity  a digest of the folder's tensors
folder_digest   a digest of everything in the folder on which the model's answers depend
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from bus.errors import ModelError
from dart_cli.config.adapters import ADAPTER_TENSORS
from dart_cli.config.model_folder import (
    PREPROCESSOR,
    PROCESSOR,
    TEMPLATE,
    TOKENIZER,
    VERIFIER,
    model_folder,
    weight_files,
)
from dart_cli.weights.manifest import tree_digests

_SMALL = (
    "config.json",
    "generation_config.json",  # tokens that end a completion
    TOKENIZER,
    "tokenizer_config.json",  # the chat template of most folders
    "special_tokens_map.json",
    "added_tokens.json",
    PREPROCESSOR,
    PROCESSOR,
    TEMPLATE,
    "chat_template.jinja",
    VERIFIER,
)
"""Files of a model folder, beside its tensors, on which answers depend."""


def model_identity(folder: Path) -> str:
    """Return a digest of a model folder's tensors. Raises ModelError."""
    files = weight_files(folder)
    try:
        handles = {file.name: os.open(file, os.O_RDONLY) for file in files}
        try:
            sizes = {name: os.fstat(handle).st_size for name, handle in handles.items()}
            digests = tree_digests(
                sizes, lambda name, begin, end: os.pread(handles[name], end - begin, begin)
            )
        finally:
            for handle in handles.values():
                os.close(handle)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from None
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


def folder_digest(folder: Path, adapters: str = "") -> str:
    """Return a digest of a folder's tensors and small files, and of the folder `adapters` (model.adapters).

    Raises ModelError.
    """
    digest = hashlib.blake2b(model_identity(folder).encode(), digest_size=16)
    try:
        for name in _SMALL:
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                digest.update(f"{name} {len(content)} ".encode() + content)
        if adapters:
            digest.update((model_folder(adapters) / ADAPTER_TENSORS).read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from None
    return digest.hexdigest()
