"""Checkpoints of the trainer: whole or absent, without pickle, resumed bit for bit.

    load_newest       loads the newest intact checkpoint, for a trainer that begins
    newest_weights    loads the newest intact checkpoint of a run, which may be live
    load              loads the checkpoint at a path
    CheckpointSaver   writes checkpoints: `begin` copies the state and returns, a thread writes it
    complete          adds state.json to the files of all ranks and gives the directory its name

    RUN/checkpoints/c000010/
        r000-000.safetensors   the tensors of rank 0: trained parameters in float32, `name/exp_avg`, ...
        r001-000.safetensors   the tensors of rank 1
        state.json             progress, the digest of each file, the identity of the model (identity.py)

Parameters that are not trained are only in the model folder. A checkpoint whose files do not match their
digests is set aside, with a warning, and the one before it is used. The trainer draws no random numbers;
the state of torch's generator is saved nevertheless, in case it ever does.

Updates wait only for the copy to main memory. While a checkpoint is written, the one before it is the
newest: a process that is killed resumes from that one, and the data service serves it the later batches
again. So a checkpoint counts only once `poll` or `wait` has returned its progress.

Ranks write a checkpoint without a collective call, so that no such call waits for a disk. Each rank writes
its files into the draft, a directory that all of them see, and then a list of their digests. Rank 0 waits
for all lists, adds state.json, and gives the directory its name.
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
    refuse_other_teacher,
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

GENERATOR = "/generator"
"""Name of the tensor with the generator's state. Other names are `parameter` and `parameter/name`, and no
parameter's name is empty."""
WRITE_S = 900.0
"""Most seconds for writing a checkpoint: some 100 GB on a slow disk."""
DRAFT = ".draft"
_LOOK_S = 0.05
"""Seconds between two checks whether the lists of the other ranks exist."""


# --- read -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Its tensors are read when they are needed."""

    path: Path
    progress: TrainerProgress
    model: str  # identity of the model folder; empty for a learner without one
    trained: TrainedPart
    tensors: SavedTensors  # trained parameters and the optimizer's state, as in Learner.state
    generator: torch.Tensor  # state of torch's CPU generator
    teacher: str = ""  # identity of the teacher's folder; empty without one

    def refuse_other(self, identity: str, trained: TrainedPart, teacher: str = "") -> None:
        """Raise ConfigError or ModelError if training cannot go on from here.

        `identity` is of the present model folder, `trained` is the part of it that is now trained, and
        `teacher` is the identity of the present teacher's folder.
        """
        self.trained.refuse_other(trained, self.path)
        refuse_other_folder(self.model, identity, self.path)
        refuse_other_teacher(self.teacher, teacher, self.path)

    def weights(self) -> SavedTensors:
        """Return the trained parameters, without the optimizer's state."""
        return self.tensors.only(name for name in self.tensors.names if "/" not in name)

    def fill(self, parameters: Mapping[str, torch.Tensor], base: str) -> None:
        """Copy the checkpoint's weights into `parameters` of the model `base`, rounded to their dtype.

        Raises CheckpointError if they do not fit.
        """
        saved = self.weights()
        try:
            if unknown := saved.names - parameters.keys():
                raise ValueError(f"it holds {min(unknown)}, which the model lacks")
            saved.fill({name: parameters[name] for name in saved.names})
        except ValueError as error:
            raise CheckpointError(f"{self.path} does not fit {base}: {error}") from None


def load_newest(directory: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None if there is no checkpoint. Set damaged ones aside.

    Raises CheckpointError if there are checkpoints and none is intact.
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
    """Return the newest intact checkpoint of a run, which may be live. This changes nothing on disk.

    Raises RunDirectoryError if there is none, ModelError if it belongs to another model folder.
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

    With `verify` all files are compared with their digests. If several ranks load a checkpoint, only rank 0
    needs to do that.
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
        return Checkpoint(
            path, state.progress, state.model, state.trained, tensors, generator, state.teacher
        )
    except ValidationError as error:
        raise CheckpointError(f"{path / STATE} is damaged: {error.errors()[0]['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from None


def _check_digests(path: Path, digests: Mapping[str, str]) -> None:
    """Raise CheckpointError for the first file that does not match its digest."""
    names = sorted(digests)
    actual = on_cores(lambda name: digest_of(path / name), names, most=len(names))
    for name, digest in zip(names, actual, strict=True):
        if digest != digests[name]:
            raise CheckpointError(f"{path / name} is damaged: its digest differs")


# --- write ------------------------------------------------------------------------------------


@dataclass
class _Save:
    """A checkpoint that is being written."""

    progress: TrainerProgress
    target: Path
    parts: list[Part]
    model: str
    began: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""  # it is set before `over`


class CheckpointSaver:
    """A writer of one checkpoint at a time, for one thread. Each rank of a run has one.

    The saver of rank 0 must be made before another rank's first `begin`, since it removes half-written
    checkpoints. On a rank above 0 a save is over when the files of that rank are written.
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
        """`trained` is stored with each checkpoint; rank 0 writes it."""
        self._directory = directory
        self._rank, self._ranks = rank, ranks
        self._deadline_s = deadline_s
        self._file_bytes = file_bytes
        self._trained = trained or TrainedPart()
        self.teacher = ""  # identity of the teacher's folder; rank 0 stores it with each checkpoint
        self._staging = Staging()
        self._save: _Save | None = None
        if rank == 0:
            remove_drafts(directory)

    def begin(self, progress: TrainerProgress, state: State, model: str) -> None:
        """Copy the state and begin to write it; first wait for the save before, if it is not over.

        `model` is the identity of the model folder. If the same number of updates is saved twice, the first
        checkpoint is kept. Raises CheckpointError as `wait` does, and if the directory cannot be written.
        """
        self.wait()
        target = path_of(self._directory, progress.updates)
        if target.exists():
            self._save = _Save(progress, target, [], model)
            self._save.over.set()
            return
        try:  # without its parents, so that a run directory that was moved is not made again
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
        """Return the progress of a save once, when it is complete; None before. Raises as `wait` does."""
        if self._save is None or not self._save.over.is_set():
            return None
        return self.wait()

    def wait(self) -> TrainerProgress | None:
        """Wait for the save that is under way and return its progress; None if there is none.

        Raises CheckpointError if it failed or takes longer than the deadline; older checkpoints are then
        unchanged.
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
        """Write this rank's files; rank 0 then completes the checkpoint. An error goes to `save`."""
        draft = draft_of(save.target)
        try:
            digests = write(draft, save.parts, rank=self._rank, file_bytes=self._file_bytes)
            if self._rank:
                _write_list(draft, self._rank, {"digests": digests})
            else:
                digests |= self._of_the_others(save, draft)
                state = CheckpointState(
                    progress=save.progress,
                    digests=digests,
                    model=save.model,
                    trained=self._trained,
                    teacher=self.teacher,
                )
                complete(save.target, state)
                seconds = time.monotonic() - save.began
                log.info("%s is complete, after %.1f s", save.target, seconds)
        except (OSError, SafetensorError, WeightsError) as error:
            fix = cure_of(error, "is the disk full?")
            save.error = f"{save.target} cannot be written: {error}; {fix}"
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
        """Wait until the other ranks have written, and return the digests of their files.

        Raises CheckpointError.
        """
        digests: dict[str, str] = {}
        for rank in range(1, self._ranks):
            content = _wait_for(_list_of(draft, rank), save.began + self._deadline_s)
            if content is None:
                raise CheckpointError(
                    f"{save.target}: rank {rank} has not written its part in "
                    f"{self._deadline_s:.0f} s; see its log"
                )
            if "error" in content:
                raise CheckpointError(f"rank {rank}: {content['error']}")
            digests |= content["digests"]
        for rank in range(1, self._ranks):
            _list_of(draft, rank).unlink()
        return digests

    def _give_up(self, save: _Save, draft: Path) -> None:
        """Tell rank 0 that this rank failed; rank 0 itself removes the draft."""
        if self._rank:
            try:
                _write_list(draft, self._rank, {"error": save.error})
            except OSError:
                log.exception("rank 0 will learn this by its deadline: %s", save.error)
        else:
            remove_drafts(self._directory)


def _list_of(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:03d}.json"


def _write_list(draft: Path, rank: int, content: dict[str, object]) -> None:
    """Write the list of a rank, atomically; rank 0 reads it."""
    half = draft / f".rank-{rank:03d}"
    half.write_text(json.dumps(content), encoding="utf-8")
    half.rename(_list_of(draft, rank))


def _wait_for(file: Path, deadline: float) -> dict[str, dict[str, str]] | None:
    """Return the content of a list; None if the file does not exist by `deadline` (monotonic seconds)."""
    while not file.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)
    content: dict[str, dict[str, str]] = json.loads(file.read_bytes())
    return content


# --- on disk ----------------------------------------------------------------------------------


def path_of(directory: Path, updates: int) -> Path:
    """Return the path of the checkpoint after so many updates, whether it exists or not."""
    return directory / f"c{updates:06d}"


def draft_of(target: Path) -> Path:
    """Return the directory in which the files of the checkpoint `target` are written."""
    return target.with_name(f".{target.name}{DRAFT}")


def complete(target: Path, state: CheckpointState) -> None:
    """Turn the draft, which holds the files of `state`, into the checkpoint `target`.

    Then remove all but the newest checkpoints. Raises OSError; older checkpoints are then unchanged.
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
    """Remove half-written checkpoints of dead processes. No process may be writing."""
    for draft in directory.glob(f".*{DRAFT}"):
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
