"""A run's weights as a Hugging Face folder.

export_folder   the whole of it, complete or absent
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bus.errors import DiskError, UserError
from dart_cli.config.schema import Config
from dart_cli.export.card import model_card
from dart_cli.export.sources import Trained, of_checkpoint, published_weights
from dart_cli.policy.model import load_policy, resolve, weight_tensors

SHARD = "5GB"
"""A larger model is written in shards with an index."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_OWN = frozenset({"config.json", "README.md"})
_DTYPES = ("dtype", "torch_dtype")


def export_folder(
    config: Config,
    out: Path,
    *,
    version: int | None = None,
    checkpoint: bool = False,
    shard: str = SHARD,
) -> Trained:
    """Write a published version (by default the newest), or the newest checkpoint, to `out`.

    Reads only, so the run may be live. Raises UserError where `out` cannot be made, and as
    `published_weights` and `of_checkpoint` do.
    """
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}")
    base = resolve(config.model.path)
    policy = load_policy(base, config.model.dtype)
    mine = weight_tensors(policy.model)
    trained = (
        of_checkpoint(config, policy.model)
        if checkpoint
        else published_weights(config, version, mine)
    )
    with torch.no_grad():
        for name, tensor in trained.tensors.items():
            mine[name].copy_(tensor)
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        transformers_logging.disable_progress_bar()
        policy.model.save_pretrained(draft, max_shard_size=shard)
        _copy_rest(base, draft, config.model.dtype)
        (draft / "README.md").write_text(model_card(config, trained), encoding="utf-8")
        draft.rename(out)
    except OSError as error:
        raise DiskError(f"{out} cannot be written: {error}; is the disk full?") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return trained


def _copy_rest(base: Path, draft: Path, dtype: str) -> None:
    """Tokenizer, template, preprocessor and configuration as the model's makers wrote them."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _set_dtype(config, dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """State the dtype of the weights wherever the configuration states one."""
    for key, value in config.items():
        if key in _DTYPES:
            config[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
    if not any(key in config for key in _DTYPES) and "architectures" in config:
        config["dtype"] = dtype
