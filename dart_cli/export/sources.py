"""The weights that are exported, and what they are called.

Trained           weights of a run, with the number that tells them from others
published_weights those of a published version
of_checkpoint     those of the newest checkpoint that is intact

Settings of adapters are those that are stored with the weights: the configuration's may be of a later
start.
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
    """Weights of a run."""

    name: str  # `version 12`, `checkpoint c000010`
    tensors: Mapping[str, torch.Tensor]  # by the names of a weight set; frozen ones may be absent
    policy_version: int | None  # None of a checkpoint, which may lie between two versions
    digest: str  # of the version's manifest; empty of a checkpoint
    updates: int | None  # of a checkpoint: batches used, skipped ones included
    lora: (
        LoraConfig | None
    )  # settings of the adapters; None where the weights themselves are trained


def published_weights(config: Config, version: int | None) -> Trained:
    """Return a published version, by default the newest; checked against its digests and the model's tensors.

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
        newest = newest_announced(config)
        if newest is None:
            raise WeightsError(
                f"{directory}: none of its versions is whole; see `dart export --checkpoint`"
            )
        version = newest.policy_version
    if version not in present:
        numbers = ", ".join(map(str, present))
        raise UserError(f"{directory} holds no version {version}; there are {numbers}")
    path = manifest.path_of(directory, version)
    described = manifest.read_manifest(path)
    tensors = load(path, weight_tensors(_shapes(config, described.lora)))
    digest = manifest.published(path, described).digest
    return Trained(f"version {version}", tensors, version, digest, None, described.lora)


def of_checkpoint(config: Config) -> Trained:
    """Return the newest intact checkpoint: the trained parameters of the model, in its dtype.

    Raises RunDirectoryError where there is none, ModelError where it belongs to another model folder,
    CheckpointError where it does not fit the model.
    """
    saved = newest_weights(config)
    lora = saved.trained.lora
    model = _shapes(config, lora).to_empty(device="cpu")
    parameters = weight_tensors(model)
    saved.fill(parameters, config.model.path)
    return Trained(
        f"checkpoint {saved.path.name}",
        {each: parameters[each] for each in saved.weights().names},
        None,
        "",
        saved.progress.updates,
        lora,
    )


def _shapes(config: Config, lora: LoraConfig | None) -> PreTrainedModel:
    """Return the model with shapes and dtype alone."""
    policy = load_policy(config.model.path, weights=False, lora=lora)
    return policy.model.to(getattr(torch, config.model.dtype))
