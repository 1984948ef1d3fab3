"""The content of a checkpoint's state.json, read without torch: the progress of the run, and its model.

    TrainerProgress   the progress of the trainer
    TrainedPart       which tensors of the model are trained: settings of its adapters, or which weights
    CheckpointState   TrainerProgress and TrainedPart, the identity of the model folder, the files' digests
    checkpoint_paths  the complete checkpoints of a folder
    newest_updates    the number of updates in the newest of them
    refuse_other      raises an error if a configuration cannot go on from the newest checkpoint

`dart up`, `dart data` and `dart train` call `refuse_other` before anything starts or is recorded; the
trainer compares again with the checkpoint that it loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bus.errors import ConfigError, ModelError, RunDirectoryError
from dart_cli.config.adapters import adapter_change
from dart_cli.config.model_folder import model_folder
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.runtime.run_dir import read_run
from dart_cli.weights.folder import model_identity

STATE = "state.json"
_NAME = re.compile(r"c(\d{6,})")


class TrainerProgress(BaseModel):
    """The progress of the trainer: how many updates it has done, and on which batches."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    updates: int = 0  # batches used, skipped ones included
    skipped: int = 0  # how many of them changed no weights: see Update.note
    policy_version: int = 0  # newest published when this was written
    last_batch_id: int = 0  # newest batch in the weights
    batches_trained: list[int] = []  # ids since the previous complete checkpoint


class TrainedPart(BaseModel):
    """The tensors of the model that are trained, and settings that they depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lora: LoraConfig | None = None  # adapters; None for the weights themselves
    freeze_vision: bool = False

    @classmethod
    def of(cls, config: Config) -> TrainedPart:
        """Return the part that a trainer with this configuration trains."""
        return cls(lora=config.model.lora, freeze_vision=config.model.freeze_vision)

    def refuse_other(self, now: TrainedPart, checkpoint: Path) -> None:
        """Raise ConfigError if training of `now` cannot go on from a `checkpoint` of this part.

        Weights that were frozen may be trained from now on, but trained ones cannot be frozen.
        """
        if problem := adapter_change(self.lora, now.lora):
            raise ConfigError(
                f"{problem} in {checkpoint}; set it back, or choose another run.dir to begin anew"
            )
        if self.lora is None and now.freeze_vision and not self.freeze_vision:
            raise ConfigError(
                f"model.freeze_vision = true, but the vision tower was trained in {checkpoint}; set it "
                "back, or choose another run.dir to begin anew"
            )


class CheckpointState(BaseModel):
    """The content of state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    progress: TrainerProgress
    digests: dict[str, str]  # file name -> BLAKE2b
    model: str  # identity of the model folder; empty for a learner without one
    trained: TrainedPart
    teacher: str = ""  # identity of the teacher's folder; empty, and not written, without one
    own: str = ""  # digest of the fields above

    def sealed(self) -> CheckpointState:
        """Return this state with its own digest."""
        text = self.model_copy(update={"own": ""}).model_dump_json(exclude=self._absent)
        return self.model_copy(update={"own": blake2b(text.encode()).hexdigest()})

    def text(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=1, exclude=self._absent)

    @property
    def _absent(self) -> set[str]:
        return set() if self.teacher else {"teacher"}


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=_updates)


def newest_updates(directory: Path) -> int:
    """Return the number of updates in the newest checkpoint of `directory`.

    Return 0 if there is no checkpoint or no folder.
    """
    try:
        return max(map(_updates, checkpoint_paths(directory)), default=0)
    except OSError:  # the folder was moved, or its disk does not answer
        return 0


def _updates(path: Path) -> int:
    return int(path.name[1:])


def refuse_other_folder(before: str, now: str, checkpoint: Path) -> None:
    """Raise ModelError if a `checkpoint` belongs to a model folder of another identity (`before`)."""
    if before and now and before != now:
        raise ModelError(
            f"model.path: {checkpoint} leaves what is not trained to the model folder, and that holds other "
            "tensors now; put the folder back with which the run began, or choose another run.dir"
        )


def refuse_other_teacher(before: str, now: str, checkpoint: Path) -> None:
    """Raise ModelError if a `checkpoint` learned from a teacher of another identity (`before`)."""
    if before and now and before != now:
        raise ModelError(
            f"teacher.model: {checkpoint} learned from a folder with other tensors; put that one back, or "
            "choose another run.dir to begin anew"
        )


def refuse_other(config: Config) -> None:
    """Raise ConfigError or ModelError if the run's newest checkpoint belongs to another model or teacher.

    The tensors of a folder are read only if the run names another folder than at its last start, since the
    trainer reads them in any case.
    """
    newest = _newest_state(config.run.dir / "checkpoints")
    if newest is None:
        return
    path, state = newest
    state.trained.refuse_other(TrainedPart.of(config), path)
    if config.train.learner != "torch":
        return
    folder, teacher = model_folder(config.model.path), teacher_folder(config)
    if state.model and _is_another(config, folder, lambda last: model_folder(last.model.path)):
        refuse_other_folder(state.model, model_identity(folder), path)
    if state.teacher and teacher is not None and _is_another(config, teacher, teacher_folder):
        refuse_other_teacher(state.teacher, model_identity(teacher), path)


def _newest_state(directory: Path) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint whose state.json can be read, and its content; None if there is none."""
    for path in reversed(checkpoint_paths(directory)):
        try:
            return path, CheckpointState.model_validate_json((path / STATE).read_bytes())
        except (OSError, ValidationError):  # the trainer reports it, and uses the one before
            continue
    return None


def teacher_folder(config: Config) -> Path | None:
    """Return the folder of the teacher that scores tokens; None if none does."""
    scores = config.train.teacher_weight and config.teacher.model
    return model_folder(config.teacher.model) if scores else None


def _is_another(config: Config, now: Path, folder: Callable[[Config], Path | None]) -> bool:
    """Return True if the run had another folder than `now` at its last start."""
    try:
        last = folder(read_run(config.run.dir))
    except RunDirectoryError:  # the data service has recorded no run here
        return False
    return last is None or last.resolve() != now.resolve()
