"""The process group by gloo: bytes travel over TCP, from main memory to main memory.

GlooGroup   a transport.ByteGroup over gloo; nccl.py has the group between GPUs
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed

from bus.errors import WeightsError, first_line
from dart_cli.weights.broadcast.rendezvous import GroupStore
from dart_cli.weights.broadcast.transport import (
    BUCKET_BYTES,
    IN_FLIGHT,
    JOIN_S,
    STALL_S,
    Member,
    Transport,
)
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.manifest import ranges

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here


class GlooGroup:
    """A ByteGroup over gloo.

    Any error ends it, since gloo aborts a process that receives too many or too few bytes. Gloo's sockets
    have no authentication. They are bound to one address, which is loopback if the run is on one host.
    """

    def __init__(self, transport: Transport, member: Member, store: GroupStore) -> None:
        """Join the group. Raises WeightsError if a process does not join within `JOIN_S`."""
        self.name = member.group
        self._store = store  # the backend calls it as long as the group exists
        options = _distributed.ProcessGroupGloo._Options()  # noqa: SLF001 - its only constructor
        options._timeout = timedelta(seconds=STALL_S)  # noqa: SLF001
        options._threads = IN_FLIGHT  # noqa: SLF001
        try:
            device = _distributed.ProcessGroupGloo.create_device(hostname=transport.address)
        except RuntimeError as error:
            raise WeightsError(
                f"gloo cannot listen at {transport.address}: {first_line(error)}"
            ) from None
        options._devices = [device]  # noqa: SLF001
        try:
            self._group = _distributed.ProcessGroupGloo(store, member.rank, member.size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"a group of {member.size} was not joined by all in {JOIN_S:g} s: "
                f"{first_line(error)}"
            ) from None
        store.seal()

    def broadcast(
        self, flat: FlatWeights, names: Collection[str], stops: Callable[[], bool]
    ) -> int:
        """Broadcast tensors, as ByteGroup.broadcast does."""
        options = _distributed.BroadcastOptions()
        options.rootRank = 0
        under_way: deque[Any] = deque()
        size = 0
        try:
            for begin, end in ranges(flat.layout, names, BUCKET_BYTES):
                if stops():
                    raise WeightsError("this process is closing")
                under_way.append(self._group.broadcast([flat.data[begin:end]], options))
                size += end - begin
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().wait(timedelta(seconds=STALL_S))
            while under_way:
                under_way.popleft().wait(timedelta(seconds=STALL_S))
        except RuntimeError as error:
            raise WeightsError(f"the broadcast broke off: {first_line(error)}") from None
        return size

    def close(self) -> None:
        """Leave the group, as ByteGroup.close does."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
