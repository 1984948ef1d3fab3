"""An end of a configuration's weight channel, for tests that run the two on hosts of their own.

python -m tests.weights.two_hosts trainer|worker CONFIG
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from bus.endpoints import TRAIN
from bus.requests import Replier
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.rollout.worker import receiving
from dart_cli.train.publishing import make_channel
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from tests.weights.broadcasting import tell, tensors


async def trainer(config: Config) -> None:
    """Publish v0, and the next version for each line of standard input."""
    channel = make_channel(config)
    assert isinstance(channel, BroadcastChannel)
    channel.resume(tensors(0), 0)
    async with Replier(run_endpoints(config).address(TRAIN), curve=run_curve(config)) as replier:
        serving = asyncio.create_task(replier.serve(channel.answer))
        for version in range(1, 100):
            tell(published=version - 1)
            if not await asyncio.to_thread(sys.stdin.readline):
                break
            channel.publish(tensors(version), version)
        serving.cancel()


async def worker(config: Config) -> None:
    """Receive each version in turn, and report where the copy differs from the published one."""
    async with receiving(config, "rollout-0") as receiver:
        assert isinstance(receiver, BroadcastReceiver)
        for version in range(100):
            while (
                receiver.mirror.version is None or receiver.mirror.version.policy_version < version
            ):
                await receiver.prepare(version)
                await asyncio.sleep(0.05)
            expected = tensors(version)
            mine = receiver.mirror.load(expected)
            differ = [name for name in expected if not torch.equal(mine[name], expected[name])]
            sees = await asyncio.to_thread(Path(sys.argv[3]).exists)
            tell(held=version, differ=differ, sees=sees)


def main() -> None:
    config = load_config(Path(sys.argv[2]), [])
    asyncio.run({"trainer": trainer, "worker": worker}[sys.argv[1]](config))


if __name__ == "__main__":
    main()
