"""Writes the trainer's metrics by update, for TensorBoard and Weights & Biases.

    MetricWriter   TensorBoard event files in RUN/tensorboard, always; Weights & Biases where
                   train.wandb names a project
    check_wandb    an early error where its package is missing

W&B keeps one run for a run directory and resumes it with it; failures of its service do not reach the
trainer (WANDB_MODE=offline keeps everything local).
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
    """Raise MissingPartError where W&B is asked for and not installed."""
    if config.train.wandb and importlib.util.find_spec("wandb") is None:
        raise MissingPartError(
            "train.wandb needs the package wandb: pip install wandb, or leave train.wandb empty"
        )


class MetricWriter:
    """A context manager; `add` takes the metrics of an update."""

    def __init__(self, config: Config, updates: int) -> None:
        """Keep the metrics of the `updates` that the run has done; those written of later ones are dropped."""
        self._tensorboard = SummaryWriter(
            str(config.run.dir / "tensorboard"), purge_step=updates + 1, flush_secs=FLUSH_S
        )
        self._wandb = _begin_wandb(config) if config.train.wandb else None

    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an update under `train/`."""
        named = {f"train/{name}": value for name, value in metrics.items()}
        for name, value in named.items():
            self._tensorboard.add_scalar(name, value, update)
        if self._wandb is not None:
            self._wandb.log({**named, "update": update})

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
    # A trainer that resumed from its checkpoint sends updates again: the newest value counts.
    run.define_metric("train/*", step_metric="update")
    return run


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="ascii")
    return path.read_text(encoding="ascii").strip()
