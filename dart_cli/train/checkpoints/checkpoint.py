"""Checkpoints of the trainer, as they are read: whole or absent, without pickle, resumed bit for bit.

    load_newest       the newest checkpoint that is intact, for a trainer that begins
    newest_weights    its weights, for a reader beside a live trainer
    load              the one at a path

    RUN/checkpoints/c000010/
        r000-000.safetensors   what rank 0 held: trained parameters in float32, `name/exp_avg`, ...
        r001-000.safetensors   what rank 1 held
        state.json             progress, the digest of each file, of which model it is (identity.py)

Parameters that are not trained are not here: they are the model folder's. A checkpoint that fails its
digests is set aside, with a warning, and the one before it is used. The trainer draws no random
numbers; torch's generator is saved nevertheless, in case it ever does. `CheckpointSaver` (saver.py)
writes checkpoints, beside the updates that follow.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from bus.errors import CheckpointError, RunDirectoryError
from dart_cli.config.model_folder import resolve
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.identity import (
    STATE,
    CheckpointState,
    TrainedPart,
    TrainerProgress,
    checkpoint_paths,
    model_identity,
    refuse_other_folder,
)
from dart_cli.train.checkpoints.shards import SavedTensors
from dart_cli.weights.manifest import digest_of, on_cores

log = logging.getLogger(__name__)

GENERATOR = "/generator"  # beside `parameter` and `parameter/name`; no parameter has no name


@dataclass(frozen=True)
class Checkpoint:
    """The trainer's state."""

    path: Path
    progress: TrainerProgress
    model: str  # identity of the folder that holds what was not trained; empty without one
    trained: TrainedPart
    tensors: SavedTensors  # trained parameters and the optimizer's state, as PolicyLearner.state
    generator: torch.Tensor  # state of torch's CPU generator

    def refuse_other(self, identity: str, trained: TrainedPart) -> None:
        """Raise ConfigError or ModelError if a model of this folder and part cannot go on from it."""
        self.trained.refuse_other(trained, self.path)
        refuse_other_folder(self.model, identity, self.path)

    def weights(self) -> SavedTensors:
        """The trained parameters alone."""
        return self.tensors.only(name for name in self.tensors.names if "/" not in name)

    def fill(self, parameters: Mapping[str, torch.Tensor], base: str) -> None:
        """Put its weights into those of the model `base`, rounded to their dtype.

        Raises CheckpointError where they do not fit.
        """
        saved = self.weights()
        try:
            if unknown := saved.names - parameters.keys():
                raise ValueError(f"it holds {min(unknown)}, which the model lacks")
            saved.fill({name: parameters[name] for name in saved.names})
        except ValueError as error:
            raise CheckpointError(f"{self.path} does not fit {base}: {error}") from None


def load_newest(directory: Path) -> Checkpoint | None:
    """The newest intact checkpoint; None where there is no checkpoint at all. Others are set aside.

    Raises CheckpointError where there are some and none is intact.
    """
    paths = checkpoint_paths(directory)
    for path in reversed(paths):
        try:
            return load(path)
        except CheckpointError as error:
            aside = path.with_name(f"{path.name}.damaged")
            log.warning("skips a checkpoint: %s; it is kept as %s", error, aside.name)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if paths:
        raise CheckpointError(
            f"{directory}: none of {len(paths)} checkpoints can be read; "
            "remove the directory to begin anew from model.path"
        )
    return None


def newest_weights(config: Config) -> Checkpoint:
    """The newest intact checkpoint of a run, which may be live; changes nothing.

    Raises RunDirectoryError where there is none, ModelError where it belongs to another model folder.
    """
    directory = config.run.dir / "checkpoints"
    for path in reversed(checkpoint_paths(directory)):
        with contextlib.suppress(CheckpointError):
            checkpoint = load(path)
            refuse_other_folder(checkpoint.model, model_identity(resolve(config.model.path)), path)
            return checkpoint
    raise RunDirectoryError(
        f"{directory} holds no intact checkpoint; the first is written after "
        f"train.checkpoint_every = {config.train.checkpoint_every} updates"
    )


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError if it is damaged or incomplete.

    `verify` compares all files with their digests. Where several ranks load one, rank 0 does that and
    the others need not.
    """
    try:
        text = (path / STATE).read_bytes()
        state = CheckpointState.model_validate_json(text)
        if state.sealed().text().encode() != text:
            raise CheckpointError(f"{path / STATE} is damaged: its digest differs")
        if verify:
            _check_digests(path, state.digests)
        saved = SavedTensors.of_files([path / name for name in sorted(state.digests)])
        tensors = saved.only(saved.names - {GENERATOR})
        generator = saved.whole(GENERATOR)
        return Checkpoint(path, state.progress, state.model, state.trained, tensors, generator)
    except ValidationError as error:
        raise CheckpointError(f"{path / STATE} is damaged: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from None


def _check_digests(path: Path, digests: Mapping[str, str]) -> None:
    names = sorted(digests)
    found = on_cores(lambda name: digest_of(path / name), names, most=len(names))
    for name, digest in zip(names, found, strict=True):
        if digest != digests[name]:
            raise CheckpointError(f"{path / name} is damaged: its digest differs")
