"""The weights that are exported.

Trained             weights of a run, with their name and numbers
published_weights   reads the weights of a published version
checkpoint_weights  reads the weights of the newest intact checkpoint

The settings of adapters are read from the weights, because the configuration may have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from bus.errors import RunDirectoryError, UserError, WeightsError
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.player.chosen_model import newest_announced
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.train.checkpoints.checkpoint import newest_weights
from dart_cli.weights import manifest
from dart_cli.weights.file import load


@dataclass(frozen=True)
class Trained:
    """Trained weights of a run."""

    name: str  # `version 12`, `checkpoint c000010`
    tensors: Mapping[str, torch.Tensor]  # by the names of a weight set; frozen ones may be absent
    policy_version: int | None  # None for a checkpoint, which may lie between two versions
    digest: str  # of the manifest of the version; empty for a checkpoint
    updates: int | None  # of a checkpoint: the batches used, with skipped ones; None for a version
    lora: LoraConfig | None  # settings of the adapters; None if the weights themselves are trained


def published_weights(config: Config, version: int | None) -> Trained:
    """Return a published version, by default the newest, checked against its digests and the model's tensors.

    Raises RunDirectoryError if the run has published no version, UserError if there is no such version,
    WeightsError if the version is damaged.
    """
    directory = weights_dir(config)
    present = manifest.versions(directory)
    if not present:
        raise RunDirectoryError(
            f"{directory} has no weights: the run has published none yet, or its trainer was on "
            "another host; `dart train` publishes the first version when it begins"
        )
    if version is None:
        newest = newest_announced(config)
        if newest is None:
            raise WeightsError(
                f"{directory}: none of its versions is complete; see `dart export --checkpoint`"
            )
        version = newest.policy_version
    if version not in present:
        numbers = ", ".join(map(str, present))
        raise UserError(f"{directory} has no version {version}; its versions are {numbers}")
    path = manifest.path_of(directory, version)
    read = manifest.read_manifest(path)
    return Trained(
        name=f"version {version}",
        tensors=load(path, weight_tensors(_model_shapes(config, read.lora))),
        policy_version=version,
        digest=manifest.published(path, read).digest,
        updates=None,
        lora=read.lora,
    )


def checkpoint_weights(config: Config) -> Trained:
    """Return the trained parameters of the newest intact checkpoint, in the dtype of the model.

    Raises RunDirectoryError if there is no checkpoint, ModelError if it belongs to another model folder,
    CheckpointError if it does not fit the model.
    """
    saved = newest_weights(config)
    lora = saved.trained.lora
    model = _model_shapes(config, lora).to_empty(device="cpu")
    parameters = weight_tensors(model)
    saved.fill(parameters, config.model.path)
    return Trained(
        name=f"checkpoint {saved.path.name}",
        tensors={name: parameters[name] for name in saved.weights().names},
        policy_version=None,
        digest="",
        updates=saved.progress.updates,
        lora=lora,
    )


def _model_shapes(config: Config, lora: LoraConfig | None) -> PreTrainedModel:
    """Return the model without values: its parameters have only shapes and a dtype."""
    policy = load_policy(config.model.path, weights=False, lora=lora)
    return policy.model.to(getattr(torch, config.model.dtype))
