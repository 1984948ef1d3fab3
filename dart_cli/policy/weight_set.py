"""A weight set as an engine loads it, whichever channel it came over; without torch.

CheckedSet    a set that was checked when it was received
WeightSet     a published directory, still to be checked, or a CheckedSet
directory_of  the files of either
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CheckedSet(Protocol):
    """A weight set that was checked byte for byte when it was received (weights/broadcast/receiver.py).

    It changes with the next version: an engine copies what it loads.
    """

    @property
    def directory(self) -> Path:
        """Its files: manifest.json beside model.safetensors."""
        ...

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors, if they fit the model's `expected` and are finite. Raises WeightsError."""
        ...


WeightSet = Path | CheckedSet
"""A published directory, still to be checked by its loader, or a set that was received."""


def directory_of(weights: WeightSet) -> Path:
    """Return the files of a set: manifest.json beside its *.safetensors."""
    return weights if isinstance(weights, Path) else weights.directory
