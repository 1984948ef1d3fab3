"""What a training uses where the configuration leaves it open, by its rows and its model.

chosen     learning rates, batch and epochs, and where each came from
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dart_cli.config.learning_rate import rate_for
from dart_cli.config.schema import TuneConfig

LR = (1e-3, 5e-6)
LR_HEAD = (3e-3, 1e-4)
"""Of the tiny model, as measured on it, and of GUI-Actor's 7B, as published (arXiv 2506.03143)."""

LORA_FACTOR, LORA_MOST = 10.0, 2e-3
"""Adapters alone bear higher rates."""

BATCHES = ((512, 8), (2048, 16))
"""Examples of an update for fewer rows than the first number; LARGE_BATCH for more."""
LARGE_BATCH = 32

UPDATES = 400
"""Updates that a stage should have at least."""
EPOCHS = (2, 40)
"""Fewest and most: rows that are seen too often are learned by heart."""


@dataclass(frozen=True)
class Chosen:
    """What a training uses."""

    lr: float
    lr_head: float
    batch: int
    epochs: float
    reasons: Mapping[str, str]  # why, of each that the configuration leaves open

    @property
    def line(self) -> str:
        """Each value that was chosen, and where it came from; empty for none."""
        told = [f"tune.{key} = {getattr(self, key):g} ({why})" for key, why in self.reasons.items()]
        return f"chosen: {', '.join(told)}" if told else ""


def chosen(tune: TuneConfig, *, rows: int, parameters: int, lora: bool, points: bool) -> Chosen:
    """Fill in what `tune` leaves open, for so many rows that are learned and a model of so many parameters."""
    reasons: dict[str, str] = {}
    size = f"{_counted(parameters)} parameters"
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
        wanted = math.ceil(UPDATES * batch / (max(1, rows) * shortest))
        epochs = float(min(most, max(least, wanted)))
        reasons["epochs"] = f"{math.ceil(epochs * rows / batch)} updates"
    return Chosen(lr, rate_for(parameters, LR_HEAD, digits=2), batch, epochs, reasons)


def _rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.1e}")


def _counted(parameters: int) -> str:
    size, unit = (
        (parameters / 1e9, "billion") if parameters >= 1e9 else (parameters / 1e6, "million")
    )
    return f"{size:.2g} {unit}"
