"""Promises of a publication: tensors may change once it has copied them, and it ends whole or with an error."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bus.errors import WeightsError
from dart_cli.weights import file, flat_weights
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import FileChannel, Publication, load
from dart_cli.weights.flat_weights import FlatWeights, TensorStream, parts_of, specs_of
from dart_cli.weights.manifest import (
    LEAF_BYTES,
    WEIGHTS,
    TensorSpec,
    newest_version,
    read_manifest,
    versions,
)
from tests.devices import no_gpu
from tests.waiting import PATIENCE_S

Tensors = dict[str, torch.Tensor]


def tensors(value: float = 1.0) -> Tensors:
    return {
        "a.weight": torch.full((300, 40), value),
        "b.bias": torch.full((5,), value).bfloat16(),
        "frozen": torch.full((7,), 3.0),
    }


def same(path: Path, expected: Tensors) -> bool:
    results = load(path, expected)
    return all(torch.equal(results[name], value) for name, value in expected.items())


class Gate:
    """A gate before a channel's writes, which wait until it is open, or fail."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def __call__(self, write: Callable[..., object]) -> Callable[..., object]:
        def gated(*arguments: object, **kwargs: object) -> object:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return write(*arguments, **kwargs)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(FlatWeights, "write", gate(FlatWeights.write))
    yield gate
    gate.open.set()


def test_tensors_may_change_once_they_are_copied(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path, keep=9)
    channel.resume(tensors(0.0), 0)
    for version in range(1, 6):
        trained = tensors(float(version))
        publication = channel.begin(trained, version)
        publication.wait_until_copied()
        for each in trained.values():
            each.fill_(-1.0)
        complete = publication.result()
        assert complete.policy_version == version
        assert same(complete.path, tensors(float(version)))
    channel.close()


def test_a_version_is_written_after_its_tensors_are_free(tmp_path: Path, gate: Gate) -> None:
    channel = FileChannel(tmp_path)
    publication = channel.begin(tensors(), 1)
    publication.wait_until_copied()  # though nothing can be written
    assert gate.reached.wait(PATIENCE_S)
    assert publication.is_copied
    assert not publication.is_over
    assert newest_version(tmp_path) is None
    gate.open.set()
    assert publication.result() == newest_version(tmp_path)
    assert publication.is_over
    took = publication.seconds
    assert took > 0
    assert publication.seconds == took


def test_the_next_publication_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    channel = FileChannel(tmp_path)
    first = channel.begin(tensors(1.0), 1)
    publication = []
    beside = threading.Thread(target=lambda: publication.append(channel.begin(tensors(2.0), 2)))
    beside.start()
    assert gate.reached.wait(PATIENCE_S)
    assert not publication
    gate.open.set()
    beside.join(PATIENCE_S)
    assert first.is_over
    assert same(first.result().path, tensors(1.0))
    assert same(publication[0].result().path, tensors(2.0))


def test_a_full_disk_is_raised_by_each_wait_and_the_next_version_is_published(
    tmp_path: Path, gate: Gate
) -> None:
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    gate.open.set()
    channel = FileChannel(tmp_path)
    publication = channel.begin(tensors(), 1)
    for _ in range(2):
        with pytest.raises(
            WeightsError, match=r"v000001 cannot be written: .*; free space on its disk"
        ):
            publication.result()
    assert list(tmp_path.iterdir()) == []
    gate.error = None
    assert same(channel.publish(tensors(2.0), 2).path, tensors(2.0))


@pytest.mark.parametrize("then", ["begin", "close"])
def test_an_error_that_no_wait_has_raised_is_raised_by_what_comes_next(
    tmp_path: Path, gate: Gate, then: str
) -> None:
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    gate.open.set()
    channel = FileChannel(tmp_path)
    channel.begin(tensors(), 1)
    with pytest.raises(WeightsError, match="v000001 cannot be written"):
        channel.begin(tensors(), 2) if then == "begin" else channel.close()


def test_the_end_waits_for_the_version_on_its_way(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Publication.settle

    def waiting(self: Publication) -> None:
        gate.open.set()
        settle(self)

    monkeypatch.setattr(Publication, "settle", waiting)
    channel = FileChannel(tmp_path)
    channel.begin(tensors(), 1)
    assert gate.reached.wait(PATIENCE_S)
    channel.close()
    assert (tmp_path / "v000001" / WEIGHTS).is_file()


def test_a_disk_that_hangs_costs_the_deadline(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "PUBLISH_S", 0.05)
    publication = FileChannel(tmp_path).begin(tensors(), 1)
    assert gate.reached.wait(PATIENCE_S)
    publication.wait_until_copied()
    with pytest.raises(WeightsError, match=r"v000001 is not complete .*does its disk hang\?"):
        publication.result()


def test_masters_are_cast_while_they_are_copied(tmp_path: Path) -> None:
    masters = {"w": torch.randn(1000), "frozen": torch.randn(3).bfloat16()}
    stream = TensorStream(
        {"w": TensorSpec([1000], "bfloat16"), "frozen": TensorSpec([3], "bfloat16")},
        masters.items(),
    )
    complete = FileChannel(tmp_path).begin(stream, 1).result()
    assert same(complete.path, {name: each.bfloat16() for name, each in masters.items()})


def test_what_ranks_gather_is_read_one_by_one_by_the_thread_that_begins(tmp_path: Path) -> None:
    whole, readers = tensors(4.0), []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in whole.items():
            readers.append(threading.get_ident())
            lent = value.clone()
            yield name, lent
            lent.fill_(-1.0)  # it is copied before the next one is asked for

    channel = FileChannel(tmp_path)
    channel.resume(tensors(0.0), 0)
    publication = channel.begin(TensorStream(specs_of(whole), gathered(), is_gathered=True), 1)
    assert readers == [threading.get_ident()] * 3
    assert same(publication.result().path, whole)


def test_a_set_is_written_as_safetensors_has_it_with_the_digests_of_its_bytes(
    tmp_path: Path,
) -> None:
    large = {"large": torch.arange(LEAF_BYTES // 4 + 5, dtype=torch.int32), "none": torch.empty(0)}
    flat = FlatWeights.in_memory(specs_of(tensors() | large)).fill(tensors() | large)
    assert flat.write(tmp_path / "set") == flat.digests()
    results = load_file(tmp_path / "set")
    assert all(torch.equal(results[name], each) for name, each in (tensors() | large).items())


def test_a_set_is_copied_to_the_same_memory_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    in_memory = FlatWeights.in_memory.__func__

    def counted(cls: type[FlatWeights], *args: object, **kwargs: object) -> FlatWeights:
        made.append(in_memory(cls, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(FlatWeights, "in_memory", classmethod(counted))
    channel = FileChannel(tmp_path)
    for version in range(3):
        channel.publish(tensors(float(version)), version)
    assert len(made) == 1
    channel.publish(tensors() | {"more": torch.ones(2)}, 3)  # of another layout
    assert len(made) == 2


@pytest.mark.parametrize("shape", [(100, 30), (5000,), (3, 2000), (7,), ()])
def test_a_large_tensor_is_copied_in_parts(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape).mT if len(shape) == 2 else torch.randn(shape)
    target = torch.zeros(source.shape, dtype=torch.bfloat16)
    row = target[0].nbytes if target.ndim else 0
    for to, part in parts_of(target, source, 512):
        assert to.nbytes <= max(512, row)
        to.copy_(part)
    assert torch.equal(target, source.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device")
def test_tensors_of_a_gpu_that_is_not_the_current_one_are_copied_as_it_leaves_them(
    tmp_path: Path,
) -> None:
    weights = {"w": torch.zeros(1 << 22, device="cuda:1")}
    channel = FileChannel(tmp_path)
    with torch.cuda.device(1):
        torch.cuda._sleep(500_000_000)
    weights["w"] += 1
    publication = channel.begin(weights, 0)
    assert same(publication.result().path, {"w": torch.ones(1 << 22)})


@pytest.mark.gpu
@no_gpu
def test_tensors_on_a_gpu_are_copied_as_they_were_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy after the device's queued work, on a separate stream, with casts in between."""
    monkeypatch.setattr(flat_weights, "IN_FLIGHT_BYTES", 1 << 20)
    count = 1 << 22
    masters = {f"w{index}": torch.randn(count, device="cuda") for index in range(8)}
    specs = {name: TensorSpec([count], "bfloat16") for name in masters}
    channel = FileChannel(tmp_path)
    for version in range(3):
        for value in masters.values():
            torch.cuda._sleep(10_000_000)
            value += 1
        expected = {name: value.bfloat16().cpu() for name, value in masters.items()}
        publication = channel.begin(TensorStream(specs, masters.items()), version)
        publication.wait_until_copied()
        for value in masters.values():
            value.zero_()
        assert same(publication.result().path, expected)
        for name, value in masters.items():
            value.copy_(expected[name])
    assert read_manifest(tmp_path / "v000002").size_bytes == 8 * 2 * count


@pytest.fixture
def broadcasts(tmp_path: Path) -> Iterator[BroadcastChannel]:
    channel = BroadcastChannel(tmp_path, Transport("gloo"), 9)
    yield channel
    channel.close()


def test_a_version_takes_the_memory_of_the_one_before_the_last(
    broadcasts: BroadcastChannel,
) -> None:
    memory, replaced = [], []
    for version in range(1, 6):
        broadcasts.publish(tensors(float(version)), version)
        assert broadcasts.last is not None
        with broadcasts.last.read() as copy:
            memory.append(copy.data.data_ptr())
            assert torch.equal(copy.tensors["a.weight"], tensors(float(version))["a.weight"])
        replaced.append(broadcasts.last)
    assert memory == [memory[0], memory[1], memory[0], memory[1], memory[0]]
    assert memory[0] != memory[1]
    with pytest.raises(WeightsError, match="v1 is no longer in memory"), replaced[0].read():
        pass


def test_the_memory_of_a_version_that_is_read_is_left_alone(broadcasts: BroadcastChannel) -> None:
    broadcasts.publish(tensors(1.0), 1)
    assert broadcasts.last is not None
    with broadcasts.last.read() as copy:
        for version in (2, 3, 4):
            broadcasts.publish(tensors(float(version)), version)
        assert torch.equal(copy.tensors["a.weight"], tensors(1.0)["a.weight"])


def test_of_a_broadcast_one_version_in_so_many_is_written_and_the_last(tmp_path: Path) -> None:
    channel = BroadcastChannel(tmp_path, Transport("gloo"), 2, whole_every=4)
    made = [channel.resume(tensors(0.0), 0)]
    made += [channel.publish(tensors(float(version)), version) for version in range(1, 7)]
    # The newest two, and the whole one that is no newer than these.
    assert [(each.path / WEIGHTS).exists() for each in made[4:]] == [True, False, False]
    assert versions(tmp_path) == [4, 5, 6]
    channel.close()
    assert same(made[6].path, tensors(6.0))
    again = BroadcastChannel(tmp_path, Transport("gloo"), 2, whole_every=4)
    assert again.resume(tensors(6.0), 3) == made[6]
    assert same(again.publish(tensors(7.0), 7).path, tensors(7.0))  # whole, whatever went before
    again.close()
