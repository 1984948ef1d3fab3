"""What both backends of a group have in common: where a process takes part, and what may take how long.

    Transport   the backend, and what a process takes part by
    Member      this process's place in a group
    ByteGroup   the interface of a group of either backend

All ends know which bytes come, so nothing but tensors of bytes travels; no pickle. Each bucket has
`STALL_S`: a process that hangs costs the others that long, however large the set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from dart_cli.weights.flat_weights import FlatWeights

Backend = Literal["gloo", "nccl"]
JOIN_S = 10.0
"""Seconds from when one process joins until all others must have joined."""
STALL_S = 10.0
"""Seconds that one bucket may take."""
BUCKET_BYTES = 32 << 20
"""Most bytes of one broadcast."""
IN_FLIGHT = 2
"""Buckets on their way at once."""
MOST_BROKEN = 3
"""Broadcasts to a worker that may break off in a row; then the trainer writes versions whole, and the worker reads
those until a broadcast arrives again."""


@dataclass(frozen=True)
class Transport:
    """By what a process takes part in groups, the same for all groups of a run."""

    backend: Backend
    address: str = "127.0.0.1"  # of this host, for gloo
    device: str = "auto"  # the GPU, for nccl

    def cure(self) -> str:
        """Return what to change where no broadcast arrives, for an error."""
        others = '"file"' if self.backend == "gloo" else '"gloo" or "file"'
        return f"where that goes on, set weights.channel = {others} (docs/weights.md)"


@dataclass(frozen=True)
class Member:
    """This process's place in a group."""

    group: str  # its name
    rank: int  # 0 is the trainer, from which all bytes come
    size: int


class ByteGroup(Protocol):
    """A group of either backend. One call at a time, `close` apart."""

    @property
    def name(self) -> str:
        """Of the group."""
        ...

    def broadcast(
        self, flat: FlatWeights, names: Collection[str], stops: Callable[[], bool]
    ) -> int:
        """Bring the tensors `names` of `flat`, in main memory, from rank 0 to all; returns their bytes.

        Raises WeightsError where a process has gone or hangs, and where `stops` says so.
        """
        ...

    def close(self) -> None:
        """Leave the group; the waits of the other processes then fail."""
        ...


def join_deadline() -> float:
    """By when (time.monotonic) all must have joined a group that is made now."""
    return time.monotonic() + JOIN_S
