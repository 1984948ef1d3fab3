"""The folder of an unfinished training, OUT.part, beside the folder that it will write.

    Progress         how far the training is
    TrainingFolder   the settings, state, curve and first measurement on disk, for one process at a time

Its files: settings.json, progress.json, state-STAGE-UPDATES.safetensors, curve.jsonl, before.json.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bus.errors import CheckpointError, UserError
from dart_cli.runtime.work_folder import (
    JsonLines,
    StoredModel,
    WorkFolder,
    write_whole,
)
from dart_cli.train.base import Tensors
from dart_cli.tune.held_out import Measurement
from dart_cli.tune.settings import TuneSettings

PROGRESS, CURVE, BEFORE = "progress.json", "curve.jsonl", "before.json"

Point = dict[str, Any]
_Stored = TypeVar("_Stored", bound=StoredModel)


class Progress(StoredModel):
    """How far a training is."""

    stage: int = 0  # index of the current stage
    updates: int = 0  # in this stage
    seconds: float = 0.0  # in this stage
    stages: tuple[tuple[int, float], ...] = ()  # updates and seconds of the earlier stages
    state: str = ""  # name of the file; empty at the beginning
    curve: int = 0  # bytes of curve.jsonl that belong to this state


class TrainingFolder:
    """The folder of an unfinished training. Use it as a context manager."""

    def __init__(self, path: Path, settings: TuneSettings, *, fresh: bool = False) -> None:
        """Open or make a folder; with `fresh` an older one is removed.

        Raises UserError if it has other settings, is no such folder, or is in use.
        """
        self.path = path
        self._work_folder = WorkFolder(path, settings, fresh=fresh)
        if self._work_folder.moved is not None:
            shutil.rmtree(self._work_folder.moved)
        try:
            self.progress = _read(path / PROGRESS, Progress) or Progress()
            (path / CURVE).touch()
            os.truncate(path / CURVE, self.progress.curve)
            self._curve: JsonLines[Point] = JsonLines(
                path / CURVE, TypeAdapter(Point), self._work_folder.busy
            )
        except BaseException:
            self._work_folder.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._curve.close()
        self._work_folder.close()

    def first_measurement(self, measure: Callable[[], Measurement]) -> Measurement:
        """Return the measurement of the model before the training; `measure` makes it at the first start."""
        measurement = _read(self.path / BEFORE, Measurement)
        if measurement is None:
            measurement = measure()
            write_whole(self.path / BEFORE, measurement.model_dump_json().encode())
        return measurement

    def state(self) -> Tensors | None:
        """Return the state to continue from; None at the beginning.

        Raises CheckpointError if it cannot be read.
        """
        if not self.progress.state:
            return None
        try:
            tensors: Tensors = load_file(self.path / self.progress.state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.path / self.progress.state} cannot be read ({error}); begin anew with --fresh"
            ) from None
        return tensors

    def save(self, progress: Progress, tensors: Tensors) -> None:
        """Save a state, from which the next start continues, and remove the one before it."""
        name = f"state-{progress.stage}-{progress.updates}.safetensors"
        partial = self.path / f"{name}.tmp"
        save_file({key: _on_cpu(tensor) for key, tensor in tensors.items()}, partial)
        partial.replace(self.path / name)
        self.progress = progress.model_copy(update={"state": name, "curve": self._curve.size})
        write_whole(self.path / PROGRESS, self.progress.model_dump_json().encode())
        for path in self.path.glob("state-*"):
            if path.name != name:
                path.unlink()

    def add_point(self, point: Point) -> None:
        """Add a point to the curve."""
        self._curve.add(point)

    def curve(self) -> list[Point]:
        """Return all points of the curve."""
        return list(self._curve.pieces)

    def remove(self) -> None:
        """Remove the folder, once the training is over and the new model is written."""
        shutil.rmtree(self.path)


def _read(path: Path, kind: type[_Stored]) -> _Stored | None:
    """Return the content of a file; None if there is none. Raises UserError if it cannot be read."""
    if not path.is_file():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(f"{path} cannot be read; begin anew with --fresh") from None


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as safetensors can save it."""
    return tensor.detach().to("cpu").contiguous()
