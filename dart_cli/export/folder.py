"""A run's weights as a Hugging Face folder.

export_folder   writes the folder, complete or not at all
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bus.errors import UserError
from dart_cli.config.model_folder import resolve
from dart_cli.config.rules.machine import refuse_out
from dart_cli.config.schema import Config
from dart_cli.export.card import model_card
from dart_cli.export.sources import Trained, checkpoint_weights, published_weights
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.lora import merge_into
from dart_cli.policy.model_files import (
    SHARD,
    copy_rest,
    new_folder,
    write_adapters,
    write_model,
)


def export_folder(
    config: Config,
    out: Path,
    *,
    version: int | None = None,
    checkpoint: bool = False,
    merge: bool = False,
    shard: str = SHARD,
) -> Trained:
    """Write a published version (by default the newest), or the newest checkpoint, into the new folder `out`.

    Adapters are written as a folder of peft or, with `merge`, as the whole model with the adapters in its
    weights. The run is only read, so it may be live. Raises UserError if `out` cannot be created, or if
    `merge` is set without adapters, and what `published_weights` and `checkpoint_weights` raise.
    """
    refuse_out(out)
    base = resolve(config.model.path)
    trained = checkpoint_weights(config) if checkpoint else published_weights(config, version)
    lora = trained.lora
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    if merge and lora is None:
        raise UserError(
            f"--merged puts adapters into the weights, but {trained.name} is of a run that trains the "
            "weights themselves (model.lora is unset): leave out --merged"
        )
    has_drafting = False
    with new_folder(out) as draft:
        if lora is not None and not merge:
            write_adapters(trained.tensors, lora, config.model.path, draft)
        else:
            model = load_policy(base, config.model.dtype).model
            if lora is None:
                _copy_into(model, trained.tensors)
            else:
                merge_into(model, trained.tensors, lora)
            has_drafting = write_model(model, base, draft, config.model.dtype, shard)
        copy_rest(base, draft)
        alone = lora is not None and not merge
        card = model_card(config, trained, adapters=alone, drafting=has_drafting)
        (draft / "README.md").write_text(card, encoding="utf-8")
    return trained


@torch.no_grad()
def _copy_into(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors into the weights of the model."""
    weights = weight_tensors(model)
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)
