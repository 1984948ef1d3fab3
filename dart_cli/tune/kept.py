"""The folder of a training that is not over, beside the folder that it will write: OUT.part.

    TuneSettings   all that the weights depend on; a start with others is refused
    Progress      where the training is
    KeptTraining  settings, state, curve and the first measurement on disk; one process at a time

settings.json  progress.json  state-N.safetensors  curve.jsonl  before.json
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bus.errors import CheckpointError, UserError
from dart_cli.evaluation.results import StoredModel
from dart_cli.runtime.kept_folder import difference, lock, read_settings, write_whole
from dart_cli.train.base import Tensors
from dart_cli.tune.held_out import Measured

SETTINGS, PROGRESS, CURVE = "settings.json", "progress.json", "curve.jsonl"
BEFORE = "before.json"


class TuneSettings(StoredModel):
    """All that the trained weights depend on."""

    learned: str
    data_digest: str  # of the annotation files
    examples: int
    held_out: tuple[int, ...]  # rows that are not learned
    model_digest: str
    codec: str
    prompt: str  # system prompt, template, order of the parts
    coordinates: str
    max_pixels: int
    points: str
    head_share: float
    epochs: float
    seconds: float
    batch: int
    micro_batch: int
    pack_tokens: int
    lr: float
    lr_head: float
    lm_weight: float
    pointer_weight: float
    target: str
    gaussian_width: float
    suppress: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    freeze_vision: bool
    lora: str  # settings of the adapters; empty for none
    recompute: bool
    dtype: str
    device: str
    seed: int


class Progress(StoredModel):
    """Where a training is."""

    stage: int = 0  # index
    updates: int = 0  # of the stage
    seconds: float = 0.0  # of the stage
    stages: tuple[tuple[int, float], ...] = ()  # updates and seconds of those that are over
    state: str = ""  # file
    curve: int = 0  # bytes of curve.jsonl that belong to it


def refuse_other(folder: Path, settings: TuneSettings) -> None:
    """Raise UserError where a training that was begun in the folder cannot go on with these settings."""
    before = read_settings(folder / SETTINGS, TuneSettings, "begin anew with --fresh")
    if before and (changed := difference(settings, before)):
        if changed.startswith("data_digest"):
            changed = "what tune.data names has changed"
        raise UserError(
            f"{folder} is a training of other settings ({changed}); set them back, choose "
            "another tune.out, or begin anew with --fresh"
        )


class KeptTraining:
    """What is on disk of a training."""

    def __init__(self, folder: Path, settings: TuneSettings, *, fresh: bool = False) -> None:
        """Open or begin a folder; with `fresh` an older one is removed.

        Raises UserError where it is of other settings, is no such folder, or is in use.
        """
        self.folder = folder
        if folder.exists() and not (folder / SETTINGS).is_file():
            raise UserError(f"{folder} exists and is no training; name another tune.out")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(
            folder / CURVE,
            f"{folder} is in use by another `dart tune`; wait for it, or choose another tune.out",
        )
        if fresh:
            for path in folder.iterdir():
                if path.name != CURVE:
                    path.unlink()
        self.progress = Progress()
        try:
            self._open(settings)
        except BaseException:
            self._lock.close()
            raise
        os.truncate(folder / CURVE, self.progress.curve)

    def _open(self, settings: TuneSettings) -> None:
        refuse_other(self.folder, settings)
        path = self.folder / SETTINGS
        write_whole(path, settings.model_dump_json(indent=1).encode())
        if (self.folder / PROGRESS).is_file():
            try:
                self.progress = Progress.model_validate_json((self.folder / PROGRESS).read_bytes())
            except ValidationError:
                raise UserError(
                    f"{self.folder / PROGRESS} cannot be read; begin anew with --fresh"
                ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def measured(self, measure: Callable[[], Measured]) -> Measured:
        """What the model was before the training: measured once, at the first start."""
        path = self.folder / BEFORE
        if path.is_file():
            try:
                return Measured.model_validate_json(path.read_bytes())
            except ValidationError:
                raise UserError(f"{path} cannot be read; begin anew with --fresh") from None
        found = measure()
        write_whole(path, found.model_dump_json().encode())
        return found

    def state(self) -> Tensors | None:
        """The state to go on from; None at the beginning. Raises CheckpointError."""
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
        self._lock.flush()
        size = (self.folder / CURVE).stat().st_size
        self.progress = progress.model_copy(update={"state": name, "curve": size})
        write_whole(self.folder / PROGRESS, self.progress.model_dump_json().encode())
        for path in self.folder.glob("state-*"):
            if path.name != name:
                path.unlink()

    def add_point(self, point: dict[str, Any]) -> None:
        """One more point of the curve."""
        self._lock.write(json.dumps(point).encode() + b"\n")
        self._lock.flush()

    def curve(self) -> list[dict[str, Any]]:
        """All points."""
        return [json.loads(line) for line in (self.folder / CURVE).read_bytes().splitlines()]

    def remove(self) -> None:
        """Remove the folder: the training is over, and what it made is elsewhere."""
        self._lock.close()
        shutil.rmtree(self.folder)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """As a file holds it."""
    return tensor.detach().to("cpu").contiguous()
