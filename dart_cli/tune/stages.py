"""The stages of a training, update by update, and where one that was stopped goes on.

train_stages   all of them; the model has the weights then
rate           rises over the first WARM_UP of the budget, then falls along half a cosine
Curve          what the updates cost, in POINTS means of each stage

The same epochs give the same weights every time. Where `tune.max_minutes` ends them earlier, the number of updates, and
so the weights, depend on the machine.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bus.errors import UserError
from dart_cli.config.schema import Config, TuneConfig
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.runtime.role import stop_signals
from dart_cli.runtime.tables import progress
from dart_cli.tune.defaults import Chosen
from dart_cli.tune.examples import Learned
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.pace import Budget, HeldOutWatch, Pace, seconds_left, tell_length
from dart_cli.tune.trainer import StageName, Trainer, put_in, tuned
from dart_cli.tune.training_set import Order, TrainingSet
from dart_cli.tune.training_state import KeptTraining, Progress

FEW_UPDATES = 20
"""A stage of fewer has hardly begun."""
SAVE_EVERY_S = 300.0
"""Seconds between two states that a second start goes on from: writing one takes seconds, losing one minutes."""
POINTS = 100
"""Points of a stage's curve."""
WARM_UP = 0.03
"""Share of a stage (arXiv 2506.03143, 4.1)."""


@dataclass(frozen=True)
class _Stage:
    """What one stage is."""

    name: StageName
    share: float  # of the budget
    lr: float
    losses: LossSettings


def _stages(tune: TuneConfig, use: Chosen, learned: Learned) -> list[_Stage]:
    losses = LossSettings(target=tune.target)
    share = tune.head_share if learned == "pointer" else 0.0
    stages = [
        _Stage("head", share, use.lr_head, replace(losses, lm=False)),
        _Stage("all", 1.0 - share, use.lr, losses),
    ]
    return [stage for stage in stages if stage.share > 0]


def train_stages(
    config: Config,
    use: Chosen,
    learned: Learned,
    policy: LoadedPolicy,
    training_set: TrainingSet,
    kept: KeptTraining,
    held_out: HeldOutWatch,
) -> None:
    """Train all stages from where they are; the model has the weights then.

    Raises KeyboardInterrupt where a signal asked it to end: a second start goes on from there.
    """
    stages = _stages(config.tune, use, learned)
    budgets = [_budget(config.tune, use, stage, training_set) for stage in stages]
    pace = Pace(held_out)
    tensors = kept.state()
    with _told_to_stop() as stopped:
        for number, stage in enumerate(stages):
            if number < kept.progress.stage:
                continue
            trainer = Trainer(
                policy,
                stage.name,
                weight_decay=config.train.weight_decay,
                grad_clip=config.train.grad_clip,
                compute=dtype_of(config.model.dtype),
                freeze_vision=config.model.freeze_vision,
                recompute=config.train.recompute == "layer",
                dropout=learned == "pointer",
            )
            if tensors is not None:
                try:
                    trainer.restore(tensors)
                except ValueError as error:
                    raise UserError(
                        f"{kept.folder / kept.progress.state}: {error}; begin anew with --fresh"
                    ) from None
                tensors = None
            run = _StageRun(
                config, use, stage, number, budgets[number:], trainer, training_set, kept, pace
            )
            what = "training" if len(stages) == 1 else f"stage {stage.name}"
            run.train(what, stopped)
            trainer.finish()
            ended = (kept.progress.updates, kept.progress.seconds)
            kept.progress = Progress(stage=number + 1, stages=(*kept.progress.stages, ended))
            # The next stage begins with all that was changed; no optimizer has moved yet.
            kept.save(kept.progress, {**tuned(policy), "rng": torch.get_rng_state()})
    if tensors is not None:  # everything was over but the folder
        put_in(policy, tensors)


def _budget(tune: TuneConfig, use: Chosen, stage: _Stage, training_set: TrainingSet) -> Budget:
    updates = Order(training_set.together, use.batch, "").updates(use.epochs * stage.share)
    return Budget(updates, 60 * tune.max_minutes * stage.share)


class _StageRun:
    """One stage from where it is to its end, or until it is stopped."""

    def __init__(
        self,
        config: Config,
        use: Chosen,
        stage: _Stage,
        number: int,
        budgets: Sequence[Budget],
        trainer: Trainer,
        training_set: TrainingSet,
        kept: KeptTraining,
        pace: Pace,
    ) -> None:
        """`budgets`: of this stage and of those that follow."""
        self._tune = config.tune
        self._use = use
        self._stage = stage
        self._number = number
        self._budgets = budgets
        self._trainer = trainer
        self._training_set = training_set
        self._kept = kept
        self._pace = pace
        self._order = Order(training_set.together, use.batch, f"{config.run.seed}/{stage.name}")
        self._updates = kept.progress.updates
        self._start = time.monotonic() - kept.progress.seconds
        self._curve = Curve(number, stage.name)

    def train(self, what: str, stopped: Callable[[], bool]) -> None:
        """Make the updates that the budget allows. Raises KeyboardInterrupt once `stopped`."""
        budget, saved = self._budgets[0], time.monotonic()
        if budget.updates < FEW_UPDATES:
            sys.stderr.write(
                f"stage {self._stage.name} has {budget.updates} updates, which teach little: give it more rows, "
                f"lower tune.batch ({self._use.batch}) or raise tune.epochs ({self._use.epochs:g})\n"
            )
        self._pace.begin_stage()
        is_first = True
        with progress(what, budget.updates, "updates") as advance:
            advance(self._updates, self._pace.note(0.0))
            while self._share() < 1:
                if stopped():
                    self._save()
                    raise KeyboardInterrupt
                self._pace.add(self._update())
                if is_first:
                    is_first = False
                    self._tell_length(what)
                advance(1, self._pace.note(self._left_s()))
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self._save()
                    saved = time.monotonic()
        self._kept.progress = self._progress()

    def _update(self) -> float:
        """Make one update; returns its loss."""
        before, budget = self._share(), self._budgets[0]
        lr = rate(self._stage.lr, budget.share(self._updates + 0.5, self._seconds()))
        rows = self._order.of(self._updates)
        try:
            metrics = self._trainer.update(self._training_set.passes(rows, self._stage.losses), lr)
        except FloatingPointError as error:
            raise UserError(
                f"update {self._updates} of stage {self._stage.name}: {error}; train with a lower tune.lr "
                f"({self._use.lr:g})"
            ) from None
        self._updates += 1
        if point := self._curve.add(metrics, self._updates, before, self._share(), self._seconds()):
            self._kept.add_point(point)
        return metrics["loss"]

    def _tell_length(self, what: str) -> None:
        updates = sum(each.updates for each in self._budgets) - self._updates + 1
        tell_length(what, updates, self._pace.update_s, self._left_s(), self._tune.max_minutes)

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _share(self) -> float:
        return self._budgets[0].share(self._updates, self._seconds())

    def _left_s(self) -> float:
        return seconds_left(self._budgets, self._updates, self._seconds(), self._pace.update_s)

    def _progress(self) -> Progress:
        return self._kept.progress.model_copy(
            update={"stage": self._number, "updates": self._updates, "seconds": self._seconds()}
        )

    def _save(self) -> None:
        self._kept.save(self._progress(), self._trainer.state())


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of products; weights and the optimizer's state are in float32."""
    found: torch.dtype = getattr(torch, name)
    return found


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Give a function that returns True once a signal has asked the process to end, which ends the training between two updates."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda sent, _: came.append(sent))
        for number in stop_signals()
    }
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt within the block where a signal asks the process to end."""
    before = {
        number: signal.signal(number, signal.default_int_handler) for number in stop_signals()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- rate and curve -------------------------------------------------------------------------


def rate(peak: float, share: float) -> float:
    """Return the learning rate of an update that begins when `share` of the stage is over."""
    if share < WARM_UP:
        return peak * share / WARM_UP
    return peak * 0.5 * (1.0 + math.cos(math.pi * (share - WARM_UP) / (1.0 - WARM_UP)))


class Curve:
    """Means of the metrics of neighbouring updates: POINTS of them in a stage."""

    def __init__(self, number: int, stage: str) -> None:
        self._told = {"stage": number, "name": stage}
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(
        self, metrics: dict[str, float], updates: int, before: float, over: float, seconds: float
    ) -> dict[str, Any] | None:
        """Add an update; the point that it completes."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        if int(before * POINTS) == int(over * POINTS):
            return None
        means = {name: value / self._count for name, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return {
            **self._told,
            "updates": updates,
            "seconds": round(seconds, 2),
            **{name: round(value, 6) for name, value in means.items() if name != "lr"},
            "lr": metrics["lr"],
        }
