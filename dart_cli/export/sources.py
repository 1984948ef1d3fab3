"""The weights that are exported, and what they are called.

Trained           weights of a run, with the number that tells them from others
published_weights those of a published version
of_checkpoint     those of the newest checkpoint that is intact
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bus.errors import CheckpointError, RunDirectoryError, UserError, WeightsError
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.checkpoint import model_identity, newest_intact
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


def published_weights(
    config: Config, version: int | None, expected: Mapping[str, torch.Tensor]
) -> Trained:
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
    described = manifest.published(path, manifest.read_manifest(path))
    return Trained(f"version {version}", load(path, expected), version, described.digest, None)


def of_checkpoint(config: Config, model: torch.nn.Module) -> Trained:
    """The newest intact checkpoint: the trained parameters of `model`, rounded to its dtypes.

    Raises RunDirectoryError where there is none, CheckpointError where it is of another model.
    """
    directory = config.run.dir / "checkpoints"
    checkpoint = newest_intact(directory)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{directory} holds no intact checkpoint; the first is written after "
            f"train.checkpoint_every = {config.train.checkpoint_every} updates"
        )
    from dart_cli.policy.model import resolve

    checkpoint.check_model(model_identity(resolve(config.model.path)))
    parameters = dict(model.named_parameters())
    names = {name for name in checkpoint.tensors.names if "/" not in name}
    tensors = {name: torch.empty_like(parameters[name]) for name in names if name in parameters}
    try:
        if unknown := names - parameters.keys():
            raise ValueError(f"it holds {min(unknown)}, which the model lacks")
        checkpoint.tensors.fill(tensors)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit {config.model.path}: {error}"
        ) from None
    updates = checkpoint.progress.updates
    return Trained(f"checkpoint {checkpoint.path.name}", tensors, None, "", updates)
