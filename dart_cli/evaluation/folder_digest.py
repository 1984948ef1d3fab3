"""What tells a model folder from another one, wherever it lies.

folder_digest  of its tensors and of the small files that change its answers
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dart_cli.config.adapters import ADAPTER_TENSORS
from dart_cli.config.model_folder import PREPROCESSOR, PROCESSOR, TEMPLATE, TOKENIZER, model_folder
from dart_cli.train.checkpoints.identity import model_identity

_SMALL = ("config.json", TOKENIZER, PREPROCESSOR, PROCESSOR, TEMPLATE, "chat_template.jinja")
"""Files of a model folder, beside its tensors, that answers depend on."""


def folder_digest(folder: Path, adapters: str = "") -> str:
    """Of the tensors and of the small files, wherever the folder lies, with `adapters` (`model.adapters`) on it."""
    digest = hashlib.blake2b(model_identity(folder).encode(), digest_size=16)
    for name in _SMALL:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    if adapters:
        digest.update((model_folder(adapters) / ADAPTER_TENSORS).read_bytes())
    return digest.hexdigest()
