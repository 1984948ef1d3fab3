"""The process group by NCCL: from GPU to GPU, through two buckets on each device.

    NcclGroup   a transport.ByteGroup over NCCL

The bytes go from the trainer's main memory to its GPU (through a pinned bucket, if the memory is not pinned
itself), by NCCL to the workers' GPUs, and through pinned buckets into the workers' main memory, where they
are checked. While one bucket is broadcast, the other one is copied. Each device holds two buckets, and
NCCL's own memory.

NCCL's calls may block without a deadline if a process hangs. So all of them run in a daemon thread, and the
caller watches the progress of the thread. After `STALL_S` without progress the caller aborts the group and
abandons the thread. The abort ends the call for which the thread waits, and nothing more is written to main
memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from bus.errors import MissingPartError, WeightsError, first_line
from dart_cli.hardware import accelerator
from dart_cli.hardware.device import pick_device
from dart_cli.weights.broadcast.rendezvous import GroupStore
from dart_cli.weights.broadcast.transport import (
    BUCKET_BYTES,
    IN_FLIGHT,
    JOIN_S,
    STALL_S,
    Member,
    Transport,
)
from dart_cli.weights.flat_weights import FlatWeights
from dart_cli.weights.manifest import ranges

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here

_FIX = 'each process needs a GPU of its own; else set weights.channel = "gloo" or "file"'


class NcclGroup:
    """A ByteGroup over NCCL."""

    def __init__(self, transport: Transport, member: Member, store: GroupStore) -> None:
        """Join the group. Raises WeightsError if a process does not join within `JOIN_S`."""
        self.name = member.group
        self._member = member
        self._store: Any = store  # the backend calls it as long as the group exists
        self._group: Any = None
        self._is_closed = False
        self._lock = threading.Lock()  # of `_is_closed`, and while bytes are written to main memory
        self._progress = time.monotonic()
        self._work: queue.SimpleQueue[tuple[Callable[[], None], _Outcome] | None]
        self._work = queue.SimpleQueue()
        try:
            self._device = pick_device(transport.device)
        except MissingPartError as error:
            raise WeightsError(str(error)) from None
        if not (accelerator.is_gpu(self._device) and accelerator.has_nccl()):
            raise WeightsError(f'weights.channel = "nccl" found no GPU here; {_FIX}')
        threading.Thread(target=self._run, name="nccl", daemon=True).start()
        self._call(self._join, JOIN_S)

    def broadcast(
        self, flat: FlatWeights, names: Collection[str], stops: Callable[[], bool]
    ) -> int:
        """Broadcast tensors, as ByteGroup.broadcast does."""
        buckets = list(ranges(flat.layout, names, BUCKET_BYTES))
        self._call(lambda: self._broadcast(flat.data, buckets, stops), STALL_S)
        return sum(end - begin for begin, end in buckets)

    def close(self) -> None:
        """Leave the group, as ByteGroup.close does."""
        self._work.put(None)
        with self._lock:
            self._is_closed = True
            group, self._group = self._group, None
        if group is not None:  # the abort may take long
            threading.Thread(target=group.abort, name="nccl_abort", daemon=True).start()

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            _do(*item)
            del item  # which holds the weights

    def _join(self) -> None:
        """Make the group and the buckets; broadcast one byte, since NCCL connects at its first call."""
        member = self._member
        accelerator.set_device_index(self._device)
        group = accelerator.nccl_group(self._store, member.rank, member.size)
        # NCCL waits for the others without a deadline, so begin only when all are there.
        self._store.set(f"here/{member.rank}", b"1")
        self._store.wait([f"here/{rank}" for rank in range(member.size)], timedelta(seconds=JOIN_S))
        self._progress = time.monotonic()
        with self._open():
            self._group = group
        self._stream = accelerator.new_stream(self._device)
        self._on_host = accelerator.host_bytes(IN_FLIGHT, BUCKET_BYTES, pinned=True)
        self._on_device = torch.empty_like(self._on_host, device=self._device)
        self._broadcast(torch.zeros(1, dtype=torch.uint8), [(0, 1)], lambda: False)  # connects
        self._store.seal()

    def _broadcast(
        self, data: torch.Tensor, buckets: Sequence[tuple[int, int]], stops: Callable[[], bool]
    ) -> None:
        """Broadcast byte ranges of `data` from rank 0, one bucket after the other. Raises WeightsError."""
        options = _distributed.BroadcastOptions()
        options.rootRank = 0
        sends = self._member.rank == 0
        is_pinned = data.is_pinned()
        with self._open():
            group = self._group
        under_way: dict[int, tuple[Any, int, int]] = {}

        def finish(slot: int) -> None:
            """Wait until the bucket in a slot is transferred; a receiver then copies it into `data`."""
            if slot not in under_way:
                return
            event, begin, end = under_way.pop(slot)
            event.synchronize()
            if not sends:
                with self._open():
                    data[begin:end].copy_(self._on_host[slot, : end - begin])
            self._progress = time.monotonic()

        with accelerator.in_stream(self._stream):
            for index, (begin, end) in enumerate(buckets):
                if stops():
                    raise WeightsError("this process is closing")
                slot = index % IN_FLIGHT
                finish(slot)
                host = self._on_host[slot, : end - begin]
                device = self._on_device[slot, : end - begin]
                if sends:
                    source = data[begin:end] if is_pinned else host.copy_(data[begin:end])
                    device.copy_(source, non_blocking=True)
                group.broadcast([device], options).wait()  # the stream waits, not this thread
                if not sends:
                    host.copy_(device, non_blocking=True)
                event = accelerator.new_event()
                event.record(self._stream)
                under_way[slot] = event, begin, end
            for slot in sorted(under_way, key=lambda slot: under_way[slot][1]):
                finish(slot)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Keep the group open inside the block. Raises WeightsError if it is closed."""
        with self._lock:
            if self._is_closed:
                raise WeightsError("the group is closed")
            yield

    # --- in the caller's thread -----------------------------------------------------------------

    def _call(self, work: Callable[[], None], stall_s: float) -> None:
        """Run `work` in the thread and wait for its end.

        Raises WeightsError, also after `stall_s` without progress.
        """
        outcome = _Outcome()
        self._progress = time.monotonic()
        self._work.put((work, outcome))
        while not outcome.is_over.wait(max(0.01, self._progress + stall_s - time.monotonic())):
            if time.monotonic() > self._progress + stall_s:
                self.close()
                raise WeightsError(f"NCCL made no progress in {stall_s:g} s: a process hangs")
        if outcome.error is not None:
            self.close()
            raise outcome.error


class _Outcome:
    """The outcome of one call in the thread."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: WeightsError | None = None


def _do(work: Callable[[], None], outcome: _Outcome) -> None:
    """Run `work` and record its error, if any, in `outcome`."""
    try:
        work()
    except WeightsError as error:
        outcome.error = error
    except Exception as error:  # noqa: BLE001 - torch raises more than RuntimeError
        outcome.error = WeightsError(f"NCCL: {first_line(error)}; {_FIX}")
    outcome.is_over.set()
