"""A weight set as one contiguous buffer, in memory or in a safetensors file.

FlatWeights    the buffer, with each tensor as a view of it; computes digests, writes the file
TensorStream   the tensors of a version, one after another, for a channel to copy
TensorCopy     copies a stream into a buffer of host memory, from GPUs beside their work
read_whole     the tensors of a whole set, mapped from its file
specs_of       shapes and dtypes of tensors
check_fit      compares names, shapes and dtypes of a set with a model
check_finite   refuses NaN and infinity
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig
from dart_cli.hardware import accelerator
from dart_cli.weights.manifest import (
    WEIGHTS,
    Layout,
    Manifest,
    TensorInfo,
    TensorSpec,
    layout_of,
    read_layout,
    tree_digests,
)

IN_FLIGHT_BYTES = 256 << 20
"""Most bytes of copies from a GPU that are under way at once."""


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return the shape and dtype of each tensor."""
    return {
        name: TensorSpec(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


class FlatWeights:
    """Tensors one after another in one buffer, laid out as in a file."""

    def __init__(self, layout: Layout, data: torch.Tensor) -> None:
        """Use `data`, uint8 [layout.size_bytes], as the buffer."""
        self.layout = layout
        self.data = data
        self.tensors = {
            name: data[entry.begin : entry.end].view(getattr(torch, entry.dtype)).view(entry.shape)
            for name, entry in layout.entries.items()
        }

    @classmethod
    def in_memory(
        cls, infos: Mapping[str, TensorSpec | TensorInfo], *, pinned: bool = False
    ) -> FlatWeights:
        """Return a set of these shapes with undefined values.

        GPUs can copy to it asynchronously if `pinned`.
        """
        layout = layout_of(infos)
        return cls(layout, accelerator.host_bytes(layout.size_bytes, pinned=pinned))

    @classmethod
    def in_file(cls, infos: Mapping[str, TensorSpec | TensorInfo], file: Path) -> FlatWeights:
        """Return a set of these shapes as a new memory-mapped safetensors file.

        Values that are written to the set go to the file. Raises OSError, also if the disk is full, since the
        whole space is allocated at once.
        """
        layout = layout_of(infos)
        with file.open("wb") as handle:
            # Without this, a full disk kills the process by SIGBUS when it writes to the mapped memory.
            os.posix_fallocate(handle.fileno(), 0, len(layout.header) + layout.size_bytes)
            handle.write(layout.header)
        return cls(layout, _mapped(layout, file, shared=True))

    @classmethod
    def of_file(cls, file: Path) -> FlatWeights:
        """Return the set in a safetensors file, mapped for reading. Raises WeightsError."""
        layout = read_layout(file)
        try:
            return cls(layout, _mapped(layout, file, shared=False))
        # torch raises RuntimeError if the file was removed.
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"{file}: removed while it was read, or unreadable ({error})"
            ) from None

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> FlatWeights:
        """Copy `tensors`, which may be on any device, into the buffer, and return this set."""
        with torch.no_grad():
            for name, target in self.tensors.items():
                target.copy_(tensors[name])
        return self

    def write(self, file: Path) -> dict[str, str]:
        """Write a safetensors file on all cores and return the digest of each tensor. Raises OSError.

        The bytes are read once for both purposes.
        """
        header = self.layout.header
        with file.open("wb") as handle:
            handle.write(header)
            handle.flush()
            to, begin = handle.fileno(), len(header)
            return self._digests(self.layout.entries, lambda at, part: _put(to, part, begin + at))

    def digests(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return the digest of each tensor, or of each of `names`."""
        return self._digests(self.layout.entries if names is None else names, lambda *_: None)

    def _digests(
        self, names: Collection[str], take: Callable[[int, memoryview], None]
    ) -> dict[str, str]:
        """Return the digests of `names`; call `take` with each part of their bytes and its place before.

        The calls are `take(begin, part)`, from several threads.
        """
        data = self.data.numpy()
        entries = self.layout.entries

        def read(name: str, begin: int, end: int) -> memoryview:
            at = entries[name].begin
            part: memoryview = data[at + begin : at + end].data
            take(at + begin, part)
            return part

        return tree_digests({name: entries[name].end - entries[name].begin for name in names}, read)

    def manifest(
        self, policy_version: int, digests: Mapping[str, str], lora: LoraConfig | None = None
    ) -> Manifest:
        """Return the manifest of this set with these digests; `lora` are the settings of adapters."""
        return Manifest(
            policy_version=policy_version,
            size_bytes=self.layout.size_bytes,
            tensors={
                name: TensorInfo(shape=list(entry.shape), dtype=entry.dtype, digest=digests[name])
                for name, entry in self.layout.entries.items()
            },
            lora=lora,
        )

    def check(self, manifest: Manifest, names: Collection[str], where: str) -> None:
        """Raise WeightsError with the tensor's name unless the digests of `names` match the manifest."""
        for name, digest in self.digests(names).items():
            if digest != manifest.tensors[name].digest:
                raise WeightsError(
                    f"{where}: {name} does not match the manifest of v{manifest.policy_version}: "
                    "the digest differs"
                )


def read_whole(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole set at `path`, mapped from its file.

    Raises WeightsError unless names and shapes match `manifest`.
    """
    tensors = FlatWeights.of_file(path / WEIGHTS).tensors
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: info.shape for name, info in manifest.tensors.items()}:
        raise WeightsError(f"{path / WEIGHTS} holds other tensors than its manifest lists")
    return tensors


def check_fit(path: Path, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError unless names, shapes and dtypes of a manifest match the tensors `expected`."""
    listed = manifest.tensors
    for name in sorted(expected.keys() - listed.keys()):
        raise WeightsError(f"{path} lacks {name}, which the model has")
    for name in sorted(listed.keys() - expected.keys()):
        raise WeightsError(f"{path} holds {name}, which the model lacks")
    for name, spec in specs_of(expected).items():
        if (listed[name].shape, listed[name].dtype) != (spec.shape, spec.dtype):
            raise WeightsError(
                f"{path}: {name} is {listed[name].dtype}{listed[name].shape}, "
                f"the model's is {spec.dtype}{spec.shape}"
            )


def check_finite(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise WeightsError with the tensor's name for values that are not finite."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass, which propagates NaN; on a CPU it is 20 times as fast as isfinite().all().
        if not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
            raise WeightsError(f"{path}: {name} has values that are not finite")


def _put(handle: int, part: memoryview, at: int) -> None:
    """Write all of `part` at byte `at` of an open file. Raises OSError."""
    while part:
        count = os.pwrite(handle, part, at)
        part, at = part[count:], at + count


def _mapped(layout: Layout, file: Path, *, shared: bool) -> torch.Tensor:
    """Return the bytes after the header; values that are written to them go to the file if `shared`."""
    size = len(layout.header) + layout.size_bytes
    whole = torch.from_file(str(file), shared=shared, size=size, dtype=torch.uint8)
    return whole[len(layout.header) :]


# --- copies of tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorStream:
    """The tensors of a version, one after another. A channel reads it once.

    Tensors on a GPU are read after all work that is queued, at the call of `begin`, on the current
    stream.
    """

    specs: Mapping[str, TensorSpec]
    """Shapes and dtypes as they are published; a tensor of another dtype is cast when it is copied."""
    tensors: Iterable[tuple[str, torch.Tensor]]  # each of `specs` once, on any device
    is_gathered: bool = False
    """True if reading a tensor is a collective call of all ranks. Then `begin` reads and copies all tensors
    before it returns, since such calls belong to the caller's thread; otherwise they are copied beside what
    follows."""


class TensorCopy:
    """A copy of a stream into host memory; the thread that computed the tensors makes it."""

    def __init__(self, stream: TensorStream) -> None:
        """Read the list of tensors now, unless the stream is gathered; `into` copies them."""
        self._tensors = stream.tensors if stream.is_gathered else list(stream.tensors)
        self._ready: Any = None  # an event of the GPU's stream
        if not stream.is_gathered:
            device = next(
                (tensor.device for _, tensor in self._tensors if accelerator.is_gpu(tensor.device)),
                None,
            )
            if device is not None:  # which need not be the current one
                self._ready = accelerator.current_stream(device).record_event()

    @torch.no_grad()
    def into(self, flat: FlatWeights) -> FlatWeights:
        """Copy the tensors to `flat` and return it. Afterwards the tensors may change."""
        copies: _DeviceCopies | None = None
        for name, tensor in self._tensors:
            target = flat.tensors[name]
            if accelerator.is_gpu(tensor.device):
                copies = copies or _DeviceCopies(tensor.device)
                copies.begin(target, tensor, self._ready)
            else:
                target.copy_(tensor)
        if copies is not None:
            copies.wait(0)
        return flat


class _DeviceCopies:
    """Copies from one GPU to pinned memory, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = accelerator.new_stream(device)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._bytes = 0

    def begin(self, target: torch.Tensor, tensor: torch.Tensor, ready: Any) -> None:
        """Copy `tensor` after the event `ready`, by default after the work queued on the current stream."""
        for to, part in parts_of(target, tensor, IN_FLIGHT_BYTES // 4):
            self.wait(IN_FLIGHT_BYTES - to.nbytes)
            self._begin(to, part, ready)

    def _begin(self, target: torch.Tensor, tensor: torch.Tensor, ready: Any) -> None:
        """Begin to copy one part, in the type of `target`."""
        if ready is None:
            self._stream.wait_stream(accelerator.current_stream(tensor.device))
        else:
            self._stream.wait_event(ready)
        with accelerator.in_stream(self._stream):
            value = tensor.to(target.dtype)
            target.copy_(value, non_blocking=True)
            event = accelerator.new_event()
            event.record(self._stream)
        # The value is kept until it is copied, since another stream may own its memory.
        self._under_way.append((event, value))
        self._bytes += value.nbytes

    def wait(self, most_bytes: int) -> None:
        """Wait until no more than `most_bytes` are under way."""
        while self._under_way and self._bytes > most_bytes:
            event, value = self._under_way.popleft()
            event.synchronize()
            self._bytes -= value.nbytes


def parts_of(
    target: torch.Tensor, source: torch.Tensor, most_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of both tensors, cut at the same rows, of at most `most_bytes` or one row of `target`."""
    if target.nbytes <= most_bytes or not target.ndim:
        yield target, source
        return
    rows = max(1, most_bytes * len(target) // target.nbytes)
    for begin in range(0, len(target), rows):
        yield target[begin : begin + rows], source[begin : begin + rows]


def stream_of(tensors: Mapping[str, torch.Tensor]) -> TensorStream:
    """Return a stream of tensors in memory, with their own dtypes."""
    return TensorStream(specs_of(tensors), tensors.items())
