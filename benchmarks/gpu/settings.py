"""What the GPU checks share: settings, clocks, how a check says that it failed, the model.

Needs torch alone until a check asks for a model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Size
    from dart_cli.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, Any]


class MissedError(Exception):
    """An error that says that this machine's packages cannot run a check."""


class BrokenError(Exception):
    """An error that says that a promise does not hold; `figures` is what was measured."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Settings:
    """The settings that all checks share."""

    device: str
    tiny: bool
    scratch: Path
    seconds: float = 3600.0  # that the check may take

    @property
    def size(self) -> Size:
        """The size of the model and of its work."""
        from benchmarks.gpu.parts import SEVEN_B, TINY

        return TINY if self.tiny else SEVEN_B

    @property
    def shards(self) -> Path:
        """The folder where `model` writes; raises MissedError if it did not get that far."""
        folder = self.scratch / "shards"
        if not (folder / "complete").exists():
            raise MissedError("check `model` made no model")
        return folder


class Clock:
    """A clock of the seconds on the device since it was made, or since `lap`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.lap()

    def lap(self) -> float:
        """Return the seconds since the last call, once all work on the device is done."""
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.perf_counter()
        spent, self._since = now - getattr(self, "_since", now), now
        return spent


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, float]]:
    """Yield a dictionary whose `gb` and `reserved_gb` are the peak's afterwards; 0 on a CPU."""
    peak = {"gb": 0.0, "reserved_gb": 0.0}
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    yield peak
    if device.startswith("cuda"):
        peak["gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9


def relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of `expected`."""
    values, expected = values.detach(), expected.detach()
    difference = torch.linalg.vector_norm(values.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


# --- the drawn model ------------------------------------------------------------------------------

COMPARED_LAYERS = 4


def config_of(settings: Settings, layers: int, **train: Any) -> Config:
    """Return the configuration of a run on the first `layers` layers."""
    from benchmarks.gpu.parts import folder_of
    from dart_cli.config.schema import Config

    folder = folder_of(settings.shards, settings.scratch / f"layers-{layers}", layers)
    text = {
        "model": {"path": str(folder), "dtype": "bfloat16", "freeze_vision": True},
        # The screens and the history of configs/osworld.toml: what engine and trainer are compared on.
        "policy": {"history_images": 5, "history_turns": 35},
        "env": {"options": {"size": list(settings.size.widest)}},
        "rollout": {"device": settings.device},
        "train": {
            "device": settings.device,
            "pack_tokens": settings.size.pack_tokens,
            "recompute": "layer",
            "parity_every": 0,
            **train,
        },
    }
    return Config.model_validate(text)


def written_layers(settings: Settings) -> int:
    """Return how many layers `model` wrote."""
    return len(list(settings.shards.glob("layer-*.safetensors")))


def tokens_alone(settings: Settings) -> Any:
    """Return the tokenizer and the preparer of the drawn model, without weights."""
    from benchmarks.gpu.parts import folder_of
    from dart_cli.policy.loader import load_policy

    folder = folder_of(settings.shards, settings.scratch / "layers-1", 1)
    return load_policy(folder, "bfloat16", weights=False)


def compared_layers(settings: Settings) -> int:
    """Return the number of layers of the models that are compared with each other."""
    return 1 if settings.tiny else min(COMPARED_LAYERS, written_layers(settings))
