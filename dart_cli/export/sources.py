"""The weights that are exported, and what they are called.

Trained           weights of a run, with the number that tells them from others
published_weights those of a published version
of_checkpoint     those of the newest checkpoint that is intact

Settings of adapters are those that are stored with the weights: the configuration's may be of a later
start. Only where older dart stored none are they the configuration's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bus.errors import CheckpointError, ConfigError, RunDirectoryError, UserError, WeightsError
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.policy.lora import is_adapter
from dart_cli.policy.model import load_policy, resolve, weight_tensors
from dart_cli.train.checkpoints.checkpoint import newest_intact
from dart_cli.train.checkpoints.identity import model_identity, refuse_other_folder
from dart_cli.weights import manifest
from dart_cli.weights.delta_chain import newest_version
from dart_cli.weights.file import load


@dataclass(frozen=True)
class Trained:
    """Weights of a run."""

    name: str  # `version 12` or `checkpoint c000010`
    tensors: Mapping[str, torch.Tensor]  # by the names of a weight set; frozen ones may be absent
    policy_version: int | None  # None of a checkpoint, which may lie between two versions
    digest: str  # of the version's manifest; empty of a checkpoint
    updates: int | None  # of a checkpoint: batches used, skipped ones included
    lora: (
        LoraConfig | None
    )  # settings of the adapters; None where the weights themselves are trained


def published_weights(config: Config, version: int | None) -> Trained:
    """A published version, by default the newest; checked against its digests and the model's tensors.

    Raises RunDirectoryError for a run that has published none, UserError for a version that is not
    there, WeightsError for a damaged one.
    """
    directory = weights_dir(config)
    present = manifest.versions(directory)
    if not present:
        raise RunDirectoryError(
            f"{directory} holds no weights: the run has published none yet, or its trainer was on "
            "another host; `dart train` publishes the first when it begins"
        )
    if version is None:
        newest = newest_version(directory)
        if newest is None:
            raise WeightsError(
                f"{directory}: none of its versions can be rebuilt; see `dart export --checkpoint`"
            )
        version = newest.policy_version
    if version not in present:
        numbers = ", ".join(map(str, present))
        raise UserError(f"{directory} holds no version {version}; there are {numbers}")
    path = manifest.path_of(directory, version)
    described = manifest.read_manifest(path)
    lora = described.lora or _not_stored(config, described.tensors, path)
    tensors = load(path, weight_tensors(_shapes(config, lora)))
    digest = manifest.published(path, described).digest
    return Trained(f"version {version}", tensors, version, digest, None, lora)


def of_checkpoint(config: Config) -> Trained:
    """The newest intact checkpoint: the trained parameters of the model, rounded to its dtype.

    Raises RunDirectoryError where there is none, ModelError where it belongs to another model folder,
    CheckpointError where it does not fit the model.
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
    names = {name for name in checkpoint.tensors.names if "/" not in name}
    if checkpoint.trained is None:
        lora = _not_stored(config, names, checkpoint.path)
    else:
        lora = checkpoint.trained.lora
    parameters = dict(_shapes(config, lora).named_parameters())
    tensors = {
        name: torch.empty_like(parameters[name], device="cpu")
        for name in names
        if name in parameters
    }
    try:
        if unknown := names - parameters.keys():
            raise ValueError(f"it holds {min(unknown)}, which the model lacks")
        checkpoint.tensors.fill(tensors)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit {config.model.path}: {error}"
        ) from None
    updates = checkpoint.progress.updates
    return Trained(f"checkpoint {checkpoint.path.name}", tensors, None, "", updates, lora)


def _shapes(config: Config, lora: LoraConfig | None) -> PreTrainedModel:
    """The model with shapes and dtype alone."""
    policy = load_policy(config.model.path, weights=False, lora=lora)
    return policy.model.to(getattr(torch, config.model.dtype))


def _not_stored(config: Config, names: Collection[str], path: Path) -> LoraConfig | None:
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
