"""Promises of the NCCL group that need no GPU: NCCL's and CUDA's calls are replaced by waits and copies."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bus.errors import WeightsError
from dart_cli.hardware import accelerator
from dart_cli.weights.broadcast import nccl
from dart_cli.weights.broadcast.nccl import NcclGroup
from dart_cli.weights.broadcast.rendezvous import GroupStore, Rendezvous
from dart_cli.weights.broadcast.transport import Member, Transport
from dart_cli.weights.flat_weights import FlatWeights, specs_of
from tests.waiting import PATIENCE_S, wait_until

BUCKET = 64
SENT = 7


class Device:
    """A stand-in for the GPU of a worker: a bucket has come once `arrived` is set."""

    def __init__(self) -> None:
        self.arrived, self.waits = threading.Event(), threading.Event()

    # dart_cli.hardware.accelerator
    def new_event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda _: None, synchronize=self._synchronize)

    def in_stream(self, _: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _synchronize(self) -> None:
        self.waits.set()
        assert self.arrived.wait(PATIENCE_S)

    # the process group
    def broadcast(self, tensors: list[torch.Tensor], _: object) -> SimpleNamespace:
        for tensor in tensors:
            tensor.fill_(SENT)
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    def join(self: NcclGroup) -> None:
        self._group, self._stream = device, None
        self._on_host = torch.empty((2, BUCKET), dtype=torch.uint8)
        self._on_device = torch.empty_like(self._on_host)

    monkeypatch.setattr(NcclGroup, "_join", join)
    monkeypatch.setattr(nccl, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(nccl, "pick_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(nccl, "_distributed", SimpleNamespace(BroadcastOptions=SimpleNamespace))
    monkeypatch.setattr(accelerator, "has_nccl", lambda: True)
    monkeypatch.setattr(accelerator, "new_event", device.new_event)
    monkeypatch.setattr(accelerator, "in_stream", device.in_stream)
    yield device
    device.arrived.set()


def joined(transport: Transport | None = None, rank: int = 1) -> NcclGroup:
    store = GroupStore(partial(Rendezvous().change, "g"), 0)
    return NcclGroup(transport or Transport("nccl"), Member("g", rank, 2), store)


def a_set() -> FlatWeights:
    flat = FlatWeights.in_memory(specs_of({"a": torch.empty(3 * BUCKET, dtype=torch.uint8)}))
    flat.data.zero_()
    return flat


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "nccl"}


def test_what_comes_after_the_deadline_is_not_written_and_ends_in_no_traceback(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may receive the same set from another group by then, or have checked it."""
    crashed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashed.append)
    monkeypatch.setattr(nccl, "STALL_S", 0.01)
    before, group, flat = threads(), joined(), a_set()
    with pytest.raises(WeightsError, match="no progress"):
        group.broadcast(flat, ["a"], lambda: False)
    assert device.waits.is_set()
    device.arrived.set()
    wait_until(lambda: threads() <= before)
    assert not flat.data.any()
    assert not crashed


def test_what_arrives_in_time_is_written_and_not_kept(device: Device) -> None:
    device.arrived.set()
    group, flat = joined(), a_set()
    assert group.broadcast(flat, ["a"], lambda: False) == 3 * BUCKET
    assert (flat.data == SENT).all()
    data = weakref.ref(flat.data)
    del flat
    wait_until(lambda: gc.collect() >= 0 and data() is None, "its memory to be freed")
    group.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_trainer_sends_bit_for_bit_and_copies_no_bytes_that_are_pinned_already(
    device: Device, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    sent: list[torch.Tensor] = []

    def broadcast(tensors: list[torch.Tensor], _: object) -> SimpleNamespace:
        sent.extend(tensor.clone() for tensor in tensors)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(device, "broadcast", broadcast)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    device.arrived.set()
    values = {name: torch.randint(256, (size,)).byte() for name, size in (("a", 150), ("b", 41))}
    flat = FlatWeights.in_memory(specs_of(values)).fill(values)
    group = joined(rank=0)
    untouched = torch.full_like(group._on_host, SENT)
    group._on_host.copy_(untouched)
    group.broadcast(flat, ["a", "b"], lambda: False)
    assert torch.equal(torch.cat(sent), torch.cat([values["a"], values["b"]]))
    assert max(len(each) for each in sent) <= BUCKET
    assert torch.equal(group._on_host, untouched) == is_pinned
    group.close()


def test_an_error_of_another_kind_names_it_at_once(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ValueError("Expected a torch.device with a specified index")

    monkeypatch.setattr(device, "broadcast", wrong)
    group = joined()
    with pytest.raises(WeightsError, match=r"a specified index.*a GPU of its own"):
        group.broadcast(a_set(), ["a"], lambda: False)


def test_where_there_is_no_gpu_no_thread_is_left() -> None:
    before = threads()
    with pytest.raises(WeightsError, match="found no GPU here"):
        joined(Transport("nccl", device="cpu"))
    assert threads() == before
