"""The folder of a training that is not over, beside the folder that it will write: OUT.part.

    Progress       where the training is
    KeptTraining   settings, state, curve and the first measurement on disk; one process at a time

settings.json  progress.json  state-N.safetensors  curve.jsonl  before.json
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
from dart_cli.tune.held_out import Measured
from dart_cli.tune.settings import TuneSettings

PROGRESS, CURVE, BEFORE = "progress.json", "curve.jsonl", "before.json"

Point = dict[str, Any]
_Kept = TypeVar("_Kept", bound=StoredModel)


class Progress(StoredModel):
    """Where a training is."""

    stage: int = 0  # index
    updates: int = 0  # of the stage
    seconds: float = 0.0  # of the stage
    stages: tuple[tuple[int, float], ...] = ()  # updates and seconds of those that are over
    state: str = ""  # file
    curve: int = 0  # bytes of curve.jsonl that belong to it


class KeptTraining:
    """What is on disk of a training. Use as a context manager."""

    def __init__(self, folder: Path, settings: TuneSettings, *, fresh: bool = False) -> None:
        """Open or begin a folder; with `fresh` an older one is removed.

        Raises UserError where it is of other settings, is no such folder, or is in use.
        """
        self.folder = folder
        self._kept = WorkFolder(folder, settings, fresh=fresh)
        if self._kept.moved is not None:
            shutil.rmtree(self._kept.moved)
        try:
            self.progress = _read(folder / PROGRESS, Progress) or Progress()
            (folder / CURVE).touch()
            os.truncate(folder / CURVE, self.progress.curve)
            self._curve: JsonLines[Point] = JsonLines(
                folder / CURVE, TypeAdapter(Point), self._kept.busy
            )
        except BaseException:
            self._kept.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._curve.close()
        self._kept.close()

    def measured(self, measure: Callable[[], Measured]) -> Measured:
        """Return what the model was before the training: measured once, at the first start."""
        found = _read(self.folder / BEFORE, Measured)
        if found is None:
            found = measure()
            write_whole(self.folder / BEFORE, found.model_dump_json().encode())
        return found

    def state(self) -> Tensors | None:
        """Return the state to go on from; None at the beginning. Raises CheckpointError."""
        if not self.progress.state:
            return None
        try:
            found: Tensors = load_file(self.folder / self.progress.state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / self.progress.state} cannot be read ({error}); begin anew with --fresh"
            ) from None
        return found

    def save(self, progress: Progress, tensors: Tensors) -> None:
        """Keep a state: from now on a start goes on from it. The one before it is removed."""
        name = f"state-{progress.stage}-{progress.updates}.safetensors"
        partial = self.folder / f"{name}.tmp"
        save_file({key: _whole(each) for key, each in tensors.items()}, partial)
        partial.replace(self.folder / name)
        self.progress = progress.model_copy(update={"state": name, "curve": self._curve.size})
        write_whole(self.folder / PROGRESS, self.progress.model_dump_json().encode())
        for path in self.folder.glob("state-*"):
            if path.name != name:
                path.unlink()

    def add_point(self, point: Point) -> None:
        """One more point of the curve."""
        self._curve.add(point)

    def curve(self) -> list[Point]:
        """All points."""
        return list(self._curve.pieces)

    def remove(self) -> None:
        """Remove the folder: the training is over, and what it made is elsewhere."""
        shutil.rmtree(self.folder)


def _read(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Return what is in a file; None where there is none."""
    if not path.is_file():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(f"{path} cannot be read; begin anew with --fresh") from None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """As a file holds it."""
    return tensor.detach().to("cpu").contiguous()
