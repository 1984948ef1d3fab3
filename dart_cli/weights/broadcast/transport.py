"""The common part of both backends of a group: addresses, places, the interface, and deadlines.

    Transport   the backend, and the address or device by which a process takes part
    Member      the place of this process in a group
    ByteGroup   the interface of a group of either backend

All processes know in advance which bytes will come, so only tensors of bytes are sent, and no pickles. The
deadline `STALL_S` is for one bucket: a process that hangs delays the others by that much, however large the
set is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from dart_cli.weights.flat_weights import FlatWeights

Backend = Literal["gloo", "nccl"]
JOIN_S = 10.0
"""Seconds after a process joins a group within which all others must have joined."""
STALL_S = 10.0
"""Seconds that one bucket may take."""
BUCKET_BYTES = 32 << 20
"""Most bytes of one broadcast."""
IN_FLIGHT = 2
"""Buckets on their way at once."""
MOST_BROKEN = 3
"""Broadcasts to a worker that may break off in a row. After them the trainer writes versions whole, and the
worker reads these until a broadcast arrives again."""


@dataclass(frozen=True)
class Transport:
    """The means by which a process takes part in groups; the same for all groups of a run."""

    backend: Backend
    address: str = "127.0.0.1"  # of this host, for gloo
    device: str = "auto"  # the GPU, for nccl

    def fix(self) -> str:
        """Return the part of an error that says what to change if no broadcast arrives."""
        others = '"file"' if self.backend == "gloo" else '"gloo" or "file"'
        return f"where that goes on, set weights.channel = {others} (docs/weights.md)"


@dataclass(frozen=True)
class Member:
    """The place of this process in a group."""

    group: str  # its name
    rank: int  # 0 is the trainer, from which all bytes come
    size: int


class ByteGroup(Protocol):
    """A group of either backend. There is one call at a time, except for `close`."""

    @property
    def name(self) -> str:
        """The name of the group."""
        ...

    def broadcast(
        self, flat: FlatWeights, names: Collection[str], stops: Callable[[], bool]
    ) -> int:
        """Broadcast the tensors `names` of `flat`, in main memory, from rank 0; return their number of bytes.

        Raises WeightsError if a process has died or hangs, and if `stops` returns True.
        """
        ...

    def close(self) -> None:
        """Leave the group. The waits of the other processes then fail."""
        ...


def join_deadline() -> float:
    """Return the time (time.monotonic) by which all must have joined a group that is made now."""
    return time.monotonic() + JOIN_S
