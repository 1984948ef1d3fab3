"""A worker's end of the run's weight channel.

    receiving      the receiver that a configuration asks for, closed at the end
    FileReceiver   the receiver of plain files

The others are in dart_cli.weights: they import torch, which a scripted worker does not need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from bus.endpoints import TRAIN
from bus.requester import Requester
from dart_cli.config.endpoints import own_address, run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.weights.base import Received, Receiver
from dart_cli.weights.manifest import check_announced


class FileReceiver:
    """Takes the directory that was announced, as it stands. See dart_cli.weights.base.Receiver."""

    async def prepare(self, policy_version: int) -> None:
        """Nothing: files are read when it is this worker's turn."""

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """The announced directory; its files are checked when they are loaded. Raises WeightsError."""
        await asyncio.to_thread(check_announced, path, policy_version, digest)
        return Received(path, policy_version)

    def close(self) -> None:
        """Nothing to free."""


@contextlib.asynccontextmanager
async def receiving(config: Config, worker: str) -> AsyncIterator[Receiver]:
    """The receiver of `worker`. Raises RunDirectoryError, ConfigError."""
    copy = config.run.dir / "copies" / worker
    async with contextlib.AsyncExitStack() as stack:
        receiver: Receiver = FileReceiver()
        if config.weights.channel != "file":
            from dart_cli.weights.broadcast.group import Transport
            from dart_cli.weights.broadcast.receiver import BroadcastReceiver

            address, curve = run_endpoints(config).address(TRAIN), run_curve(config)
            train = await stack.enter_async_context(
                Requester(address, name=worker, peer="train", curve=curve)
            )
            transport = Transport(
                config.weights.channel, own_address(config), config.rollout.device
            )
            receiver = BroadcastReceiver(worker, train, copy, transport, config.sync.deadline_s)
        elif config.weights.delta:
            from dart_cli.weights.mirror import DeltaReceiver

            receiver = DeltaReceiver(copy)
        stack.callback(receiver.close)
        yield receiver
