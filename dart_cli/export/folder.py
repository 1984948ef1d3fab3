"""A run's weights as a Hugging Face folder.

export_folder   the whole of it, complete or absent
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from bus.errors import DiskError, UserError
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.export.card import model_card
from dart_cli.export.sources import Trained, of_checkpoint, published_weights
from dart_cli.policy.lora import adapters_by_layer, merged, peft_config, peft_names
from dart_cli.policy.model import load_policy, resolve, weight_tensors
from dart_cli.policy.saved_folder import SHARD, copy_rest, share, write_model


def export_folder(
    config: Config,
    out: Path,
    *,
    version: int | None = None,
    checkpoint: bool = False,
    averaged: bool = False,
    merge: bool = False,
    shard: str = SHARD,
) -> Trained:
    """Write a published version (by default the newest), or the newest checkpoint, to `out`.

    With `averaged` the averaged weights of that checkpoint.

    A run with adapters yields them as peft's folder or, with `merge`, the whole model with them in its
    weights. Reads only, so the run may be live. Raises UserError where `out` cannot be made, and as
    `published_weights` and `of_checkpoint` do, and for `merge` where there are no adapters.
    """
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}")
    base = resolve(config.model.path)
    trained = (
        of_checkpoint(config, averaged=averaged)
        if checkpoint or averaged
        else published_weights(config, version)
    )
    lora = trained.lora
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    if merge and lora is None:
        raise UserError(
            f"--merged puts adapters into the weights, and {trained.name} is of a run that trains the "
            "weights themselves (model.lora is unset): leave it out"
        )
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        if lora is not None and not merge:
            _write_adapters(draft, trained, config, lora)
        else:
            model = load_policy(base, config.model.dtype).model
            _put_in(model, trained.tensors, lora)
            write_model(model, base, draft, config.model.dtype, shard)
        copy_rest(base, draft)
        card = model_card(config, trained, adapters=lora is not None and not merge)
        (draft / "README.md").write_text(card, encoding="utf-8")
        share(draft)
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{out} cannot be written: {error}; is the disk full?") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return trained


@torch.no_grad()
def _put_in(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], lora: LoraConfig | None
) -> None:
    """Make the tensors the model's; adapters are added to the weights that they adapt."""
    mine = weight_tensors(model)
    if lora is None:
        for name, tensor in tensors.items():
            mine[name].copy_(tensor)
        return
    for layer, (a, b) in adapters_by_layer(tensors).items():
        weight = mine[f"{layer}.weight"]
        weight.copy_(merged(weight, a, b, lora.alpha / lora.rank))


def _write_adapters(draft: Path, trained: Trained, config: Config, lora: LoraConfig) -> None:
    """Adapters alone, as peft writes them."""
    tensors = {name: tensor.contiguous() for name, tensor in trained.tensors.items()}
    save_file(peft_names(tensors), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    told = peft_config(trained.tensors, lora, config.model.path)
    (draft / "adapter_config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
