"""Two hosts on one machine, for tests: network namespaces with a cable between them.

    python -m tests.weights.two_hosts trainer|worker CONFIG

runs an end of a configuration's weight channel on one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bus.endpoints import TRAIN
from bus.replier import Replier
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.rollout.receivers import receiving
from dart_cli.train.assembly import make_channel
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from tests.weights.broadcasting import tell, tensors

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Host:
    """One of the two."""

    address: str
    enter: tuple[str, ...]  # the command that runs another one there


class NotPermittedError(Exception):
    """The system allows no namespaces to this user, or has no tools for them."""


@contextlib.contextmanager
def two_hosts(*unseen: Path) -> Iterator[tuple[Host, Host]]:
    """A host and a second one, from which the folders `unseen` are empty. Raises NotPermittedError."""
    hide = "".join(f"mount -t tmpfs none '{path}' && " for path in unseen)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_held(["unshare", "--user", "--map-root-user", "--net"], ""))
        inside = ("nsenter", f"--target={first}", "--user", "--preserve-credentials")
        second = stack.enter_context(_held([*inside, "unshare", "--net", "--mount"], hide))
        hosts = []
        cable = f"ip link add cable type veth peer name cable netns {second} && "
        for pid, address, make in zip((first, second), ADDRESSES, (cable, ""), strict=True):
            mount = ["--mount"] if pid == second else []
            enter = (*inside[:1], f"--target={pid}", *inside[2:], "--net", *mount)
            hosts.append(Host(address, enter))
            commands = f"{make}ip addr add {address}/24 dev cable && ip link set cable up && ip link set lo up"
            done = subprocess.run(
                [*enter, "sh", "-c", commands], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise NotPermittedError(done.stderr.strip())
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def _held(enter: list[str], first: str) -> Iterator[int]:
    """The id of a process in new namespaces, which keeps them."""
    try:
        process = subprocess.Popen(
            [*enter, "sh", "-c", f"{first}echo $$; exec sleep 1000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise NotPermittedError(str(error)) from None
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            assert process.stderr is not None
            raise NotPermittedError(process.stderr.read().strip())
        yield process.pid
    finally:
        process.kill()
        process.communicate()


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
    """Hold each version in turn, and say where its copy differs from what was published."""
    async with receiving(config, "rollout-0") as receiver:
        assert isinstance(receiver, BroadcastReceiver)
        for version in range(100):
            while receiver._mirror.held is None or receiver._mirror.held.policy_version < version:
                await receiver.prepare(version)
                await asyncio.sleep(0.05)
            wanted = tensors(version)
            mine = receiver._mirror.load(wanted)
            differ = [name for name in wanted if not torch.equal(mine[name], wanted[name])]
            sees = await asyncio.to_thread(Path(sys.argv[3]).exists)
            tell(held=version, differ=differ, sees=sees)


def main() -> None:
    config = load_config(Path(sys.argv[2]), [])
    asyncio.run({"trainer": trainer, "worker": worker}[sys.argv[1]](config))


if __name__ == "__main__":
    main()
