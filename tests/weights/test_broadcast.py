"""Promises of the broadcast channel, between real ends: exact, all workers at once, and never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulation.hosts import FIRST, NotPermittedError, hosts
from bus.endpoints import TRAIN, Endpoints, write_key_pair
from bus.errors import ProtocolError, WeightsError
from bus.requests import Requester
from bus.weights import RendezvousRequest, TransferReply, TransferRequest
from dart_cli.config.schema import LoraConfig
from dart_cli.weights.broadcast import broadcaster as rounds
from dart_cli.weights.broadcast import channel as channels
from dart_cli.weights.broadcast import gloo as groups
from dart_cli.weights.broadcast import receiver as receivers
from dart_cli.weights.broadcast import transport as transports
from dart_cli.weights.broadcast.group import join
from dart_cli.weights.broadcast.rendezvous import MOST_KEYS, GroupStore, Rendezvous
from dart_cli.weights.broadcast.transport import MOST_BROKEN, Member, Transport
from dart_cli.weights.file import load
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.manifest import MANIFEST, WEIGHTS, read_manifest
from tests.waiting import PATIENCE_S, until
from tests.weights.broadcasting import (
    go_on,
    line_of,
    make_channel,
    next_line,
    of_rank,
    process,
    receiving,
    running,
    same,
    serving,
    take,
    tensors,
)

WORKERS = ("rollout-0", "rollout-1", "rollout-2")
LARGE = 8_000_000
"""Number of values of a set that takes many buckets, and more than sockets can buffer."""
_GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(
    params=[
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(1 + len(WORKERS) > _GPUS, reason="a GPU for each process"),
            ],
        ),
    ]
)
def transport(request: pytest.FixtureRequest) -> Transport:
    """Return the trainer's transport, for each backend."""
    return Transport(request.param, device="cuda:0" if request.param == "nccl" else "auto")


@contextlib.asynccontextmanager
async def all_receiving(run_dir: Path, transport: Transport, workers=WORKERS):
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                receiving(run_dir, of_rank(transport, 1 + WORKERS.index(worker)), worker)
            )
            for worker in workers
        ]


async def test_what_is_published_arrives_bit_for_bit_and_what_is_frozen_only_once(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    announced = channel.resume(tensors(0.1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        assert same(await take(mine, announced, tensors(0)), tensors(0.1))
        assert mine.read_bytes == announced.size_bytes
        for version in (1, 2):
            expected = tensors(version * 0.3)
            before = mine.read_bytes
            announced = channel.publish(expected, version)
            assert not (announced.path / WEIGHTS).exists()
            assert same(await take(mine, announced, tensors(0)), expected)
            assert mine.read_bytes - before == announced.size_bytes - 40 * 4
            # As files too, for an engine that takes these.
            assert same(load(mine.mirror.directory, tensors(0)), expected)


async def test_all_workers_receive_in_one_broadcast_and_keep_their_group(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(0.1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport) as mine:
        names = set()
        for version in (0, 1, 2):
            expected = tensors(0.1 + version)
            if version:
                channel.publish(expected, version)
            await asyncio.gather(*(each.prepare(version) for each in mine))
            for each in mine:
                assert each.mirror.version is not None
                assert each.mirror.version.policy_version == version
                assert same(dict(each.mirror.load(tensors(0))), expected)
            names |= {each.group for each in mine}
        assert len(names) == 1


async def test_the_group_is_made_anew_when_a_worker_comes_or_goes(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(0.1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:2]) as mine:
        names = []
        for version, present in enumerate((mine[:1], mine, mine[1:], mine)):
            is_whole = len(present) == len(mine)  # else the round does not wait for the other
            monkeypatch.setattr(rounds, "GATHER_S", PATIENCE_S if is_whole else 0.1)
            if version:
                channel.publish(tensors(0.1 + version), version)
            await asyncio.gather(*(each.prepare(version) for each in present))
            for each in present:
                assert same(dict(each.mirror.load(tensors(0))), tensors(0.1 + version))
            [name] = {each.group for each in present}
            names.append(name)
        assert len(set(names)) == 4


async def test_only_what_some_worker_lacks_is_broadcast(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(0.1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:2]) as mine:
        await mine[0].prepare(0)
        whole = mine[0].read_bytes
        published = channel.publish(tensors(0.1) | {"b": torch.ones(50).bfloat16()}, 1)
        await mine[0].prepare(1)
        assert mine[0].read_bytes == whole + 50 * 2
        channel.publish(tensors(0.7), 2)
        await asyncio.gather(*(each.prepare(2) for each in mine))
        assert [each.read_bytes for each in mine] == [2 * whole + 50 * 2, published.size_bytes]


async def test_a_set_of_other_shapes_is_received_whole(run_dir: Path, transport: Transport) -> None:
    channel = make_channel(run_dir, transport)
    announced = channel.resume(tensors(1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        await take(mine, announced, tensors(0))
        expected = tensors(1, size=7)
        assert same(await take(mine, channel.publish(expected, 1), expected), expected)


async def test_the_settings_of_adapters_come_with_the_set(
    run_dir: Path, transport: Transport
) -> None:
    lora = LoraConfig(rank=4)
    channel = make_channel(run_dir, transport, lora=lora)
    announced = channel.resume(tensors(1), 0)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        await take(mine, announced, tensors(0))
        assert read_manifest(mine.mirror.directory).lora == lora


async def test_each_worker_gets_the_newest_whatever_it_was_permitted(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    first = channel.resume(tensors(1), 0)
    channel.publish(tensors(2), 1)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:2]) as mine:
        received = await asyncio.gather(
            *(each.receive(first.path, 0, first.digest) for each in mine)
        )
        for each in received:
            assert each.policy_version == 1
            assert not isinstance(each.source, Path)
            assert same(dict(each.source.load(tensors(0))), tensors(2))


async def test_a_request_for_a_version_that_is_old_by_now_is_referred_to_the_newest(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish a version while the trainer waits for a worker that it expects."""
    monkeypatch.setattr(rounds, "GATHER_S", 100.0)
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1), 0)
    async with (
        serving(run_dir, channel) as asked,
        all_receiving(run_dir, transport, WORKERS[:2]) as mine,
    ):
        await asyncio.gather(*(each.prepare(0) for each in mine))
        asked.clear()
        channel.publish(tensors(2), 1)
        early = asyncio.create_task(mine[0].prepare(1))
        await until(lambda: asked)
        channel.publish(tensors(3), 2)
        await asyncio.gather(early, mine[1].prepare(1))
        for each in mine:
            assert same(dict(each.mirror.load(tensors(0))), tensors(3))


async def test_values_that_are_not_finite_are_refused_by_name(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1), 0)
    poisoned = tensors(1)
    poisoned["b"][7] = float("nan")
    announced = channel.publish(poisoned, 1)
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        with pytest.raises(WeightsError, match="b has values that are not finite"):
            await take(mine, announced, tensors(0))
        with pytest.raises(WeightsError, match="which the model lacks"):
            await take(mine, announced, {"a": torch.zeros(3000)})


async def test_what_does_not_match_the_manifest_is_refused_and_then_asked_for_again(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1), 0)
    announced = channel.publish(tensors(2), 1)
    assert channel.last is not None
    broken = channel.last.tensors.tensors["a"]
    async with serving(run_dir, channel), all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        broken[5] = 7.0
        await mine.prepare(1)  # says nothing; what serves is not touched
        assert mine.mirror.version is None
        assert mine.group == ""
        with pytest.raises(WeightsError, match="a does not match the manifest of v1"):
            await take(mine, announced, tensors(0))
        broken[5] = 2.0
        assert same(await take(mine, announced, tensors(0)), tensors(2))


async def test_while_the_trainer_is_away_a_set_on_disk_is_taken_and_none_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "ASK_S", 0.3)
    channel = make_channel(run_dir, Transport("gloo"))
    first = channel.resume(tensors(1), 0)  # the first is written whole
    second = channel.publish(tensors(2), 1)
    async with receiving(run_dir, Transport("gloo")) as mine:
        assert same(await take(mine, first, tensors(0)), tensors(1))
        with pytest.raises(WeightsError, match="v1 did not come from the trainer"):
            await take(mine, second, tensors(0))
        channel.close()  # the last is whole once the trainer has ended
        assert same(await take(mine, second, tensors(0)), tensors(2))


class Network:
    """A network of both ends in this process: while it is `down`, no group is complete."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down = True
        self.tries = 0
        for module in (rounds, receivers):
            monkeypatch.setattr(module, "join", self._join)

    def _join(self, *which: Any) -> transports.ByteGroup:
        if self.down:
            self.tries += 1
            raise WeightsError("NCCL: unhandled system error")
        return join(*which)


async def test_where_no_broadcast_ever_arrives_versions_come_from_disk_until_one_does(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Write versions whole: otherwise the run would stand still, since a worker that lags gets no leases."""
    network = Network(monkeypatch)
    channel = make_channel(run_dir, Transport("gloo"))
    channel.resume(tensors(1), 0)
    async with serving(run_dir, channel), receiving(run_dir, Transport("gloo")) as mine:
        await mine.prepare(0)
        await until(lambda: network.tries >= 2 * MOST_BROKEN)  # by both ends
        assert network.tries == 2 * MOST_BROKEN
        for version in range(1, 5):
            announced = channel.publish(tensors(version), version)
            assert not (announced.path / WEIGHTS).exists()
            before = network.tries
            await mine.prepare(version)
            await until((announced.path / WEIGHTS).exists)
            assert same(await take(mine, announced, tensors(0)), tensors(version))
            assert network.tries == before + 2, "each version tries whether broadcasts arrive again"
            assert mine.read_bytes == 0
        line = "no broadcast reaches rollout-0; where that goes on, set weights.channel"
        await until(lambda: caplog.text.count(line) == 4)  # the first version was whole already

        network.down = False
        for version in (5, 6):
            announced = channel.publish(tensors(version), version)
            await mine.prepare(version)
            assert same(await take(mine, announced, tensors(0)), tensors(version))
            assert not (announced.path / WEIGHTS).exists()
        assert mine.read_bytes > 0

        network.down, before = True, network.tries
        mine._leave()  # the group that both are in lives on
        channel.publish(tensors(7), 7)
        await mine.prepare(7)
        await until(lambda: network.tries >= before + 2 * MOST_BROKEN)  # by both ends
        assert network.tries == before + 2 * MOST_BROKEN, "a single failure is forgiven again"


async def test_a_version_that_is_not_on_disk_yet_is_there_when_it_is_asked_for_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Network(monkeypatch)
    channel = make_channel(run_dir, Transport("gloo"))
    channel.resume(tensors(1), 0)
    announced = channel.publish(tensors(2), 1)
    async with serving(run_dir, channel), receiving(run_dir, Transport("gloo")) as mine:
        for _ in range(
            2
        ):  # the trainer answers once it has written what the last round did not bring
            with contextlib.suppress(WeightsError):
                assert same(await take(mine, announced, tensors(0)), tensors(2))
                return
    raise AssertionError("the run stands still")


async def test_a_worker_that_sees_no_files_says_which_channel_to_set(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Network(monkeypatch)
    monkeypatch.setattr(receivers, "_is_whole", lambda *_: False)  # as on another host
    channel = make_channel(run_dir, Transport("gloo"))
    announced = channel.resume(tensors(1), 0)
    async with serving(run_dir, channel), receiving(run_dir, Transport("gloo")) as mine:
        refusals = []
        for _ in range(4):
            with pytest.raises(WeightsError, match="v0 did not come from the trainer") as refused:
                await take(mine, announced, tensors(0))
            refusals.append('set weights.channel = "file"' in str(refused.value))
    assert refusals == [False, False, True, True]


async def test_a_disk_that_is_full_ends_no_rounds(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(monkeypatch)
    channel = make_channel(run_dir, Transport("gloo"))
    channel.resume(tensors(1), 0)
    announced = channel.publish(tensors(2), 1)

    def full(_: FlatWeights, file: Path) -> None:
        file.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    async with serving(run_dir, channel), receiving(run_dir, Transport("gloo")) as mine:
        with monkeypatch.context() as patch:
            patch.setattr(FlatWeights, "write", full)
            await mine.prepare(1)
            await until(lambda: "v1 cannot be written to disk" in caplog.text)
        assert [each.name for each in announced.path.iterdir()] == [MANIFEST]
        network.down = False
        assert same(await take(mine, announced, tensors(0)), tensors(2))


def test_each_channel_names_those_that_are_left() -> None:
    assert 'weights.channel = "gloo" or "file"' in Transport("nccl").fix()
    assert 'weights.channel = "file"' in Transport("gloo").fix()


async def test_a_trainer_that_starts_again_is_joined_anew(
    run_dir: Path, transport: Transport
) -> None:
    channel = make_channel(run_dir, transport)
    announced = channel.resume(tensors(1), 0)
    async with all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
        async with serving(run_dir, channel):
            await take(mine, announced, tensors(0))
        again = make_channel(run_dir, transport)
        assert again.resume(tensors(1), 0) == announced
        announced = again.publish(tensors(2), 1)
        async with serving(run_dir, again):
            assert same(await take(mine, announced, tensors(0)), tensors(2))


async def test_requests_that_make_no_sense_are_refused(run_dir: Path) -> None:
    channel = make_channel(run_dir, Transport("gloo"))
    announced = channel.resume(tensors(1), 0)
    ask = TransferRequest(
        worker="rollout-0", policy_version=0, digest=announced.digest, tensors=["absent"]
    )
    keys = {f"key {number}": b"" for number in range(MOST_KEYS + 1)}
    async with (
        serving(run_dir, channel),
        receiving(run_dir, Transport("gloo")) as mine,
        Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train,
    ):
        await mine.prepare(0)
        assert mine.group
        for wrong in (
            ask,
            RendezvousRequest(group="of before", keys=["0/0"]),
            RendezvousRequest(group=mine.group, values={"a": bytes(1 << 20)}),
            RendezvousRequest(group=mine.group, values=keys),
        ):
            with pytest.raises(ProtocolError):
                await train.request(wrong, 10)


# --- ends that die or hang --------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set short deadlines and many buckets, as in the processes that stop within a broadcast."""
    monkeypatch.setattr(groups, "STALL_S", 3.0)
    monkeypatch.setattr(groups, "BUCKET_BYTES", 1 << 20)


def options(run_dir: Path, transport: Transport, rank: int, **more: object) -> dict[str, object]:
    mine = of_rank(transport, rank)
    result = {"backend": mine.backend, "address": mine.address, "device": mine.device}
    return {"run_dir": str(run_dir), "transport": result, "hold": True, **more}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_broadcast_whose_trainer_dies_or_hangs_ends_by_its_deadline(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """Kill the trainer after some bytes: the worker keeps the weights that it serves and asks again."""
    monkeypatch.setattr(receivers, "ASK_S", 1.0)
    with process("trainer", **options(run_dir, transport, 0, size=LARGE)) as trainer:
        published = await line_of(trainer)
        async with all_receiving(run_dir, transport, WORKERS[:1]) as [mine]:
            taking = asyncio.create_task(
                mine.receive(Path(published["path"]), 1, published["digest"])
            )
            assert "begun" in await line_of(trainer)
            trainer.send_signal(how)
            with pytest.raises(WeightsError, match="v1 did not come from the trainer"):
                await taking
            assert mine.mirror.version is None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_dies_or_hangs_costs_the_others_one_deadline(
    run_dir: Path, transport: Transport, how: signal.Signals
) -> None:
    """The others get their set in a group without it; when it goes on, it joins again."""
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1, LARGE), 0)
    channel.publish(tensors(2, LARGE), 1)
    lost = options(run_dir, transport, 3, worker=WORKERS[2], version=1)
    async with (
        serving(run_dir, channel) as asked,
        all_receiving(run_dir, transport, WORKERS[:2]) as mine,
    ):
        with process("worker", **lost) as third:
            await until(lambda: asked)
            taking = [asyncio.create_task(each.prepare(1)) for each in mine]
            assert "begun" in await line_of(third)
            third.send_signal(how)
            await asyncio.gather(*taking)
            for each in mine:
                assert same(dict(each.mirror.load(tensors(0, LARGE))), tensors(2, LARGE))
            if how == signal.SIGSTOP:
                third.send_signal(signal.SIGCONT)
                go_on(third)
                result = await line_of(third)
                assert result["held"] == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_dies_or_hangs_between_two_broadcasts_is_not_in_the_next(
    run_dir: Path, transport: Transport, how: signal.Signals
) -> None:
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1, LARGE), 0)
    lost = options(run_dir, transport, 3, worker=WORKERS[2], version=0) | {"hold": False}
    async with (
        serving(run_dir, channel) as asked,
        all_receiving(run_dir, transport, WORKERS[:2]) as mine,
    ):
        with process("worker", **lost) as third:
            await until(lambda: asked)
            await asyncio.gather(*(each.prepare(0) for each in mine))
            assert (await line_of(third))["held"] == 0
            third.send_signal(how)
            channel.publish(tensors(2, LARGE), 1)
            await asyncio.gather(*(each.prepare(1) for each in mine))
            for each in mine:
                assert same(dict(each.mirror.load(tensors(0, LARGE))), tensors(2, LARGE))
            if how == signal.SIGSTOP:
                third.send_signal(signal.SIGCONT)
                assert (await line_of(third))["held"] == 1


async def test_a_worker_that_asks_and_never_joins_costs_the_others_one_deadline(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "JOIN_S", 1.0)
    monkeypatch.setattr(rounds, "MEET_S", 1.0)
    channel = make_channel(run_dir, transport)
    announced = channel.resume(tensors(1), 0)
    absent = TransferRequest(
        worker="rollout-9", policy_version=0, digest=announced.digest, tensors=["a"]
    )
    async with (
        serving(run_dir, channel) as heard,
        all_receiving(run_dir, transport, WORKERS[:2]) as mine,
        Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train,
    ):
        asked = asyncio.create_task(train.request(absent, 20))
        await until(lambda: "rollout-9" in heard)
        await asyncio.gather(*(each.prepare(0) for each in mine))
        reply = await asked
        assert isinstance(reply, TransferReply)
        assert reply.accepted
        assert reply.size == 4
        for each in mine:
            assert same(dict(each.mirror.load(tensors(0))), tensors(1))


class Deaf:
    """A group in which a worker receives nothing."""

    def __init__(self, group: transports.ByteGroup) -> None:
        self.name, self.close, self._through = group.name, group.close, group.broadcast

    def broadcast(self, flat: FlatWeights, _: object, stops: Callable[[], bool]) -> int:
        self._through(flat, [], stops)
        raise WeightsError("the disk does not answer")


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_asks_again_and_again_and_receives_nothing_is_served_alone(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a bad worker join: all of its rounds break off, and the others are no longer in them."""
    monkeypatch.setattr(groups, "STALL_S", 1.0)
    # Of this worker alone: the address is all that tells them apart.
    bad_transport = replace(of_rank(transport, 3), address="127.0.0.2")

    def join_of(mine: Transport, member: Member, store: GroupStore) -> transports.ByteGroup:
        group = join(mine, member, store)
        return Deaf(group) if mine is bad_transport else group

    monkeypatch.setattr(receivers, "join", join_of)
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1, LARGE), 0)
    async with (
        serving(run_dir, channel) as asked,
        all_receiving(run_dir, transport, WORKERS[:2]) as mine,
        receiving(run_dir, bad_transport, WORKERS[2]) as bad,
    ):
        begun = asyncio.create_task(bad.prepare(0))
        await until(lambda: asked)
        await asyncio.gather(*(each.prepare(0) for each in mine))
        for version in (1, 2):
            channel.publish(tensors(1 + version, LARGE), version)
            both = asyncio.gather(*(each.prepare(version) for each in mine))
            await asyncio.gather(both, bad.prepare(version))
            for each in mine:
                assert same(dict(each.mirror.load(tensors(0, LARGE))), tensors(1 + version, LARGE))
            assert bad.mirror.version is None
        await begun


async def test_a_round_begins_although_requests_are_held_for_less_than_it_waits(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait for a worker that has died, while the other one asks again and again."""
    monkeypatch.setattr(rounds, "GATHER_S", 1.0)
    monkeypatch.setattr(channels, "HOLD_S", 0.2)
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1), 0)
    async with (
        serving(run_dir, channel),
        receiving(run_dir, of_rank(transport, 1), WORKERS[0], late_s=0.1) as mine,
        receiving(run_dir, of_rank(transport, 2), WORKERS[1]) as gone,
    ):
        await asyncio.gather(mine.prepare(0), gone.prepare(0))
        channel.publish(tensors(2), 1)
        await mine.prepare(1)
        assert same(dict(mine.mirror.load(tensors(0))), tensors(2))


async def test_closing_ends_a_broadcast_at_its_next_bucket(
    run_dir: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(rounds, "JOIN_S", PATIENCE_S)
    stopped = stops_of_broadcasts(monkeypatch)
    channel = make_channel(run_dir, transport)
    channel.resume(tensors(1, LARGE), 0)
    held = options(run_dir, transport, 1, worker=WORKERS[0], version=0)
    async with serving(run_dir, channel):
        with process("worker", **held) as worker:
            assert "begun" in await line_of(worker)
            closing = asyncio.create_task(asyncio.to_thread(channel.close))
            go_on(worker)
            await closing
            assert "broadcast" not in {each.name for each in threading.enumerate()}
    assert stopped[-1], "it ended since it was closed"
    assert not any(stopped[:-1]), "it went on for no bucket"
    assert len(stopped) < LARGE * 4 >> 20, "most of the set was still to come"


def stops_of_broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that is given each answer to the question whether to stop, one before each bucket."""
    stopped: list[bool] = []
    through = groups.GlooGroup.broadcast

    def broadcast(self: Any, flat: Any, names: Any, stops: Callable[[], bool]) -> int:
        def noted() -> bool:
            stopped.append(stops())
            return stopped[-1]

        return through(self, flat, names, noted)

    monkeypatch.setattr(groups.GlooGroup, "broadcast", broadcast)
    return stopped


# --- two hosts ----------------------------------------------------------------------------------


def test_a_worker_of_another_host_needs_the_keys_and_no_shared_folder(
    run_dir: Path, tmp_path: Path
) -> None:
    """Use two network namespaces; the second does not see the run directory of the first."""
    keys = tmp_path / "keys"
    keys.mkdir()
    write_key_pair(keys / "curve.json")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    files = [folder.with_suffix(".toml") for folder in (run_dir, other)]
    for folder, file in zip((run_dir, other), files, strict=True):
        text = (
            f'[run]\ndir = "{folder}"\n[weights]\nchannel = "gloo"\n'
            f'[bus]\nhost = "{FIRST}"\nkeys = "{keys}"\n'
        )
        file.write_text(text, encoding="utf-8")
    module, manifest = "tests.weights.two_hosts", run_dir / "weights/v000000/manifest.json"
    with contextlib.ExitStack() as stack:
        try:
            first, second = stack.enter_context(hosts(1, run_dir))
        except NotPermittedError as error:
            pytest.skip(f"no network namespaces here: {error}")
        trainer = stack.enter_context(running(module, "trainer", str(files[0]), enter=first.enter))
        worker = stack.enter_context(
            running(module, "worker", str(files[1]), str(manifest), enter=second.enter)
        )
        for version in range(3):
            assert next_line(trainer) == {"published": version}
            result = next_line(worker)
            assert result == {"held": version, "differ": [], "sees": False}
            assert trainer.stdin is not None
            trainer.stdin.write("next\n")
            trainer.stdin.flush()
    assert manifest.exists()


# --- where the bytes go -----------------------------------------------------------------------


def test_sockets_are_bound_to_their_address() -> None:
    """A run on one host listens on loopback alone."""
    before = _listening()
    rendezvous = Rendezvous()
    rendezvous.open("g")
    store = GroupStore(partial(rendezvous.change, "g"), time.monotonic() + 10)
    alone = join(Transport("gloo"), Member("g", 0, 1), store)
    addresses = _listening() - before
    alone.close()
    assert addresses
    assert {address for address, _ in addresses} == {"0100007F"}


def _listening() -> set[tuple[str, str]]:
    """Return (address, socket) of the TCP sockets of this process."""
    mine = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(handle.readlink()))
    result = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()
        for line in lines[1:]:
            part = line.split()
            if f"socket:[{part[9]}]" in mine:
                result.add((part[1].partition(":")[0], part[9]))
    return result
