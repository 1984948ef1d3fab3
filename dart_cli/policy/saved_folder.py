"""Parts of a model folder that is written: the tensors of a model, and the rest as its makers wrote it.

write_model  the model's tensors, and its config.json with their dtype
copy_rest    tokenizer, template and preprocessor of the folder that it was loaded from
share        the files are for whoever may read the folder
"""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

SHARD = "5GB"
"""A larger model is written in shards with an index."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_OWN = frozenset({"config.json", "README.md"})
_DTYPES = ("dtype", "torch_dtype")


def write_model(
    model: PreTrainedModel, base: Path, draft: Path, dtype: str, shard: str = SHARD
) -> None:
    """Write the tensors, and config.json as that of `base` says, with the dtype of these tensors."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(draft, max_shard_size=shard)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _set_dtype(config, dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_rest(base: Path, draft: Path) -> None:
    """Tokenizer, template and preprocessor as the model's makers wrote them."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)


def share(draft: Path) -> None:
    """Let others read the tensors if they may read the rest: safetensors makes its files private."""
    listed = [path for path in draft.iterdir() if path.suffix != ".safetensors"]
    mode = listed[0].stat().st_mode
    for file in draft.glob("*.safetensors"):
        file.chmod(stat.S_IMODE(mode))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """State the dtype of the weights wherever the configuration states one."""
    for key, value in config.items():
        if key in _DTYPES:
            config[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
    if not any(key in config for key in _DTYPES) and "architectures" in config:
        config["dtype"] = dtype
