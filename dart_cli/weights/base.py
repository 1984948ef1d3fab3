"""What a weight channel is: the trainer publishes whole versions, workers take the newest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Published:
    """One complete, immutable weight set."""

    policy_version: int
    path: Path  # directory with manifest.json
    digest: str  # of the manifest, which holds the tensors' digest
    size_bytes: int


class WeightChannel(Protocol):
    """The trainer's end. A version, once published, means these weights for ever."""

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Make `tensors` by name available as `policy_version`, all at once.

        Raises WeightsError if the version exists with other weights or cannot be written.
        """
        ...

    def newest(self) -> Published | None:
        """The newest complete set, None before the first."""
        ...

    def resume(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Publish what a trainer starts from, as `policy_version` or, if that is taken, later."""
        ...
