"""What the training loop needs of a learner, and metrics of a batch; without a model.

Learner         the interface of learner.PolicyLearner and of a user's own class (train.learner)
Update          the result of one update
read_all        reads all tensors of a stream into host memory
state_of        returns trained parameters and the optimizer's state as one flat dict of tensors
restore         reads such a dict into parameters and optimizer
batch_metrics   staleness and size of a batch, as metrics
named_metrics   metrics of an update under the names by which they are stored
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from bus.messages import REPLAY_METRIC, Batch, StepMismatch, StepValue
from dart_cli.weights.flat_weights import TensorStream

Tensors = dict[str, torch.Tensor]

BETAS = (0.9, 0.99)
"""AdamW's decay rates. The second is 0.99 and not 0.999, since a run has only some hundred updates."""


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    applied: bool  # False if the weights are unchanged
    metrics: dict[str, float]  # at least `samples` and `tokens`; see docs/objective.md
    note: str = ""  # why the weights are unchanged, or what was unusual
    alarm: str = ""  # why the run must stop, with unchanged weights: engine and trainer disagree
    mismatches: list[StepMismatch] = field(default_factory=list)
    """For each step how far engine and trainer differed before the update."""
    values: list[StepValue] = field(default_factory=list)
    """For each step the reward that the critic expected before it."""


class WeightSource(Protocol):
    """A model whose weights are published."""

    def stream(self) -> TensorStream:
        """Return all tensors that are published, by name, one after another."""
        ...


class SavedState(Protocol):
    """The tensors of a checkpoint, under the names of `Learner.state`."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        ...

    def fill(self, targets: Tensors) -> None:
        """Read the saved values into `targets`; every rank reads the parts that it holds.

        Raises ValueError if a name is missing or a shape differs, before anything has changed, and
        CheckpointError if a file cannot be read.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """The part of the trainer that updates a model. Not thread-safe: one thread at a time may call it."""

    before_change: Callable[[], None]
    """The learner calls it whenever the weights are about to change, for example before the optimizer changes
    them. It may wait. An error that it raises ends the update before anything has changed."""

    @property
    def model(self) -> WeightSource:
        """The model under training."""
        ...

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Train once on `batch` and return the result. Raises ProtocolError if it does not fit the model."""
        ...

    def state(self) -> Tensors:
        """Return what a checkpoint holds: trained parameters in float32, and the optimizer's state.

        The names of the latter are `parameter/name`. The tensors are not copies, so they change with the
        next update. Their order is the same on all ranks.
        """
        ...

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it belongs to another model."""
        ...


def read_all(stream: TensorStream) -> Tensors:
    """Return the tensors of a stream in host memory, in the types of its specs; some may not be copies."""
    return {
        name: tensor.detach().to("cpu", getattr(torch, stream.specs[name].dtype))
        for name, tensor in stream.tensors
    }


def state_of(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the parameters and the optimizer's state, not copied: the next update changes them.

    Before the first update the optimizer has no state.
    """
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    moments = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }
    return weights | moments


@torch.no_grad()
def restore(
    saved: SavedState, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Read saved parameters and the optimizer's saved state.

    Parameters that are not saved keep their values; their optimizer state begins anew. A state with the
    shape of its parameter is put on the parameter's device and sharded like it. Raises ValueError if a
    parameter has another shape than the saved one, before anything has changed.
    """
    targets = {name: value.detach() for name, value in parameters.items() if name in saved.names}
    states: dict[str, dict[str, torch.Tensor]] = {}
    # Sorted, so that the order is the same on all ranks, whose collective calls follow it.
    for key in sorted(saved.names):
        name, _, part = key.rpartition("/")
        if name not in parameters:
            continue
        parameter, dtype, shape = parameters[name], saved.dtype(key), saved.shape(key)
        value = (
            torch.zeros_like(parameter, dtype=dtype)
            if shape == tuple(parameter.shape)
            else torch.zeros(shape, dtype=dtype, device=parameter.device)
        )
        states.setdefault(name, {})[part] = targets[key] = value
    saved.fill(targets)
    optimizer.state.clear()
    for name, parts in states.items():
        optimizer.state[parameters[name]] = parts


def batch_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Return what can be measured of a batch without a model, as metrics.

    These are the mean and largest staleness of its tokens, in versions, the mean size of its advantages, and
    the number of its groups.
    """
    ages = {age.version: age.behind for age in batch.ages}
    tokens: Counter[int] = Counter()  # by how many versions they are behind
    for sample in batch.samples:
        for span in sample.version_spans:
            behind = ages.get(span.version, max(policy_version - span.version, 0))
            tokens[behind] += span.end - span.start
    behind = sum(versions * count for versions, count in tokens.items())
    return {
        "staleness_mean": behind / max(1, tokens.total()),
        "staleness_max": float(max(tokens, default=0)),
        "advantage_abs_mean": sum(abs(sample.advantage) for sample in batch.samples)
        / max(1, len(batch.samples)),
        "groups": float(len(batch.group_ids)),
    }


def named_metrics(batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an update's metrics under the names by which they are stored.

    The metrics of a batch that is trained on again begin with `replay_`, since one curve of both kinds
    of updates would describe neither. Seconds and the learning rate keep their names.
    """
    if not batch.reuse:
        return dict(metrics)
    return {
        name if name == "lr" or name.endswith("_s") else REPLAY_METRIC + name: value
        for name, value in metrics.items()
    }
