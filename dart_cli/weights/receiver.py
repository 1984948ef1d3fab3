"""A worker's end of a weight channel; read without torch.

Receiver          the interface
ReceivedWeights   a weight set that a worker has received, for its engine to load
FileReceiver      the receiver of plain files; broadcast/receiver.py has the receiver of broadcasts
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dart_cli.policy.weight_set import WeightSet
from dart_cli.weights.manifest import check_announced


@dataclass(frozen=True)
class ReceivedWeights:
    """The weights that a worker received under a permit: the version that it named, or a later one."""

    source: WeightSet  # a directory is checked by its loader
    policy_version: int


class Receiver(Protocol):
    """A worker's end of a weight channel.

    There is one call at a time, and none while an engine loads the received weights.
    """

    async def prepare(self, policy_version: int) -> None:
        """Receive the announced version, or a later one, as far as that needs no permit.

        This never raises WeightsError: after a failure, `receive` tries again and raises the error.
        """
        ...

    async def receive(self, path: Path, policy_version: int, digest: str) -> ReceivedWeights:
        """Return the announced version or a later one. Raises WeightsError if none came by a deadline."""
        ...

    def close(self) -> None:
        """Remove the worker's copy."""
        ...


class FileReceiver:
    """A Receiver that returns the announced directory unchanged."""

    async def prepare(self, policy_version: int) -> None:
        """Do nothing: the files are read when it is this worker's turn."""

    async def receive(self, path: Path, policy_version: int, digest: str) -> ReceivedWeights:
        """Return the announced directory; its files are checked when they are loaded. Raises WeightsError."""
        await asyncio.to_thread(check_announced, path, policy_version, digest)
        return ReceivedWeights(path, policy_version)

    def close(self) -> None:
        """Do nothing: there is no copy."""
