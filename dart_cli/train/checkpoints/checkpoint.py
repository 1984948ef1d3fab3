"""Checkpoints of the trainer: whole or absent, without pickle, resumed bit for bit.

    load_newest       the newest checkpoint that is intact, for a trainer that begins
    newest_weights    its weights, for a reader beside a live trainer
    load              the one at a path
    CheckpointSaver   `begin` copies the state and returns; a thread writes it; then it exists
    complete          gives the files of all ranks their state.json and their name

    RUN/checkpoints/c000010/
        r000-000.safetensors   what rank 0 held: trained parameters in float32, `name/exp_avg`, ...
        r001-000.safetensors   what rank 1 held
        state.json             progress, the digest of each file, of which model it is (identity.py)

Parameters that are not trained are not here: they are the model folder's. A checkpoint that fails its
digests is set aside, with a warning, and the one before it is used. The trainer draws no random
numbers; torch's generator is saved nevertheless, in case it ever does.

Updates wait only for the copy to main memory. While a checkpoint is written, the one before it is the
newest: a process that is killed goes on from that one, and data serves it the batches since. So a
checkpoint counts once `poll` or `wait` has named it, and not before.

Ranks need no collective for it, so that none of theirs waits behind a disk. Each writes its files into
the draft, a directory that all of them see, and then a list of their digests. Rank 0 waits for all
lists, adds state.json, and gives the directory its name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from bus.errors import CheckpointError, RunDirectoryError, WeightsError, cure_of
from dart_cli.config.model_folder import resolve
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config
from dart_cli.train.checkpoints.identity import (
    STATE,
    CheckpointState,
    TrainedPart,
    TrainerProgress,
    checkpoint_paths,
    refuse_other_folder,
)
from dart_cli.train.checkpoints.shards import (
    FILE_BYTES,
    Part,
    SavedTensors,
    Staging,
    State,
    stage,
    write,
)
from dart_cli.weights.folder import model_identity
from dart_cli.weights.manifest import digest_of, on_cores

log = logging.getLogger(__name__)

GENERATOR = "/generator"  # beside `parameter` and `parameter/name`; no parameter has no name
WRITE_S = 900.0
"""Longest time that a checkpoint is written: some 100 GB on a slow disk."""
DRAFT = ".draft"
_LOOK_S = 0.05
"""Pause between two looks for the lists of the other ranks."""


# --- read -------------------------------------------------------------------------------------


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
        """Return the trained parameters alone."""
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
    """Return the newest intact checkpoint; None where there is no checkpoint at all. Others are set aside.

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
    """Return the newest intact checkpoint of a run, which may be live; changes nothing.

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
    """Return the checkpoint at `path`. Raises CheckpointError if it is damaged or incomplete.

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


# --- written ----------------------------------------------------------------------------------


@dataclass
class _Save:
    """One checkpoint on its way to disk."""

    progress: TrainerProgress
    target: Path
    parts: list[Part]
    model: str
    began: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""  # set before `over`


class CheckpointSaver:
    """Writes one checkpoint at a time. For one thread; each rank of a run has its own.

    That of rank 0 must be made before any other's first `begin`: it removes what was left half
    written. On the ranks after it a save is over when their own files are written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        deadline_s: float = WRITE_S,
        file_bytes: int = FILE_BYTES,
        trained: TrainedPart | None = None,
    ) -> None:
        """`trained` is stored with each checkpoint, by rank 0."""
        self._directory = directory
        self._rank, self._ranks = rank, ranks
        self._deadline_s = deadline_s
        self._file_bytes = file_bytes
        self._trained = trained or TrainedPart()
        self._staging = Staging()
        self._save: _Save | None = None
        if rank == 0:
            remove_drafts(directory)

    def begin(self, progress: TrainerProgress, state: State, model: str) -> None:
        """Copy the state, and begin to write it; waits for the save before, if it is not over.

        `model` is the identity of the model folder. Saving the same number of updates twice keeps the
        first. Raises CheckpointError as `wait` does, and if nothing can be written here at all.
        """
        self.wait()
        target = path_of(self._directory, progress.updates)
        if target.exists():
            self._save = _Save(progress, target, [], model)
            self._save.over.set()
            return
        try:  # not its parents: a run directory that was moved does not come back
            target.parent.mkdir(exist_ok=True)
            draft_of(target).mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error}") from None
        whole = {**state, GENERATOR: torch.get_rng_state()}
        self._save = _Save(progress, target, stage(whole, self._staging, rank=self._rank), model)
        threading.Thread(
            target=self._write, args=(self._save,), name="checkpoint", daemon=True
        ).start()

    def poll(self) -> TrainerProgress | None:
        """Return the progress of a save that is complete, once; None before. Raises as `wait` does."""
        if self._save is None or not self._save.over.is_set():
            return None
        return self.wait()

    def wait(self) -> TrainerProgress | None:
        """Wait for the save in flight; its progress, None where there is none.

        Raises CheckpointError where it failed or takes longer than the deadline: older checkpoints
        are then untouched.
        """
        save = self._save
        if save is None:
            return None
        left_s = save.began + self._deadline_s - time.monotonic()
        if not save.over.wait(max(left_s, 0.0)):
            raise CheckpointError(
                f"{save.target} is not written after {self._deadline_s:.0f} s; does its disk hang, "
                "or another rank?"
            )
        self._save = None
        if save.error:
            raise CheckpointError(save.error)
        return save.progress

    # --- in the thread ------------------------------------------------------------------------

    def _write(self, save: _Save) -> None:
        draft = draft_of(save.target)
        try:
            digests = write(draft, save.parts, rank=self._rank, file_bytes=self._file_bytes)
            if self._rank:
                _leave(draft, self._rank, {"digests": digests})
            else:
                digests |= self._of_the_others(save, draft)
                state = CheckpointState(
                    progress=save.progress,
                    digests=digests,
                    model=save.model,
                    trained=self._trained,
                )
                complete(save.target, state)
                seconds = time.monotonic() - save.began
                log.info("%s is complete, after %.1f s", save.target, seconds)
        except (OSError, SafetensorError, WeightsError) as error:
            cure = cure_of(error, "is the disk full?")
            save.error = f"{save.target} cannot be written: {error}; {cure}"
        except CheckpointError as error:
            save.error = str(error)
        except BaseException as error:
            save.error = f"{save.target} cannot be written: {type(error).__name__}: {error}"
            raise
        finally:
            if save.error:
                self._give_up(save, draft)
            save.parts.clear()
            save.over.set()

    def _of_the_others(self, save: _Save, draft: Path) -> dict[str, str]:
        """Return the digests of the other ranks' files, when all are written. Raises CheckpointError."""
        digests: dict[str, str] = {}
        for rank in range(1, self._ranks):
            listed = _wait_for(_list_of(draft, rank), save.began + self._deadline_s)
            if listed is None:
                raise CheckpointError(
                    f"{save.target}: rank {rank} has not written its part in "
                    f"{self._deadline_s:.0f} s; see its log"
                )
            if "error" in listed:
                raise CheckpointError(f"rank {rank}: {listed['error']}")
            digests |= listed["digests"]
        for rank in range(1, self._ranks):
            _list_of(draft, rank).unlink()
        return digests

    def _give_up(self, save: _Save, draft: Path) -> None:
        if self._rank:
            try:
                _leave(draft, self._rank, {"error": save.error})
            except OSError:
                log.exception("rank 0 will learn this by its deadline: %s", save.error)
        else:
            remove_drafts(self._directory)


def _list_of(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:03d}.json"


def _leave(draft: Path, rank: int, listed: dict[str, object]) -> None:
    """Leave rank 0 a list, whole at once."""
    half = draft / f".rank-{rank:03d}"
    half.write_text(json.dumps(listed), encoding="utf-8")
    half.rename(_list_of(draft, rank))


def _wait_for(file: Path, deadline: float) -> dict[str, dict[str, str]] | None:
    """Return what a list says, None if it does not come by `deadline` (monotonic seconds)."""
    while not file.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)
    listed: dict[str, dict[str, str]] = json.loads(file.read_bytes())
    return listed


# --- on disk ----------------------------------------------------------------------------------


def path_of(directory: Path, updates: int) -> Path:
    """Where the checkpoint after so many updates is or will be."""
    return directory / f"c{updates:06d}"


def draft_of(target: Path) -> Path:
    """Where its files are written."""
    return target.with_name(f".{target.name}{DRAFT}")


def complete(target: Path, state: CheckpointState) -> None:
    """Make the draft the checkpoint `target`: the files of `state` are in it and on disk.

    Removes all but the newest. Raises OSError; older checkpoints are then untouched.
    """
    draft = draft_of(target)
    with (draft / STATE).open("w", encoding="utf-8") as handle:
        handle.write(state.sealed().text())
        handle.flush()
        os.fsync(handle.fileno())
    _sync(draft)
    draft.rename(target)
    _sync(target.parent)
    for old in checkpoint_paths(target.parent)[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)  # tried again after the next checkpoint


def remove_drafts(directory: Path) -> None:
    """Remove what dead processes left half written; none may be at work."""
    for left in directory.glob(f".*{DRAFT}"):
        shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
