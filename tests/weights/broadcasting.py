"""What tests of the broadcast channel share: both ends in this process, and each in one of its own.

    python -m tests.weights.broadcasting trainer|worker JSON

runs an end until it is killed. With `hold`, it prints `begun` within its first broadcast and goes on when
its standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bus.endpoints import TRAIN, CurveKeys, Endpoints
from bus.messages import Reply, Request
from bus.requests import Replier, RequestClient, Requester
from bus.weights import TransferRequest
from dart_cli.runtime.background import background
from dart_cli.weights.broadcast import gloo as groups
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.gloo import GlooGroup
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import load
from dart_cli.weights.manifest import Published

ROOT = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


def tensors(value: float, size: int = 3000) -> Tensors:
    return {
        "a": torch.full((size,), float(value)),
        "b": torch.arange(50).bfloat16() * value,
        "frozen": torch.arange(40.0),
    }


def make_channel(
    run_dir: Path, transport: Transport, whole_every: int = 100, **files: Any
) -> BroadcastChannel:
    return BroadcastChannel(run_dir / "weights", transport, whole_every=whole_every, **files)


@contextlib.asynccontextmanager
async def serving(run_dir: Path, channel: BroadcastChannel) -> AsyncIterator[set[str]]:
    """The trainer's address, in this process; yields the workers that have asked to take part."""
    asked: set[str] = set()

    async def answer(client: str, request: Request) -> Reply:
        if isinstance(request, TransferRequest) and request.tensors:
            asked.add(request.worker)
        return await channel.answer(client, request)

    async with (
        Replier(Endpoints(run_dir).address(TRAIN)) as replier,
        background(replier.serve(answer)),
    ):
        yield asked
    channel.close()


class LateClient:
    """A worker's client whose requests to take part go out late."""

    def __init__(self, client: RequestClient, late_s: float) -> None:
        self._client = client
        self._late_s = late_s

    async def request(self, message: Request, deadline_s: float) -> Reply:
        if isinstance(message, TransferRequest):
            await asyncio.sleep(self._late_s)
        return await self._client.request(message, deadline_s)


@contextlib.asynccontextmanager
async def receiving(
    run_dir: Path,
    transport: Transport,
    worker: str = "rollout-0",
    deadline_s: float = 20,
    address: str = "",
    curve: CurveKeys | None = None,
    late_s: float = 0,
) -> AsyncIterator[BroadcastReceiver]:
    """A worker's end, in this process."""
    address = address or Endpoints(run_dir).address(TRAIN)
    async with Requester(address, name=worker, peer="train", curve=curve) as train:
        copy = run_dir / "copies" / worker
        client = LateClient(train, late_s)
        receiver = BroadcastReceiver(worker, client, copy, transport, deadline_s)
        yield receiver
        receiver.close()


def of_rank(transport: Transport, rank: int) -> Transport:
    """Return the transport for the GPU of a rank."""
    return transport if transport.backend == "gloo" else replace(transport, device=f"cuda:{rank}")


async def take(receiver: BroadcastReceiver, announced: Published, like: Tensors) -> Tensors:
    received = await receiver.receive(announced.path, announced.policy_version, announced.digest)
    source = received.source
    result = load(source, like) if isinstance(source, Path) else source.load(like)
    return {name: tensor.clone() for name, tensor in result.items()}


def same(mine: Tensors, expected: Tensors) -> bool:
    return mine.keys() == expected.keys() and all(
        torch.equal(mine[n], expected[n]) for n in expected
    )


# --- an end in a process of its own -----------------------------------------------------------


@contextlib.contextmanager
def process(end: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The end in a process of its own, with a pipe to and from it."""
    with running("tests.weights.broadcasting", end, json.dumps(options)) as started:
        yield started


@contextlib.contextmanager
def running(
    module: str, *arguments: str, enter: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`enter` is put before the interpreter's command, e.g. to enter a network namespace."""
    started = subprocess.Popen(
        [*enter, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def go_on(started: subprocess.Popen[str]) -> None:
    """Let a process go on from the point where it waits."""
    assert started.stdin is not None
    started.stdin.close()
    started.stdin = None


async def line_of(started: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of its output."""
    return await asyncio.to_thread(next_line, started)


def next_line(started: subprocess.Popen[str]) -> dict[str, Any]:
    """The same where no event loop runs."""
    assert started.stdout is not None
    result = json.loads(started.stdout.readline())
    assert isinstance(result, dict)
    return result


def tell(**values: object) -> None:
    """Write a line for `line_of`."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def hold_in_first_broadcast() -> None:
    """Stop within the first broadcast, after some buckets, until standard input is closed."""
    through = GlooGroup.broadcast
    groups.BUCKET_BYTES = 1 << 20

    def broadcast(self: Any, flat: Any, names: Any, stops: Callable[[], bool]) -> int:
        count = 0

        def stops_too() -> bool:
            nonlocal count
            count += 1
            if count == 4:
                tell(begun=self.name)
                sys.stdin.read()
            return stops()

        GlooGroup.broadcast = through  # type: ignore[method-assign]
        return through(self, flat, names, stops_too)

    GlooGroup.broadcast = broadcast  # type: ignore[method-assign]


async def trainer(run_dir: Path, transport: Transport, size: int) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1, size), 0)
    published = channel.publish(tensors(2, size), 1)
    async with Replier(Endpoints(run_dir).address(TRAIN)) as replier:
        tell(path=str(published.path), digest=published.digest)
        await replier.serve(channel.answer)


async def worker(
    run_dir: Path,
    transport: Transport,
    version: int,
    name: str,
    address: str,
    curve: CurveKeys | None,
) -> None:
    """Prepare `version` again and again; print each version of the copy."""
    version_before = None
    async with receiving(run_dir, transport, name, 60, address, curve) as receiver:
        while True:
            await receiver.prepare(version)
            if receiver.mirror.version != version_before:
                version_before = receiver.mirror.version
                tell(
                    held=version_before and version_before.policy_version, bytes=receiver.read_bytes
                )
                version += 1
            await asyncio.sleep(0.05)


def main() -> None:
    end, options = sys.argv[1], json.loads(sys.argv[2])
    run_dir, transport = Path(options["run_dir"]), Transport(**options["transport"])
    if options.get("stall_s"):
        groups.STALL_S = options["stall_s"]
    groups.BUCKET_BYTES = 1 << 20
    if options.get("hold"):
        hold_in_first_broadcast()
    if end == "trainer":
        asyncio.run(trainer(run_dir, transport, options["size"]))
    else:
        curve = CurveKeys(**options["curve"]) if options.get("curve") else None
        asyncio.run(
            worker(
                *(run_dir, transport, options["version"], options["worker"]),
                *(options.get("address", ""), curve),
            )
        )


if __name__ == "__main__":
    main()
