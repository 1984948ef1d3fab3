"""Checkpoints of the trainer: whole or absent, without pickle, resumed bit for bit.

    complete          gives the files of all ranks their state.json and their name: now it exists
    load_newest       the newest checkpoint that is intact, for a trainer that begins
    newest_intact     the same for a reader beside a live trainer
    recipe_of         what tells whether a run goes on as it was

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
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from pydantic import ValidationError

from bus.errors import CheckpointError
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.identity import (
    STATE,
    CheckpointState,
    TrainedPart,
    TrainerProgress,
    checkpoint_paths,
    refuse_other_folder,
)
from dart_cli.train.checkpoints.shards import SavedTensors
from dart_cli.weights.manifest import digest_of, on_cores

log = logging.getLogger(__name__)

GENERATOR = "/generator"  # beside `parameter` and `parameter/name`; no parameter has no name
DRAFT = ".draft"
_OLD_MODEL, _OLD_OPTIMIZER = "model.safetensors", "optimizer.safetensors"
"""Files of the checkpoints that dart wrote before it had ranks: all weights, and the optimizer's state
with the float32 masters of other weights as `parameter/master`."""
_OLD_MASTER = "/master"


_NOT_OF_AN_UPDATE = frozenset(
    {
        *("updates", "max_minutes", "max_trajectories", "stop_at"),
        *("checkpoint_every", "keep_checkpoints", "parity_every", "parity_limit", "wandb"),
        *("device", "threads", "ranks", "rank_deadline_s", "offload"),
        *("pack_tokens", "recompute", "chunk_tokens", "image_workers"),
        *("reuse", "reuse_gap", "reuse_until", "reuse_fall"),  # which batches there are
    }
)
"""Keys of [train] that leave an update as it is, but for rounding, or at the end of the run."""


def recipe_of(config: Config) -> str:
    """A digest of all settings that an update follows from, beside its batch and the weights."""
    exclude = set(_NOT_OF_AN_UPDATE)
    if config.train.average_for == "evaluation":  # it changes no weights that are published
        exclude |= {"average", "average_for"}
    train = config.train.model_dump(mode="json", exclude=exclude)
    settings = json.dumps([config.model.model_dump(mode="json"), train], sort_keys=True)
    return blake2b(settings.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """The trainer's state."""

    path: Path
    progress: TrainerProgress
    model: str  # identity of the folder that holds what was not trained; empty where unknown
    trained: TrainedPart | None  # None where unknown
    tensors: SavedTensors  # trained parameters and the optimizer's state, as PolicyLearner.state
    generator: torch.Tensor  # state of torch's CPU generator

    def refuse_other(self, identity: str, trained: TrainedPart) -> None:
        """Raise ConfigError or ModelError if a model of this folder and part cannot go on from it."""
        if self.trained is not None:
            self.trained.refuse_other(trained, self.path)
        refuse_other_folder(self.model, identity, self.path)


def path_of(directory: Path, updates: int) -> Path:
    """Where the checkpoint after so many updates is or will be."""
    return directory / f"c{updates:06d}"


def draft_of(target: Path) -> Path:
    """Where its files are written."""
    return target.with_name(f".{target.name}{DRAFT}")


def complete(
    target: Path,
    progress: TrainerProgress,
    digests: Mapping[str, str],
    model: str,
    keep: int,
    trained: TrainedPart | None = None,
    *,
    averaged: bool = False,
) -> None:
    """The files of `digests` are in the draft and on disk: make it the checkpoint `target`.

    Removes all but the newest `keep`. Raises OSError; older checkpoints are then untouched.
    """
    draft = draft_of(target)
    state = CheckpointState(
        progress=progress,
        digests=dict(digests),
        model=model,
        trained=trained,
        averaged=averaged or None,
    )
    with (draft / STATE).open("w", encoding="utf-8") as handle:
        handle.write(state.sealed().text())
        handle.flush()
        os.fsync(handle.fileno())
    _sync(draft)
    draft.rename(target)
    _sync(target.parent)
    for old in checkpoint_paths(target.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # tried again after the next checkpoint


def remove_drafts(directory: Path) -> None:
    """Remove what dead processes left half written; none may be at work."""
    for left in directory.glob(f".*{DRAFT}"):
        shutil.rmtree(left, ignore_errors=True)


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


def newest_intact(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact, None if there is none; changes nothing."""
    for path in reversed(checkpoint_paths(directory)):
        with contextlib.suppress(CheckpointError):
            return load(path)
    return None


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError if it is damaged or incomplete.

    `verify` compares all files with their digests. Where several ranks load one, rank 0 does that and
    the others need not.
    """
    try:
        text = (path / STATE).read_bytes()
        state = CheckpointState.model_validate_json(text)
        is_old = _OLD_MODEL in state.digests
        if not is_old and state.sealed().text().encode() != text:
            raise CheckpointError(f"{path / STATE} is damaged: its digest differs")
        if verify:
            _check_digests(path, state.digests)
        if is_old:
            saved = _old_tensors(path)
        else:
            saved = SavedTensors.of_files([path / name for name in sorted(state.digests)])
        tensors = saved.renamed({name: name for name in saved.names - {GENERATOR}})
        generator = saved.whole(GENERATOR)
        return Checkpoint(path, state.progress, state.model, state.trained, tensors, generator)
    except ValidationError as error:
        raise CheckpointError(f"{path / STATE} is damaged: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from None


def _old_tensors(path: Path) -> SavedTensors:
    """A checkpoint of older dart under the names of now; it holds what was frozen, too."""
    model = SavedTensors.of_files([path / _OLD_MODEL])
    optimizer = SavedTensors.of_files([path / _OLD_OPTIMIZER])
    masters = {name for name in optimizer.names if name.endswith(_OLD_MASTER)}
    return model.joined(
        optimizer.renamed({name: name for name in optimizer.names - masters})
    ).joined(optimizer.renamed({name.removesuffix(_OLD_MASTER): name for name in masters}))


def _check_digests(path: Path, digests: Mapping[str, str]) -> None:
    names = sorted(digests)
    found = on_cores(lambda name: digest_of(path / name), names, most=len(names))
    for name, digest in zip(names, found, strict=True):
        if digest != digests[name]:
            raise CheckpointError(f"{path / name} is damaged: its digest differs")


def _sync(path: Path) -> None:
    """Force a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
