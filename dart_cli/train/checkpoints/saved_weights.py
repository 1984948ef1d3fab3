"""The weights in a run's newest checkpoint, for those who play or export them; needs no trainer.

    SavedWeights    what a checkpoint holds of the model: the weights or their averages, and of when
    newest_weights  the newest intact one's
    averaged_set    the averages as a weight set in RUN/averaged, which an engine may take

A checkpoint holds float32 masters; they are rounded to the model's dtype where they are read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bus.errors import CheckpointError, ConfigError, RunDirectoryError, UserError
from dart_cli.config.models import resolve
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.policy.lora import is_adapter
from dart_cli.policy.model import load_policy, weight_tensors
from dart_cli.train.base import AVERAGE
from dart_cli.train.checkpoints.checkpoint import newest_intact
from dart_cli.train.checkpoints.identity import (
    TrainerProgress,
    model_identity,
    refuse_other_folder,
)
from dart_cli.train.checkpoints.shards import SavedTensors
from dart_cli.weights.file import FileChannel

AVERAGED = "averaged"
"""Folder of a run's averaged weight sets."""


@dataclass(frozen=True)
class SavedWeights:
    """Trained parameters, or their averages, in a checkpoint."""

    path: Path
    progress: TrainerProgress
    tensors: SavedTensors  # under the parameters' names
    lora: LoraConfig | None  # settings of the adapters; None where the weights are trained

    def fill(self, model: PreTrainedModel, base: str) -> None:
        """Put them into the model, or its adapters. Raises CheckpointError where they do not fit."""
        parameters = weight_tensors(model)
        try:
            if unknown := self.tensors.names - parameters.keys():
                raise ValueError(f"it holds {min(unknown)}, which the model lacks")
            self.tensors.fill({name: parameters[name] for name in self.tensors.names})
        except ValueError as error:
            raise CheckpointError(f"{self.path} does not fit {base}: {error}") from None


def newest_weights(config: Config, *, averaged: bool = False) -> SavedWeights:
    """The weights, or the averaged ones, of the newest intact checkpoint.

    Raises RunDirectoryError where there is none, UserError where it has no averages, ModelError where it
    belongs to another model folder, ConfigError for adapters of unknown settings.
    """
    directory = config.run.dir / "checkpoints"
    checkpoint = newest_intact(directory)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{directory} holds no intact checkpoint; the first is written after "
            f"train.checkpoint_every = {config.train.checkpoint_every} updates"
        )
    refuse_other_folder(
        checkpoint.model, model_identity(resolve(config.model.path)), checkpoint.path
    )
    end = f"/{AVERAGE}"
    names = {name for name in checkpoint.tensors.names if "/" not in name}
    found = {name: name for name in names}
    if averaged:
        found = {name: name + end for name in names if name + end in checkpoint.tensors.names}
        if not found:
            raise UserError(
                f"{checkpoint.path} holds no averaged weights; set train.average, e.g. to 0.9, and go on "
                "with the run"
            )
    if checkpoint.trained is None:
        lora = lora_not_stored(config, names, checkpoint.path)
    else:
        lora = checkpoint.trained.lora
    return SavedWeights(
        checkpoint.path, checkpoint.progress, checkpoint.tensors.renamed(found), lora
    )


def lora_not_stored(config: Config, names: Collection[str], path: Path) -> LoraConfig | None:
    """The configuration's settings for weights of older dart; None where `names` has no adapter.

    Raises ConfigError where there are adapters, and no settings.
    """
    if not any(map(is_adapter, names)):
        return None
    if config.model.lora is None:
        raise ConfigError(
            f"model.lora is not set, but {path} holds adapters, and not their settings: export with "
            "the TOML file that they were trained with"
        )
    return config.model.lora


def averaged_set(config: Config) -> tuple[Path, TrainerProgress]:
    """(weight set, progress): the averaged weights of the newest checkpoint as an engine takes them.

    In RUN/averaged/v000020, the number is that of the checkpoint's updates, or the next one that is
    free: each number means one set there, too. The newest weights.keep are kept. Raises as
    `newest_weights` does, CheckpointError where they do not fit the model, WeightsError.
    """
    saved = newest_weights(config, averaged=True)
    model = load_policy(config.model.path, config.model.dtype, lora=saved.lora).model
    saved.fill(model, config.model.path)
    tensors = weight_tensors(model)
    channel = FileChannel(
        config.run.dir.absolute() / AVERAGED, config.weights.keep, lora=saved.lora
    )
    with torch.no_grad():
        made = channel.resume(tensors, saved.progress.updates, tensors.keys() - saved.tensors.names)
    channel.close()
    return made.path, saved.progress
