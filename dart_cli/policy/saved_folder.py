"""A model folder that is written: the tensors of a model, and the rest as its makers wrote it.

new_folder      a folder that appears when all of it is written
write_model     the model's tensors, and its config.json with their dtype
write_adapters  adapters alone, as peft writes them
copy_rest       tokenizer, template and preprocessor of the folder that it was loaded from
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from bus.errors import DiskError
from dart_cli.config.rules.machine import refuse_out
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.lora import peft_config, peft_names

SHARD = "5GB"
"""A larger model is written in shards with an index."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_OWN = frozenset({"config.json", "README.md"})
_DTYPES = ("dtype", "torch_dtype")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which is renamed to `out` when the block ends, and removed if it fails.

    Raises UserError as `refuse_out` does, DiskError where it cannot be written.
    """
    refuse_out(out)
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        yield draft
        _share(draft)
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{out} cannot be written: {error}; is the disk full?") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model(
    model: PreTrainedModel, base: Path, draft: Path, dtype: str, shard: str = SHARD
) -> None:
    """Write the tensors, and config.json as that of `base` says, with the dtype of these tensors."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(draft, max_shard_size=shard)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _set_dtype(config, dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_adapters(
    tensors: Mapping[str, torch.Tensor], lora: LoraConfig, base: str, draft: Path
) -> None:
    """Write adapters, by their names in a model; `base` is the folder of the model that they are of."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(peft_names(whole), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    told = json.dumps(peft_config(lora, base), indent=2)
    (draft / "adapter_config.json").write_text(told + "\n", encoding="utf-8")


def copy_rest(base: Path, draft: Path) -> None:
    """Tokenizer, template and preprocessor as the model's makers wrote them."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)


def _share(draft: Path) -> None:
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
