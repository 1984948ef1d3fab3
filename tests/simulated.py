"""Simulated engines and learners (benchmarks/simulation) with the times that tests need."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.simulation.engine import TimedEngine, random_replies
from benchmarks.simulation.learner import TimedLearner
from benchmarks.simulation.times import Times
from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.engines.base import Model
from dart_cli.engines.scripted import ScriptedResponder
from dart_cli.runtime import role
from dart_cli.train.base import Update

SUITE = "benchmarks.simulation.suite:TimedSuite"
QUICK = f"{__file__}:quick_learner"
SLOW = f"{__file__}:slow_learner"
HELD = f"{__file__}:HeldLearner"
HURRIED = f"{__file__}:hurried_learner"
STUCK = f"{__file__}:stuck_engine"
WORDY = f"{__file__}:wordy_engine"
LATE = f"{__file__}:late_engine"


def quick_learner(_config: Config) -> TimedLearner:
    """Return a learner whose updates take a tenth of a second."""
    return TimedLearner(Times(train_s=0.1, train_sample_s=0.0))


def slow_learner(_config: Config) -> TimedLearner:
    """Return a learner whose updates take as long as real ones of the tiny model."""
    return TimedLearner(Times(train_s=0.5, train_sample_s=0.0))


class HeldLearner(TimedLearner):
    """A learner whose update on batch N makes the file `began-N` beside the run, and waits there for `go-N`."""

    def __init__(self, config: Config) -> None:
        super().__init__(Times(train_s=0.0, train_sample_s=0.0))
        self._folder = config.run.dir.parent

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Wait for the file, then update."""
        (self._folder / f"began-{batch.batch_id}").touch()
        while not Path(self._folder / f"go-{batch.batch_id}").exists():
            time.sleep(0.05)
        return super().update(batch, updates_done, policy_version)


def hurried_learner(config: Config) -> HeldLearner:
    """Return a HeldLearner; its trainer has only one second more than other processes to end."""
    role.LAST_WORK_S = role.GRACE_S + 1.0
    return HeldLearner(config)


def stuck_engine(config: Config) -> Model:
    """Return an engine that never produces a token."""
    return _engine(config, Times(prefill_s=1e6, transfer_s=0.0))


def wordy_engine(config: Config) -> Model:
    """Return an engine whose completions take some five seconds."""
    times = Times(prefill_s=0.05, decode_s=0.08, completion_tokens=60, transfer_s=0.0)
    return _engine(config, times)


def late_engine(config: Config) -> Model:
    """Return an engine that takes ten seconds to read new weights."""
    return _engine(config, Times(prefill_s=0.0, transfer_s=10.0))


def _engine(config: Config, times: Times) -> Model:
    engine = TimedEngine(random_replies(config.policy.action_parser, times), times)
    return Model(engine, ScriptedResponder(engine))
