"""A learner that takes as long as a real one would and learns nothing: to measure scheduling.

times.py has the times. Everything around it is real: batches are taken
and acknowledged, checkpoints and weight sets written; they hold a few numbers instead of a model, so
that no model has to be loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.simulation.times import Times
from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.train.base import SavedState, Tensors, Update
from dart_cli.weights.flat_weights import TensorStream, stream_of

_NAME = "timed.updates"


class TimedModel:
    """One tensor: it counts the updates, so that each version has other weights."""

    def __init__(self) -> None:
        self._updates = torch.zeros(1, dtype=torch.int64)

    def weights(self) -> Tensors:
        """Return the tensors that are published; they share the model's memory."""
        return {_NAME: self._updates}

    def stream(self) -> TensorStream:
        """Return the same tensors as `weights`, as a stream."""
        return stream_of(self.weights())


def timed_learner(config: Config) -> TimedLearner:
    """Return what `train.learner` names: the learner with the times of [env.options]."""
    return TimedLearner(Times.of(config))


class TimedLearner:
    """A learner that only takes time; dart_cli.train.base.Learner has the contract."""

    def __init__(self, times: Times) -> None:
        self.model = TimedModel()
        self.before_change: Callable[[], None] = lambda: None
        self._update_s = times.train_s / times.speedup
        self._sample_s = times.train_sample_s / times.speedup

    def update(
        self,
        batch: Batch,
        updates_done: int,  # noqa: ARG002 - the contract's
        policy_version: int | None = None,  # noqa: ARG002
    ) -> Update:
        """Sleep as long as an update on `batch` takes, and count it."""
        time.sleep(self._update_s + self._sample_s * len(batch.samples))
        self.before_change()
        self.model.weights()[_NAME] += 1
        tokens = sum(len(sample) for sample in batch.samples if sample.weight != 0)
        metrics = {"samples": float(len(batch.samples)), "tokens": float(tokens), "skipped": 0.0}
        return Update(applied=True, metrics=metrics)

    def state(self) -> Tensors:
        """Return the count; there is no optimizer."""
        return self.model.weights()

    def restore(self, saved: SavedState) -> None:
        """Restore the count. Raises ValueError if the checkpoint is a real model's."""
        if saved.names != {_NAME}:
            raise ValueError("it is a model's, and the timed learner has none")
        saved.fill(self.model.weights())
