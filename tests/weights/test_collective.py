"""Promises of the collective channel, between real processes over gloo: exact, and never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from bus.endpoints import TRAIN, Endpoints
from bus.errors import ProtocolError, WeightsError
from bus.messages import TransferRequest
from bus.replier import Replier
from bus.requester import Requester
from dart_cli.runtime.background import background
from dart_cli.weights import collective, transfer_group
from dart_cli.weights.base import Published
from dart_cli.weights.collective import CollectiveChannel, CollectiveReceiver, meeting_place
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.manifest import WEIGHTS
from tests.waiting import until

ROOT = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def tensors(value: float, size: int = 3000) -> Tensors:
    return {
        "a": torch.full((size,), float(value)),
        "b": torch.arange(50).bfloat16() * value,
        "frozen": torch.arange(40.0),
    }


def make_channel(run_dir: Path, whole_every: int = 100) -> CollectiveChannel:
    files = FileChannel(run_dir / "weights", copies=True, whole_every=whole_every)
    return CollectiveChannel(files, meeting_place(run_dir), deadline_s=20)


@contextlib.asynccontextmanager
async def serving(run_dir: Path, channel: CollectiveChannel) -> AsyncIterator[None]:
    """The trainer's address, in this process."""
    async with (
        Replier(Endpoints(run_dir).address(TRAIN)) as replier,
        background(replier.serve(channel.answer)),
    ):
        yield
    channel.close()


@contextlib.asynccontextmanager
async def receiving(
    run_dir: Path, worker: str = "rollout-0", deadline_s: float = 20
) -> AsyncIterator[CollectiveReceiver]:
    async with Requester(Endpoints(run_dir).address(TRAIN), name=worker, peer="train") as train:
        receiver = CollectiveReceiver(
            worker, train, run_dir / "copies" / worker, meeting_place(run_dir), deadline_s
        )
        yield receiver
        receiver.close()


async def take(receiver: CollectiveReceiver, announced: Published, like: Tensors) -> Tensors:
    received = await receiver.receive(announced.path, announced.policy_version, announced.digest)
    assert not isinstance(received.source, Path)
    return {name: tensor.clone() for name, tensor in received.source.load(like).items()}


def same(mine: Tensors, wanted: Tensors) -> bool:
    return mine.keys() == wanted.keys() and all(torch.equal(mine[n], wanted[n]) for n in wanted)


async def test_what_is_published_arrives_bit_for_bit_and_what_is_frozen_only_once(
    run_dir: Path,
) -> None:
    channel = make_channel(run_dir)
    announced = channel.resume(tensors(0.1), 0)
    async with serving(run_dir, channel), receiving(run_dir) as receiver:
        assert same(await take(receiver, announced, tensors(0)), tensors(0.1))
        assert receiver.read_bytes == announced.size_bytes
        for version in (1, 2):
            wanted = tensors(version * 0.3)
            before = receiver.read_bytes
            announced = channel.publish(wanted, version)
            assert not (announced.path / WEIGHTS).exists()
            assert same(await take(receiver, announced, tensors(0)), wanted)
            assert receiver.read_bytes - before == announced.size_bytes - 40 * 4
            # As files too, for an engine that takes these.
            assert same(load(receiver._mirror.directory, tensors(0)), wanted)


async def test_a_set_of_other_shapes_is_received_whole(run_dir: Path) -> None:
    channel = make_channel(run_dir)
    announced = channel.resume(tensors(1), 0)
    async with serving(run_dir, channel), receiving(run_dir) as receiver:
        await take(receiver, announced, tensors(0))
        wanted = tensors(1, size=7)
        assert same(await take(receiver, channel.publish(wanted, 1), wanted), wanted)


async def test_each_worker_gets_the_newest_whatever_it_was_permitted(run_dir: Path) -> None:
    channel = make_channel(run_dir)
    first = channel.resume(tensors(1), 0)
    channel.publish(tensors(2), 1)
    async with (
        serving(run_dir, channel),
        receiving(run_dir) as one,
        receiving(run_dir, "rollout-1") as other,
    ):
        received = await asyncio.gather(
            *(each.receive(first.path, 0, first.digest) for each in (one, other))
        )
        for each in received:
            assert each.policy_version == 1
            assert not isinstance(each.source, Path)
            assert same(each.source.load(tensors(0)), tensors(2))


async def test_values_that_are_not_finite_are_refused_by_name(run_dir: Path) -> None:
    channel = make_channel(run_dir)
    channel.resume(tensors(1), 0)
    poisoned = tensors(1)
    poisoned["b"][7] = float("nan")
    announced = channel.publish(poisoned, 1)
    async with serving(run_dir, channel), receiving(run_dir) as receiver:
        with pytest.raises(WeightsError, match="b has values that are not finite"):
            await take(receiver, announced, tensors(0))
        with pytest.raises(WeightsError, match="which the model lacks"):
            await take(receiver, announced, {"a": torch.zeros(3000)})


async def test_what_does_not_match_the_manifest_is_refused_and_then_asked_for_again(
    run_dir: Path,
) -> None:
    channel = make_channel(run_dir)
    channel.resume(tensors(1), 0)
    announced = channel.publish(tensors(2), 1)
    assert channel._files.last is not None
    broken = channel._files.last.tensors.tensors["a"]
    async with serving(run_dir, channel), receiving(run_dir) as receiver:
        broken[5] = 7.0
        with pytest.raises(WeightsError, match="a does not match the manifest of v1"):
            await take(receiver, announced, tensors(0))
        broken[5] = 2.0
        assert same(await take(receiver, announced, tensors(0)), tensors(2))


async def test_while_the_trainer_is_away_a_set_on_disk_is_taken_and_none_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "ASK_S", 0.3)
    channel = make_channel(run_dir)
    first = channel.resume(tensors(1), 0)  # the first is written whole
    second = channel.publish(tensors(2), 1)
    async with receiving(run_dir) as receiver:
        assert same(await take(receiver, first, tensors(0)), tensors(1))
        with pytest.raises(WeightsError, match="v1 did not come from the trainer"):
            await take(receiver, second, tensors(0))
        channel.close()  # the last is whole once the trainer has ended
        assert same(await take(receiver, second, tensors(0)), tensors(2))


async def test_a_trainer_that_starts_again_is_joined_anew(run_dir: Path) -> None:
    channel = make_channel(run_dir)
    announced = channel.resume(tensors(1), 0)
    async with receiving(run_dir) as receiver:
        async with serving(run_dir, channel):
            await take(receiver, announced, tensors(0))
        again = make_channel(run_dir)
        assert again.resume(tensors(1), 0) == announced
        announced = again.publish(tensors(2), 1)
        async with serving(run_dir, again):
            assert same(await take(receiver, announced, tensors(0)), tensors(2))


async def test_requests_that_make_no_sense_are_refused(run_dir: Path) -> None:
    channel = make_channel(run_dir)
    announced = channel.resume(tensors(1), 0)
    good = TransferRequest(
        worker="rollout-0",
        policy_version=0,
        digest=announced.digest,
        group="0" * 32,
        is_new=True,
        tensors=[],
    )
    async with (
        serving(run_dir, channel),
        Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train,
    ):
        for wrong in ({"group": "../../secret"}, {"tensors": ["absent"]}):
            with pytest.raises(ProtocolError):
                await train.request(good.model_copy(update=wrong), 10)


_TRAINER = """
import asyncio, sys, torch
from pathlib import Path
from bus.endpoints import TRAIN, Endpoints
from bus.replier import Replier
from dart_cli.weights import collective
from dart_cli.weights.collective import CollectiveChannel, meeting_place
from dart_cli.weights.file import FileChannel

collective.BUCKET_BYTES = 1 << 16

async def main(run_dir):
    files = FileChannel(run_dir / "weights", copies=True, whole_every=100)
    channel = CollectiveChannel(files, meeting_place(run_dir), 20)
    channel.resume({"a": torch.full((9_000_000,), 1.0)}, 0)
    made = channel.publish({"a": torch.full((9_000_000,), 2.0)}, 1)
    async with Replier(Endpoints(run_dir).address(TRAIN)) as replier:
        print(made.path, made.digest, flush=True)
        await replier.serve(channel.answer)

asyncio.run(main(Path(sys.argv[1])))
"""


@contextlib.contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_transfer_whose_trainer_dies_or_hangs_ends_by_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """The first bytes have come when it happens; the worker keeps what serves and asks again."""
    with process(_TRAINER, str(run_dir)) as trainer:
        assert trainer.stdout is not None
        line = await asyncio.to_thread(trainer.stdout.readline)
        path, digest = line.split()
        got = transfer_group.TransferGroup.receive
        count = 0

        def then_strike(
            self: transfer_group.TransferGroup, data: torch.Tensor, deadline: float
        ) -> None:
            nonlocal count
            count += 1
            if count == 2:
                trainer.send_signal(how)
            got(self, data, deadline)

        monkeypatch.setattr(transfer_group.TransferGroup, "receive", then_strike)
        monkeypatch.setattr(collective, "BUCKET_BYTES", 1 << 16)
        monkeypatch.setattr(collective, "ASK_S", 5.0)
        async with asyncio.timeout(60), receiving(run_dir, deadline_s=3) as receiver:
            with pytest.raises(WeightsError, match="v1 did not come from the trainer"):
                await receiver.receive(Path(path), 1, digest)
            assert receiver._mirror.held is None
    assert 1 < count < 9_000_000 * 4 / (1 << 16)


_WORKER = """
import asyncio, sys
from pathlib import Path
from bus.endpoints import TRAIN, Endpoints
from bus.requester import Requester
from dart_cli.weights import transfer_group
from dart_cli.weights.collective import CollectiveReceiver, meeting_place

got = transfer_group.TransferGroup.receive

def once(self, data, deadline):
    got(self, data, deadline)
    print("begun", flush=True)
    sys.stdin.read()

transfer_group.TransferGroup.receive = once

async def main(run_dir, path, version, digest):
    async with Requester(Endpoints(run_dir).address(TRAIN), name="rollout-7", peer="train") as train:
        receiver = CollectiveReceiver(
            "rollout-7", train, run_dir / "copies" / "rollout-7", meeting_place(run_dir), 60
        )
        await receiver.receive(path, version, digest)

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_transfer_whose_worker_dies_or_hangs_ends_by_its_deadline_and_others_go_on(
    run_dir: Path, how: signal.Signals
) -> None:
    files = FileChannel(run_dir / "weights", copies=True, whole_every=100)
    channel = CollectiveChannel(files, meeting_place(run_dir), deadline_s=4)
    large = tensors(1, size=20_000_000)
    channel.resume(large, 0)
    announced = channel.publish(large | {"b": torch.ones(50).bfloat16()}, 1)
    arguments = str(run_dir), str(announced.path), "1", announced.digest
    async with asyncio.timeout(90), serving(run_dir, channel):
        with process(_WORKER, *arguments) as worker:
            assert worker.stdout is not None
            assert await asyncio.to_thread(worker.stdout.readline) == "begun\n"
            worker.send_signal(how)
            await until(lambda: "rollout-7" not in channel._transfer_thread._groups)
            async with receiving(run_dir) as receiver:
                mine = await take(receiver, announced, large)
    assert same(mine, large | {"b": torch.ones(50).bfloat16()})


async def test_a_transfer_whose_worker_never_joins_ends_by_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_group, "JOIN_S", 0.5)
    channel = make_channel(run_dir)
    announced = channel.resume(tensors(1), 0)
    absent = TransferRequest(
        worker="rollout-9",
        policy_version=0,
        digest=announced.digest,
        group="9" * 32,
        is_new=True,
        tensors=["a"],
    )
    async with serving(run_dir, channel), receiving(run_dir) as receiver:
        async with Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train:
            await train.request(absent, 10)
        await until(lambda: not channel._transfer_thread._pending)
        monkeypatch.setattr(transfer_group, "JOIN_S", 10.0)
        assert same(await take(receiver, announced, tensors(0)), tensors(1))


def test_sockets_are_bound_to_loopback(run_dir: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", _LISTENS, str(run_dir / "pair")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    addresses = set(made.stdout.split())
    assert addresses
    assert addresses == {"0100007F"}


_LISTENS = """
import os, sys, threading
from pathlib import Path
from dart_cli.weights.transfer_group import TransferGroup

ends = []
threads = [
    threading.Thread(target=lambda rank=rank: ends.append(TransferGroup(Path(sys.argv[1]), rank)))
    for rank in (0, 1)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
mine = set()
for name in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{name}"))
    except OSError:
        pass
for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
    for line in open(table).read().splitlines()[1:]:
        part = line.split()
        if f"socket:[{part[9]}]" in mine:
            print(part[1].partition(":")[0])
"""
