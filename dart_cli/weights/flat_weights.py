"""A weight set as one run of bytes, in memory or in a safetensors file.

FlatSet        the bytes, each tensor as a view of them, and their digests
infos_of       shapes and dtypes of tensors
check_fit      names, shapes and dtypes against a model's
check_finite   no NaN, no infinity
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bus.errors import WeightsError
from dart_cli.weights.layout import Layout, Shaped, layout_of, read_layout
from dart_cli.weights.manifest import Manifest, TensorInfo, tree_digests


@dataclass(frozen=True)
class Info:
    """Shape and dtype of a tensor."""

    shape: list[int]
    dtype: str  # as torch prints it, without the prefix


def infos_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Info]:
    """Shape and dtype of each tensor."""
    return {
        name: Info(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


class FlatSet:
    """Tensors that lie behind each other in one buffer, laid out as in a file."""

    def __init__(self, layout: Layout, data: torch.Tensor) -> None:
        """`data` is uint8 [layout.size_bytes]."""
        self.layout = layout
        self.data = data
        self.tensors = {
            name: data[place.begin : place.end].view(getattr(torch, place.dtype)).view(place.shape)
            for name, place in layout.places.items()
        }

    @classmethod
    def in_memory(cls, infos: Mapping[str, Shaped]) -> FlatSet:
        """A set of these shapes, its values undefined."""
        layout = layout_of(infos)
        return cls(layout, torch.empty(layout.size_bytes, dtype=torch.uint8))

    @classmethod
    def in_file(cls, infos: Mapping[str, Shaped], file: Path) -> FlatSet:
        """The same as a new safetensors file, mapped: what is written is in the file.

        Raises OSError, for a full disk too: all of its room is taken at once.
        """
        layout = layout_of(infos)
        with file.open("wb") as handle:
            # Without this, a disk that fills up ends the process by SIGBUS where it writes.
            os.posix_fallocate(handle.fileno(), 0, len(layout.header) + layout.size_bytes)
            handle.write(layout.header)
        return cls(layout, _mapped(layout, file, shared=True))

    @classmethod
    def of_file(cls, file: Path) -> FlatSet:
        """A safetensors file, mapped to be read. Raises WeightsError."""
        layout = read_layout(file)
        try:
            return cls(layout, _mapped(layout, file, shared=False))
        except (OSError, RuntimeError) as error:  # torch raises the latter for a file that has gone
            raise WeightsError(
                f"{file}: removed while it was read, or unreadable ({error})"
            ) from None

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> FlatSet:
        """Copy `tensors`, on any device, into their places."""
        with torch.no_grad():
            for name, mine in self.tensors.items():
                mine.copy_(tensors[name])
        return self

    def write(self, file: Path) -> None:
        """Write it as a safetensors file. Raises OSError."""
        with file.open("wb") as handle:
            handle.write(self.layout.header)
            handle.write(self.data.numpy().data)

    def digests(self, names: Collection[str] | None = None) -> dict[str, str]:
        """The digest of each tensor, or of each of `names`."""
        data = self.data.numpy()
        places = self.layout.places

        def read(name: str, begin: int, end: int) -> memoryview:
            at = places[name].begin
            return data[at + begin : at + end].data

        chosen = places if names is None else names
        return tree_digests({name: places[name].end - places[name].begin for name in chosen}, read)

    def manifest(self, policy_version: int) -> Manifest:
        """What this set says of itself."""
        digests = self.digests()
        return Manifest(
            policy_version=policy_version,
            size_bytes=self.layout.size_bytes,
            tensors={
                name: TensorInfo(shape=list(place.shape), dtype=place.dtype, digest=digests[name])
                for name, place in self.layout.places.items()
            },
        )

    def check(self, manifest: Manifest, names: Collection[str], where: str) -> None:
        """Raises WeightsError, naming the tensor, unless `names` are what the manifest says."""
        for name, digest in self.digests(names).items():
            if digest != manifest.tensors[name].digest:
                raise WeightsError(
                    f"{where}: {name} is not what the manifest of v{manifest.policy_version} says: "
                    "the digest differs"
                )


def check_fit(path: Path, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsError unless names, shapes and dtypes of a manifest are a model's."""
    given = manifest.tensors
    for name in sorted(expected.keys() - given.keys()):
        raise WeightsError(f"{path} lacks {name}, which the model has")
    for name in sorted(given.keys() - expected.keys()):
        raise WeightsError(f"{path} holds {name}, which the model has not")
    for name, wanted in infos_of(expected).items():
        if (given[name].shape, given[name].dtype) != (wanted.shape, wanted.dtype):
            raise WeightsError(
                f"{path}: {name} is {given[name].dtype}{given[name].shape}, "
                f"the model's is {wanted.dtype}{wanted.shape}"
            )


def check_finite(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises WeightsError, naming the tensor, for values that are not finite."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass that keeps NaN, and 20 times as fast as isfinite().all() on a CPU.
        if not all(torch.isfinite(each) for each in torch.aminmax(tensor)):
            raise WeightsError(f"{path}: {name} has values that are not finite")


def _mapped(layout: Layout, file: Path, *, shared: bool) -> torch.Tensor:
    """The bytes behind the header; what is written to them is in the file if `shared`."""
    size = len(layout.header) + layout.size_bytes
    whole = torch.from_file(str(file), shared=shared, size=size, dtype=torch.uint8)
    return whole[len(layout.header) :]
