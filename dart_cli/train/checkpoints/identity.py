"""What a checkpoint's state.json says, read without torch: how far the run is, and of which model.

    TrainerProgress   where the run is
    TrainedPart       which tensors of the model are trained: its adapters' settings, or which weights
    CheckpointState   both, the identity of the model folder, and the digests of the files
    checkpoint_paths  the complete checkpoints of a folder; newest_updates, how far the newest one is
    refuse_other      the error where a configuration cannot go on from the newest checkpoint

`dart up`, `dart data` and `dart train` call `refuse_other` before anything starts or is recorded; the
trainer compares again with the checkpoint that it loads.
"""

from __future__ import annotations

import re
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
    """How far the trainer is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    updates: int = 0  # batches used, skipped ones included
    skipped: int = 0  # of these, left out: see Update.note
    policy_version: int = 0  # newest published when this was written
    last_batch_id: int = 0  # newest batch in the weights
    batches_trained: list[int] = []  # ids since the previous complete checkpoint


class TrainedPart(BaseModel):
    """Which tensors of the model are trained, and what they mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lora: LoraConfig | None = None  # adapters; None for the weights themselves
    freeze_vision: bool = False

    @classmethod
    def of(cls, config: Config) -> TrainedPart:
        """Return what a trainer with this configuration trains."""
        return cls(lora=config.model.lora, freeze_vision=config.model.freeze_vision)

    def refuse_other(self, now: TrainedPart, checkpoint: Path) -> None:
        """Raise ConfigError where `now` cannot go on from a `checkpoint` of this one.

        What was frozen may be trained from now on; what was trained cannot be frozen.
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
    """state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    progress: TrainerProgress
    digests: dict[str, str]  # file name -> BLAKE2b
    model: str  # identity of the model folder; empty of a learner without one
    trained: TrainedPart
    own: str = ""  # digest of all above

    def sealed(self) -> CheckpointState:
        """Return this state with its own digest."""
        text = self.model_copy(update={"own": ""}).model_dump_json()
        return self.model_copy(update={"own": blake2b(text.encode()).hexdigest()})

    def text(self) -> str:
        """Return the file."""
        return self.model_dump_json(indent=1)


def checkpoint_paths(directory: Path) -> list[Path]:
    """Checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_updates)


def newest_updates(directory: Path) -> int:
    """Return the updates that the newest checkpoint in `directory` holds; 0 where there is none, or no folder."""
    try:
        return max(map(_updates, checkpoint_paths(directory)), default=0)
    except OSError:  # the folder was moved, or its disk does not answer
        return 0


def _updates(path: Path) -> int:
    return int(path.name[1:])


def refuse_other_folder(before: str, now: str, checkpoint: Path) -> None:
    """Raise ModelError where a `checkpoint` belongs to a model folder of another identity."""
    if before and now and before != now:
        raise ModelError(
            f"model.path: {checkpoint} leaves what is not trained to the model folder, and that holds other "
            "tensors now; put the folder back with which the run began, or choose another run.dir"
        )


def refuse_other(config: Config) -> None:
    """Raise ConfigError or ModelError where the run's newest checkpoint is of another model.

    A folder's tensors are read only where the run names another one than at its last start: the
    trainer reads them in any case.
    """
    newest = _newest_state(config.run.dir / "checkpoints")
    if newest is None:
        return
    path, state = newest
    state.trained.refuse_other(TrainedPart.of(config), path)
    if state.model and config.train.learner == "torch" and _names_another_folder(config):
        refuse_other_folder(state.model, model_identity(_folder(config)), path)


def _newest_state(directory: Path) -> tuple[Path, CheckpointState] | None:
    """Return the newest state.json that can be read, with its checkpoint."""
    for path in reversed(checkpoint_paths(directory)):
        try:
            return path, CheckpointState.model_validate_json((path / STATE).read_bytes())
        except (OSError, ValidationError):  # the trainer reports it, and uses the one before
            continue
    return None


def _names_another_folder(config: Config) -> bool:
    try:
        last = read_run(config.run.dir)
    except RunDirectoryError:  # data has recorded none here
        return False
    return _folder(last).resolve() != _folder(config).resolve()


def _folder(config: Config) -> Path:
    return model_folder(config.model.path)
