"""Promises of deltas: bit for bit, by the shortest way, and a whole set where anything is amiss."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bus.errors import WeightsError
from dart_cli.weights import delta
from dart_cli.weights.base import Published
from dart_cli.weights.delta import DELTA, PATCHES
from dart_cli.weights.delta_chain import HeldVersion, newest_version, routes
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.flat_weights import FlatWeights, specs_of
from dart_cli.weights.manifest import WEIGHTS, read_manifest, versions
from dart_cli.weights.mirror import DeltaReceiver

Tensors = dict[str, torch.Tensor]
SIZE = 40_000


@pytest.fixture
def channel(tmp_path: Path) -> FileChannel:
    return FileChannel(tmp_path / "weights", keep=2, delta=True, whole_every=100)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[DeltaReceiver]:
    receiver = DeltaReceiver(tmp_path / "copy")
    yield receiver
    receiver.close()


def first() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(SIZE, generator=generator),
        "head": torch.randn(200, 50, generator=generator).bfloat16(),
        "frozen": torch.randn(300, generator=generator),
        "count": torch.zeros(1, dtype=torch.int64),
    }


def stepped(tensors: Tensors, step: float = 1e-6) -> Tensors:
    """After an update: all of `embed` moves a little, few of the bits of `head` do."""
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    moved["embed"] -= step * torch.sign(torch.sin(torch.arange(SIZE) * 1.0))
    moved["head"] -= (step * torch.cos(torch.arange(10_000.0)).view(200, 50)).bfloat16()
    moved["count"] += 1
    return moved


def published(channel: FileChannel, count: int) -> tuple[list[Published], Tensors]:
    """So many versions, from 0, each an update after the one before; and the newest's tensors."""
    tensors = first()
    made = [channel.resume(tensors, 0)]
    for version in range(1, count):
        tensors = stepped(tensors)
        made.append(channel.publish(tensors, version))
    return made, tensors


async def take(receiver: DeltaReceiver, announced: Published) -> Tensors:
    received = await receiver.receive(announced.path, announced.policy_version, announced.digest)
    assert received.policy_version == announced.policy_version
    assert not isinstance(received.source, Path)
    return received.source.load(first())


def same(mine: Tensors, wanted: Tensors) -> bool:
    return mine.keys() == wanted.keys() and all(bits(mine[n]) == bits(wanted[n]) for n in wanted)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


async def test_a_worker_follows_by_deltas_bit_for_bit(
    channel: FileChannel, receiver: DeltaReceiver
) -> None:
    tensors = first()
    announced = channel.resume(tensors, 0)
    assert same(await take(receiver, announced), tensors)
    for version in range(1, 5):
        before = receiver.read_bytes
        tensors = stepped(tensors)
        announced = channel.publish(tensors, version)
        assert not (announced.path / WEIGHTS).exists()
        assert same(await take(receiver, announced), tensors)
        assert receiver.read_bytes - before == (announced.path / PATCHES).stat().st_size
        assert receiver.read_bytes - before < 0.75 * announced.size_bytes
    # What it holds is a whole set, for an engine that takes files.
    assert same(load(receiver._mirror.directory, first()), tensors)


async def test_a_full_disk_refuses_a_version_and_the_next_is_taken(
    channel: FileChannel, receiver: DeltaReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = first()
    announced = channel.resume(tensors, 0)

    def full(_path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(WeightsError, match="no room for weights"):
            await take(receiver, announced)
    tensors = stepped(tensors)
    assert same(await take(receiver, channel.publish(tensors, 1)), tensors)


async def test_a_worker_that_skipped_versions_takes_the_chain(
    channel: FileChannel, receiver: DeltaReceiver
) -> None:
    made, _ = published(channel, 1)
    await take(receiver, made[0])
    before = receiver.read_bytes
    tensors, paths = first(), []
    for version in (1, 2, 3):  # of the small tensors alone: three deltas are less than a set
        tensors = tensors | {"head": stepped(tensors)["head"]}
        paths.append(channel.publish(tensors, version).path)
    announced = newest_version(channel.directory)
    assert announced is not None
    assert same(await take(receiver, announced), tensors)
    read = sum((path / PATCHES).stat().st_size for path in paths)
    assert receiver.read_bytes - before == read


async def test_a_worker_that_starts_late_takes_the_whole_set_and_the_chain(
    channel: FileChannel, receiver: DeltaReceiver
) -> None:
    made, tensors = published(channel, 4)
    assert [(each.path / WEIGHTS).exists() for each in made] == [True, False, False, False]
    assert same(load(made[-1].path, first()), tensors)  # without a receiver, as `dart eval` does
    assert same(await take(receiver, made[-1]), tensors)


async def test_every_so_many_versions_are_whole_and_a_long_chain_is_not_taken(
    tmp_path: Path, receiver: DeltaReceiver
) -> None:
    channel = FileChannel(tmp_path / "weights", keep=20, delta=True, whole_every=4)
    made, tensors = published(channel, 10)
    whole = [each.policy_version for each in made if (each.path / WEIGHTS).exists()]
    assert whole == [0, 4, 8]
    manifest = read_manifest(made[9].path)
    [best, *_] = routes(made[9].path, manifest, HeldVersion(0, made[0].digest))
    assert best.whole == made[8].path
    await take(receiver, made[0])
    assert same(await take(receiver, made[9]), tensors)


async def test_every_version_can_be_had_however_large_its_deltas(
    tmp_path: Path, channel: FileChannel
) -> None:
    tensors = first()
    channel.keep = 20
    made = [channel.resume(tensors, 0)]
    for version in range(1, 8):
        tensors = stepped(tensors, step=1e-3)
        made.append(channel.publish(tensors, version))
    assert 2 <= sum((each.path / WEIGHTS).exists() for each in made) < 8
    for each in made:
        late = DeltaReceiver(tmp_path / f"late-{each.policy_version}")
        await take(late, each)
        late.close()
    assert same(load(made[-1].path, first()), tensors)


def test_what_the_kept_versions_need_is_kept(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path, keep=2, delta=True, whole_every=4)
    made, tensors = published(channel, 8)
    assert versions(tmp_path) == [4, 5, 6, 7]  # 6 and 7 come from 4
    made.append(channel.publish(stepped(tensors), 8))
    assert versions(tmp_path) == [4, 5, 6, 7, 8]
    channel.publish(stepped(stepped(tensors)), 9)
    assert versions(tmp_path) == [8, 9]


def test_the_last_version_is_whole_once_the_trainer_has_ended(channel: FileChannel) -> None:
    made, tensors = published(channel, 3)
    channel.close()
    assert same(load(made[2].path, first()), tensors)
    assert (made[2].path / WEIGHTS).exists()


def test_a_trainer_that_starts_again_goes_on_from_what_it_published(channel: FileChannel) -> None:
    made, tensors = published(channel, 3)
    again = FileChannel(channel.directory, keep=2, delta=True, whole_every=100)
    assert again.resume(tensors, 1) == made[2]
    after = stepped(tensors)
    follows = again.publish(after, 3)
    assert delta.read(follows.path).base_digest == made[2].digest
    assert same(load(follows.path, first()), after)
    from_checkpoint = FileChannel(channel.directory, keep=2, delta=True, whole_every=100)
    assert from_checkpoint.resume(tensors, 1).policy_version == 4


def lose_delta(path: Path) -> None:
    (path / DELTA).unlink()


def cut_patches(path: Path) -> None:
    (path / PATCHES).write_bytes((path / PATCHES).read_bytes()[:-2])


def flip_patches(path: Path) -> None:
    data = bytearray((path / PATCHES).read_bytes())
    data[len(data) // 2] ^= 1
    (path / PATCHES).write_bytes(data)


def other_base(path: Path) -> None:
    told = json.loads((path / DELTA).read_text())
    (path / DELTA).write_text(json.dumps(told | {"base_digest": "0" * 64}))


def shift_a_patch(path: Path) -> None:
    """Sound in itself, but it changes other values: only the result's digest shows it."""
    told = json.loads((path / DELTA).read_text())
    told["patches"][-1]["begin"] -= 100
    (path / DELTA).write_text(json.dumps(told))


def beyond_the_end(path: Path) -> None:
    told = json.loads((path / DELTA).read_text())
    told["patches"][-1]["begin"] += 2**40
    (path / DELTA).write_text(json.dumps(told))


def loop(path: Path) -> None:
    told = json.loads((path / DELTA).read_text())
    (path / DELTA).write_text(json.dumps(told | {"base_version": told["policy_version"]}))


DAMAGES = [
    lose_delta,
    cut_patches,
    flip_patches,
    other_base,
    shift_a_patch,
    beyond_the_end,
    loop,
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_where_the_chain_is_broken_the_whole_set_is_taken(
    tmp_path: Path, receiver: DeltaReceiver, damage: Callable[[Path], None]
) -> None:
    channel = FileChannel(tmp_path / "weights", delta=True, whole_every=2)
    made, tensors = published(channel, 3)
    assert (made[2].path / WEIGHTS).exists()
    await take(receiver, made[1])
    before = receiver.read_bytes
    damage(made[2].path)
    assert same(await take(receiver, made[2]), tensors)
    assert receiver.read_bytes - before >= made[2].size_bytes
    after = stepped(tensors)
    assert same(await take(receiver, channel.publish(after, 3)), after)


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each is not other_base])
async def test_where_no_way_is_left_the_set_is_refused_until_the_next_whole_one(
    channel: FileChannel, receiver: DeltaReceiver, damage: Callable[[Path], None]
) -> None:
    made, tensors = published(channel, 2)
    await take(receiver, made[0])
    damage(made[1].path)
    with pytest.raises(WeightsError, match=r"differs|no chain of deltas leads to it|does not fit"):
        await take(receiver, made[1])
    after = stepped(tensors)
    channel.whole_every = 1
    assert same(await take(receiver, channel.publish(after, 2)), after)


async def test_a_delta_of_another_set_is_refused(
    tmp_path: Path, channel: FileChannel, receiver: DeltaReceiver
) -> None:
    made, _ = published(channel, 2)
    await take(receiver, made[0])
    foreign = FileChannel(tmp_path / "foreign", delta=True, whole_every=100)
    foreign.resume({name: tensor + 1 for name, tensor in first().items()}, 0)
    other = foreign.publish({name: tensor + 2 for name, tensor in first().items()}, 1)
    for name in (DELTA, PATCHES):
        (made[1].path / name).write_bytes((other.path / name).read_bytes())
    with pytest.raises(WeightsError):
        await take(receiver, made[1])
    with pytest.raises(WeightsError, match="not the one announced"):
        await receiver.receive(other.path, 1, made[1].digest)


async def test_values_that_are_not_finite_are_refused_by_name(
    channel: FileChannel, receiver: DeltaReceiver
) -> None:
    made, tensors = published(channel, 1)
    await take(receiver, made[0])
    for version, bad in ((1, float("nan")), (2, float("inf")), (3, float("-inf"))):
        poisoned = stepped(tensors)
        poisoned["head"][3, 4] = bad
        announced = channel.publish(poisoned, version)
        with pytest.raises(WeightsError, match="head has values that are not finite"):
            await take(receiver, announced)
    assert same(await take(receiver, channel.publish(tensors, 4)), tensors)


def test_what_has_not_changed_costs_nothing(channel: FileChannel) -> None:
    made, tensors = published(channel, 2)
    same_again = channel.publish(tensors, 2)
    assert (same_again.path / PATCHES).stat().st_size == 0
    told = delta.read(made[1].path)
    assert SIZE < told.changed < SIZE + 10_002  # nothing of `frozen`


def test_a_delta_that_would_be_no_smaller_is_published_whole(channel: FileChannel) -> None:
    channel.resume(first(), 0)
    noise = {
        name: torch.randint(-(2**30), 2**30, (tensor.numel() * tensor.element_size() // 4,))
        .int()
        .view(torch.uint8)
        .view(tensor.dtype)
        .view(tensor.shape)
        for name, tensor in first().items()
    }
    made = channel.publish(noise, 1)
    assert (made.path / WEIGHTS).exists()


def test_tensors_of_other_shapes_are_published_whole(channel: FileChannel) -> None:
    channel.resume(first(), 0)
    made = channel.publish(first() | {"embed": torch.zeros(7)}, 1)
    assert (made.path / WEIGHTS).exists()
    assert not (made.path / DELTA).exists()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@given(data=st.data())
def test_any_bits_become_any_other_bits(tmp_path_factory, dtype, data) -> None:
    size = data.draw(st.integers(1, 200))
    draw = arrays.arrays(dtype, size)
    old, new = data.draw(draw), data.draw(draw)
    keep = data.draw(arrays.arrays(np.bool_, size))
    new = np.where(keep, old, new)
    name = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype().itemsize]
    before, after = (
        {"w": torch.from_numpy(each.copy().view(np.uint8)).view(name)} for each in (old, new)
    )
    directory = tmp_path_factory.mktemp("delta")
    flat = FlatWeights.in_memory(specs_of(before)).fill(before)
    goal = FlatWeights.in_memory(specs_of(after)).fill(after)
    made = delta.write(directory, (0, "base"), 1, flat, goal)
    delta.apply(directory, made, flat)
    assert bits(flat.data) == bits(goal.data)
    assert delta.read(directory) == made
