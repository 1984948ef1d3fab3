"""What the training loop needs of a learner, and metrics of a batch; needs no model.

Learner         dart_cli.train.learner.PolicyLearner, or one of a user's own (train.learner)
Update          what one of its updates did
read_all        the tensors of a stream at once
state_of, restore   trained parameters and the optimizer's state as one flat dict of tensors, and back
batch_metrics   staleness and size of a batch, as metrics
named_metrics   metrics of an update under the names that they are kept by
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
"""AdamW's decay rates. The second is 0.99, not 0.999: a run has some hundred updates."""


@dataclass(frozen=True)
class Update:
    """What an update did."""

    applied: bool  # False where the weights stayed as they were
    metrics: dict[str, float]  # at least `samples` and `tokens`; see docs/objective.md
    note: str = ""  # why they stayed, or what was unusual
    alarm: str = ""  # why the run must stop, with unchanged weights: engine and trainer disagree
    mismatches: list[StepMismatch] = field(default_factory=list)
    """How far engine and trainer differed before the update, by step."""
    values: list[StepValue] = field(default_factory=list)
    """What a critic expected before each step."""


class WeightSource(Protocol):
    """A model whose weights are published."""

    def stream(self) -> TensorStream:
        """All tensors that are published, by name, one after another."""
        ...


class SavedState(Protocol):
    """A checkpoint's tensors, under the names of `Learner.state`."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of them."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of one of them."""
        ...

    def fill(self, targets: Tensors) -> None:
        """Read into these tensors, on every rank what it holds of them.

        Raises ValueError for a name that is not here or another shape, before anything has changed;
        CheckpointError if a file cannot be read.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """A learner. Not thread-safe: one thread at a time."""

    before_change: Callable[[], None]
    """Called where the weights are about to change: before each optimizer step, among others. It may
    wait, and what it raises ends the update before anything has changed."""

    @property
    def model(self) -> WeightSource:
        """The model under training."""
        ...

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Take one step on `batch`. Raises ProtocolError if it does not fit the model."""
        ...

    def state(self) -> Tensors:
        """Return what a checkpoint holds: trained parameters in float32, and the optimizer's state.

        The latter by `parameter/name`. The tensors are the learner's own and change with the next
        update. Of one order on all ranks.
        """
        ...

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it is of another model."""
        ...


def read_all(stream: TensorStream) -> Tensors:
    """Return the tensors of a stream in host memory, as they are published; some may be the model's own."""
    return {
        name: tensor.detach().to("cpu", getattr(torch, stream.specs[name].dtype))
        for name, tensor in stream.tensors
    }


def state_of(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the tensors themselves, which the next update changes. Before the first there is no state."""
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
    """Read the parameters and the optimizer's state. What is not saved stays, or begins anew.

    A state of its parameter's shape is made like it: on its device, and sharded as it is. Raises
    ValueError for another shape than the parameter's, before anything has changed.
    """
    targets = {name: value.detach() for name, value in parameters.items() if name in saved.names}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key in sorted(saved.names):  # in one order on all ranks, whose collectives follow it
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
    """Metrics of a batch by itself: staleness in versions over its tokens, size of advantages."""
    ages = {age.version: age.behind for age in batch.ages}
    tokens: Counter[int] = Counter()  # by the versions they are behind
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
    """Return an update's metrics under the names that they are kept by.

    Those of a batch that is trained on again begin with `replay_`: in one curve with the others they
    would tell of neither. Seconds and the learning rate are what every update has.
    """
    if not batch.reuse:
        return dict(metrics)
    return {
        name if name == "lr" or name.endswith("_s") else REPLAY_METRIC + name: value
        for name, value in metrics.items()
    }
