"""A publication: tensors are copied to host memory, then digested and written beside what follows.

    BackgroundPublication   the work of one version in a thread; see dart_cli.weights.base.Publication
    TensorCopy              what is to be copied, and the copying
    stream_of               tensors that lie in memory as a stream

On CUDA the copies run on a stream of their own, behind what the tensors' own stream has been given, so
the device goes on with the next forward pass. Those that are cast first take `IN_FLIGHT_BYTES` of the
device at most, however large the set is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch

from bus.errors import WeightsError
from dart_cli.weights.base import Published, TensorStream
from dart_cli.weights.flat_weights import FlatWeights, specs_of

PUBLISH_S = 900.0
"""Longest time of a publication: some 100 GB on a slow disk."""
IN_FLIGHT_BYTES = 256 << 20
"""Bytes of a GPU's copies that are under way at once."""

Copied = TypeVar("Copied")


class BackgroundPublication(Generic[Copied]):
    """Runs `copy`, then `finish` on what that returned, in a daemon thread."""

    def __init__(
        self,
        target: Path,
        policy_version: int,
        copy: Callable[[], Copied],
        finish: Callable[[Copied], Published],
        *,
        began: float | None = None,
        deadline_s: float = PUBLISH_S,
    ) -> None:
        """`began` in monotonic seconds, by default now; `target` is for errors."""
        self.policy_version = policy_version
        self._target = target
        self._began = time.monotonic() if began is None else began
        self._deadline_s = deadline_s
        self._took = 0.0
        self._published: Published | None = None
        self._error: BaseException | None = None
        self._is_told = False  # the error was raised
        self._copied, self._over = threading.Event(), threading.Event()
        threading.Thread(
            target=self._run, args=(copy, finish), name="publication", daemon=True
        ).start()

    @property
    def is_copied(self) -> bool:
        """See Publication."""
        return self._copied.is_set()

    @property
    def is_over(self) -> bool:
        """See Publication."""
        return self._over.is_set()

    @property
    def seconds(self) -> float:
        """See Publication."""
        return self._took if self.is_over else time.monotonic() - self._began

    def copied(self) -> None:
        """See Publication."""
        self._wait(self._copied, "copied")

    def result(self) -> Published:
        """See Publication."""
        self._wait(self._over, "complete")
        assert self._published is not None
        return self._published

    def settle(self) -> None:
        """Wait until it is over. Raises its error if no wait has raised it yet."""
        if not (self._over.is_set() and self._is_told):
            self.result()

    def _wait(self, event: threading.Event, state: str) -> None:
        left_s = self._began + self._deadline_s - time.monotonic()
        if not event.wait(max(left_s, 0.0)):
            raise WeightsError(
                f"{self._target} is not {state} after {self._deadline_s:.0f} s; does its disk hang?"
            )
        if self._error is not None:
            self._is_told = True
            raise self._error

    def _run(
        self, copy: Callable[[], Copied], finish: Callable[[Copied], Published]
    ) -> None:  # which hold the tensors, and go with the thread
        try:
            copied = copy()
            self._copied.set()
            self._published = finish(copied)
        except BaseException as error:  # noqa: BLE001 - raised by the next wait
            self._error = error
        self._took = time.monotonic() - self._began
        self._copied.set()
        self._over.set()


class TensorCopy:
    """What is copied into host memory. Made where the tensors were computed."""

    def __init__(self, stream: TensorStream) -> None:
        """The tensors of a stream that is not gathered are taken now, and read by `into`."""
        self._tensors = stream.tensors if stream.is_gathered else list(stream.tensors)
        self._ready: torch.cuda.Event | None = None
        if not stream.is_gathered:
            device = next((each.device for _, each in self._tensors if each.is_cuda), None)
            if device is not None:  # which need not be the current one
                self._ready = torch.cuda.current_stream(device).record_event()

    @torch.no_grad()
    def into(self, flat: FlatWeights) -> dict[str, torch.Tensor]:
        """Copy the tensors that `flat` has; returns the others. They may change then."""
        others: dict[str, torch.Tensor] = {}
        copies: _DeviceCopies | None = None
        for name, tensor in self._tensors:
            target = flat.tensors.get(name)
            if target is None:
                others[name] = tensor
            elif tensor.is_cuda:
                copies = copies or _DeviceCopies(tensor.device)
                copies.begin(target, tensor, self._ready)
            else:
                target.copy_(tensor)
        if copies is not None:
            copies.wait(0)
        return others


class _DeviceCopies:
    """Copies from one GPU to pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._bytes = 0

    def begin(
        self, target: torch.Tensor, tensor: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        """Copy `tensor` as it is at `ready`, by default as the current stream leaves it."""
        for to, part in parts_of(target, tensor, IN_FLIGHT_BYTES // 4):
            self.wait(IN_FLIGHT_BYTES - to.nbytes)
            self._begin(to, part, ready)

    def _begin(
        self, target: torch.Tensor, tensor: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        else:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            value = tensor.to(target.dtype)
            target.copy_(value, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        # Kept until it is copied: its memory belongs to whichever stream made it.
        self._under_way.append((done, value))
        self._bytes += value.nbytes

    def wait(self, most_bytes: int) -> None:
        """Wait until no more than `most_bytes` are under way."""
        while self._under_way and self._bytes > most_bytes:
            done, value = self._under_way.popleft()
            done.synchronize()
            self._bytes -= value.nbytes


def parts_of(
    target: torch.Tensor, source: torch.Tensor, most_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors cut alike, into rows of at most `most_bytes` of `target`; at least one row each."""
    if target.nbytes <= most_bytes or not target.ndim:
        yield target, source
        return
    rows = max(1, most_bytes * len(target) // target.nbytes)
    for begin in range(0, len(target), rows):
        yield target[begin : begin + rows], source[begin : begin + rows]


def is_on_gpu() -> bool:
    """Whether this process uses CUDA: then what is copied to is pinned."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def stream_of(tensors: Mapping[str, torch.Tensor]) -> TensorStream:
    """Tensors in memory, as they are."""
    return TensorStream(specs_of(tensors), tensors.items())
