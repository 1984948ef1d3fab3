"""Hyperparameters that the configuration leaves open: they follow from the rows and the model.

Hyperparameters          learning rates, batch and epochs, and why they were chosen
choose_hyperparameters   fills in what the configuration leaves open
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dart_cli.config.learning_rate import rate_for
from dart_cli.config.schema import TuneConfig

LR = (1e-3, 5e-6)
LR_HEAD = (3e-3, 1e-4)
"""Learning rates of the tiny model, found by experiments, and of GUI-Actor's 7B, as published (arXiv
2506.03143)."""

LORA_FACTOR, LORA_MOST = 10.0, 2e-3
"""The rate of adapters in multiples of a model's, and its greatest value: adapters can be trained faster."""

BATCHES = ((512, 8), (2048, 16))
"""(rows, batch) pairs: the first one with more rows than the data applies; if none has, LARGE_BATCH."""
LARGE_BATCH = 32

UPDATES = 400
"""Least number of updates that a stage should have."""
EPOCHS = (2, 40)
"""Least and greatest number of epochs: rows that are seen too often are learned by heart."""


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a training."""

    lr: float
    lr_head: float
    batch: int
    epochs: float
    reasons: Mapping[str, str]  # of those that the configuration leaves open: name -> reason

    @property
    def line(self) -> str:
        """The values that were chosen, with their reasons, in one line; empty if none was."""
        parts = [
            f"tune.{key} = {getattr(self, key):g} ({why})" for key, why in self.reasons.items()
        ]
        return f"chosen: {', '.join(parts)}" if parts else ""


def choose_hyperparameters(
    tune: TuneConfig, *, rows: int, parameters: int, lora: bool, points: bool
) -> Hyperparameters:
    """Return the hyperparameters of `tune`; open ones follow from the numbers of rows and parameters."""
    reasons: dict[str, str] = {}
    size = f"{_size_text(parameters)} parameters"
    lr, batch, epochs = tune.lr, tune.batch, tune.epochs
    if lr is None:
        lr = rate_for(parameters, LR, digits=2)
        lr = min(LORA_MOST, _rounded(LORA_FACTOR * lr)) if lora else lr
        reasons["lr"] = f"adapters of a model of {size}" if lora else size
    if batch is None:
        batch = next((size for most, size in BATCHES if rows < most), LARGE_BATCH)
        reasons["batch"] = f"{rows} rows"
    if epochs is None:
        shares = (tune.head_share, 1.0 - tune.head_share) if points else (1.0,)
        shortest = min(share for share in shares if share > 0)
        least, most = EPOCHS
        enough = math.ceil(UPDATES * batch / (max(1, rows) * shortest))
        epochs = float(min(most, max(least, enough)))
        reasons["epochs"] = f"{math.ceil(epochs * rows / batch)} updates"
    return Hyperparameters(lr, rate_for(parameters, LR_HEAD, digits=2), batch, epochs, reasons)


def _rounded(value: float) -> float:
    """Return a number rounded to two digits."""
    return float(f"{value:.1e}")


def _size_text(parameters: int) -> str:
    size, unit = (
        (parameters / 1e9, "billion") if parameters >= 1e9 else (parameters / 1e6, "million")
    )
    return f"{size:.2g} {unit}"
