"""A worker's end of a weight channel; read without torch.

Receiver       the interface
Received       what a worker receives: a weight set for its engine to load
FileReceiver   the receiver of plain files; broadcast/receiver.py has that of broadcasts
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dart_cli.policy.weight_set import WeightSet
from dart_cli.weights.manifest import check_announced


@dataclass(frozen=True)
class Received:
    """The outcome of a permit: the version that it named, or a later one."""

    source: WeightSet  # a directory is checked by its loader
    policy_version: int


class Receiver(Protocol):
    """A worker's end. One call at a time, and none while an engine loads what was received."""

    async def prepare(self, policy_version: int) -> None:
        """Bring the announced version, or a later one, as far as that can be done without a permit.

        Never raises WeightsError: where it fails, `receive` tries again and says why.
        """
        ...

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """Get the announced version, or a later one. Raises WeightsError, by a deadline."""
        ...

    def close(self) -> None:
        """Remove the worker's copy."""
        ...


class FileReceiver:
    """Takes the directory that was announced, as it stands. See Receiver."""

    async def prepare(self, policy_version: int) -> None:
        """Nothing: files are read when it is this worker's turn."""

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """Return the announced directory; its files are checked when they are loaded. Raises WeightsError."""
        await asyncio.to_thread(check_announced, path, policy_version, digest)
        return Received(path, policy_version)

    def close(self) -> None:
        """Nothing to free."""
