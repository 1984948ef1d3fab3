"""The trainer's metrics by update, for TensorBoard and Weights & Biases.

    MetricWriter   writes TensorBoard event files in RUN/tensorboard, and to Weights & Biases if
                   train.wandb names a project
    check_wandb    raises an early error if the package of Weights & Biases is missing

W&B has one run for a run directory, and resumes it together with the directory. Failures of its service do
not affect the trainer. WANDB_MODE=offline keeps everything local.
"""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from bus.errors import MissingPartError
from dart_cli.config.schema import Config

FLUSH_S = 10


def check_wandb(config: Config) -> None:
    """Raise MissingPartError if train.wandb is set and the package is not installed."""
    if config.train.wandb and importlib.util.find_spec("wandb") is None:
        raise MissingPartError(
            "train.wandb needs the package wandb: pip install wandb, or leave train.wandb empty"
        )


class MetricWriter:
    """A writer of the metrics of updates. It is a context manager."""

    def __init__(self, config: Config, updates: int) -> None:
        """Open the files; drop metrics that were written for updates after the first `updates`."""
        self._tensorboard = SummaryWriter(
            str(config.run.dir / "tensorboard"), purge_step=updates + 1, flush_secs=FLUSH_S
        )
        self._wandb = _begin_wandb(config) if config.train.wandb else None

    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an update under `train/`."""
        scalars = {f"train/{name}": value for name, value in metrics.items()}
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, update)
        if self._wandb is not None:
            self._wandb.log({**scalars, "update": update})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))


def _begin_wandb(config: Config) -> Any:
    """Return the wandb.Run of this run directory."""
    wandb = importlib.import_module("wandb")
    run = wandb.init(
        project=config.train.wandb,
        name=config.run.dir.name,
        id=_run_id(config.run.dir / "wandb.id"),
        resume="allow",
        dir=str(config.run.dir),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(silent=True),
    )
    # A trainer that resumed from its checkpoint sends some updates again: the newest value counts.
    run.define_metric("train/*", step_metric="update")
    return run


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="ascii")
    return path.read_text(encoding="ascii").strip()
