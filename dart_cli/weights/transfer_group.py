"""Point-to-point transfer of bytes by torch.distributed: the trainer and one worker of its host.

    TransferGroup      a process group of world size 2, made by both ends within `JOIN_S`
    SENDER, RECEIVER   their ranks

Gloo's sockets have no authentication, so they are bound to 127.0.0.1, and the two ends meet through
a file in the run directory, which no other user can enter. Every wait has a deadline. After an error
of any kind both ends close the group and make another one. No pickle: only tensors of bytes, whose
number both ends know. Gloo aborts a process that receives another number of bytes than it expects,
so a group on which anything went wrong is never used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from bus.errors import WeightsError, first_line

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here

SENDER, RECEIVER = 0, 1
JOIN_S = 10.0
"""Seconds from when one end joins until the other must have joined."""
BUCKET_BYTES = 32 << 20
"""Most bytes of one message."""


class TransferGroup:
    """One end of the group. Not thread-safe."""

    def __init__(self, file: Path, rank: int) -> None:
        """Meet the other end at `file`. Raises WeightsError if it does not join within `JOIN_S`."""
        self.name = file.name
        self._other = 1 - rank
        wait = timedelta(seconds=JOIN_S)
        options = _distributed.ProcessGroupGloo._Options()  # noqa: SLF001 - its only constructor
        options._timeout = wait  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._devices = [  # noqa: SLF001
            _distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        ]
        try:
            store = _distributed.FileStore(str(file), 2)
            store.set_timeout(wait)
            self._group = _distributed.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the other end did not join in {JOIN_S:g} s: {first_line(error)}"
            ) from None

    def send(self, data: torch.Tensor, deadline: float) -> None:
        """Send uint8 [N], by `deadline` (time.monotonic). Raises WeightsError."""
        self._wait(lambda: self._group.send([data], self._other, 0), deadline)

    def receive(self, data: torch.Tensor, deadline: float) -> None:
        """Fill uint8 [N], by `deadline` (time.monotonic). Raises WeightsError."""
        self._wait(lambda: self._group.recv([data], self._other, 0), deadline)

    def close(self) -> None:
        """Leave the group; the waits of the other end then fail at once."""
        self._group.abort()

    def _wait(self, start: Callable[[], Any], deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WeightsError("the transfer took longer than its deadline")
        try:
            start().wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise WeightsError(f"the transfer broke off: {first_line(error)}") from None
