"""A weight set as an engine loads it, whichever channel delivered it. This module does not import torch.

CheckedSet    a set that was checked when it was received
WeightSet     a published directory that is still to be checked, or a CheckedSet
directory_of  the directory of either
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CheckedSet(Protocol):
    """A weight set that was checked byte for byte when it was received (weights/broadcast/receiver.py).

    Receiving the next version overwrites it, so an engine copies the tensors that it loads.
    """

    @property
    def directory(self) -> Path:
        """The directory with manifest.json and model.safetensors."""
        ...

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by name. Raises WeightsError unless they are finite and match `expected`."""
        ...


WeightSet = Path | CheckedSet
"""A published directory that its loader still has to check, or a set that was received."""


def directory_of(weights: WeightSet) -> Path:
    """Return the directory of a set, which holds manifest.json and *.safetensors."""
    return weights if isinstance(weights, Path) else weights.directory
