"""The interface of a weight channel: the trainer publishes versions, workers take the newest.

Published      one published version, as it is announced
KnownVersion   the newest version in the run's ledger
TensorStream   the tensors of a version, one after another, as a channel copies them
Publication    a version on its way: copied first, then digested and written
WeightChannel  the trainer's end
Receiver       a worker's end
Received       what a worker receives: a weight set for its engine to load
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dart_cli.policy.weight_set import WeightSet
from dart_cli.weights.layout import ShapeAndType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Published:
    """One complete, immutable weight set."""

    policy_version: int
    path: Path  # directory with manifest.json
    digest: str  # of the manifest, which holds the tensors' digests
    size_bytes: int  # of all tensors, however few of them are sent


class KnownVersion(NamedTuple):
    """A version as the run's ledger has it."""

    policy_version: int
    digest: str  # of its manifest


@dataclass(frozen=True)
class TensorStream:
    """The tensors of a version, one after another. A channel reads it once.

    Tensors on a GPU are read as the stream that is current where `begin` is called leaves them.
    """

    specs: Mapping[str, ShapeAndType]  # as they are published; another dtype is cast in copying
    tensors: Iterable[tuple[str, torch.Tensor]]  # each of `specs` once, on any device
    is_gathered: bool = False
    """Whether reading a tensor is a call of all ranks. `begin` then reads and copies all of them before
    it returns, since such calls belong to the caller's thread; else they are copied beside what follows."""


class Publication(Protocol):
    """A version on its way. Any thread may call, and each wait has a deadline.

    An error of the work in the background is raised by the first wait after it, and by each later one.
    """

    @property
    def policy_version(self) -> int:
        """The number under which the tensors are published."""
        ...

    @property
    def is_copied(self) -> bool:
        """Whether `copied` returns or raises at once."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether `result` returns or raises at once."""
        ...

    @property
    def seconds(self) -> float:
        """Since it began; once it is over, the seconds that it took."""
        ...

    def copied(self) -> None:
        """Wait until the tensors may change: the channel has a copy. Raises WeightsError."""
        ...

    def result(self) -> Published:
        """Wait until the version is complete: digested and written. Raises WeightsError."""
        ...


class WeightChannel(Protocol):
    """The trainer's end. A published version never changes its weights."""

    def begin(
        self, tensors: TensorStream | Mapping[str, torch.Tensor], policy_version: int
    ) -> Publication:
        """Begin to make `tensors` by name available as `policy_version`, all at once.

        They must not change until `Publication.copied` has returned. There is one publication at a
        time: the next waits until the one before is over, and raises its error if it was not raised yet.
        A publication fails with WeightsError if the version exists with other weights or cannot be
        written.
        """
        ...

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Published:
        """Begin a publication and wait for its result. Raises WeightsError."""
        ...

    def newest(self) -> Published | None:
        """The newest complete set, None before the first."""
        ...

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        frozen: Collection[str] = (),
        known: KnownVersion | None = None,
    ) -> Published:
        """Publish the weights that a trainer starts from, as `policy_version` or, if taken, a later one.

        `frozen` names the tensors that no later version will change; `known` is the newest version
        that the run's ledger has, which the directory may lack: it was moved, copied or emptied.
        """
        ...

    def close(self) -> None:
        """Leave the newest version whole on disk, the one on its way included; called when the trainer exits."""
        ...


@dataclass(frozen=True)
class Received:
    """The outcome of a permit: the version that it named, or a later one."""

    source: WeightSet  # a directory is checked by its loader
    policy_version: int


class Receiver(Protocol):
    """A worker's end. One call at a time, and none while an engine loads what was received."""

    async def prepare(self, policy_version: int) -> None:
        """Bring the announced version, or a later one, as far as that can be done without a permit.

        Never raises WeightsError: where it fails, `receive` tries again and says why.
        """
        ...

    async def receive(self, path: Path, policy_version: int, digest: str) -> Received:
        """Get the announced version, or a later one. Raises WeightsError, by a deadline."""
        ...

    def close(self) -> None:
        """Remove the worker's copy."""
        ...
