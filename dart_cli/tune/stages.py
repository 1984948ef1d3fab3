"""Runs the stages of a training, update by update, and continues one that was stopped.

train_stages   trains all stages; the model has the weights afterwards
rate           the learning rate: rises over WARM_UP of a stage, then falls along half a cosine
Curve          the metrics of the updates, as POINTS means in a stage

The same epochs always give the same weights. Where `tune.max_minutes` ends them earlier, the number of
updates, and so the weights, depend on the machine.
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
from dart_cli.tune.defaults import Hyperparameters
from dart_cli.tune.examples import AnswerKind
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.pace import Budget, HeldOutWatch, Pace, print_length, seconds_left
from dart_cli.tune.trainer import StageName, Trainer, changed_tensors, load_tensors
from dart_cli.tune.training_set import Order, TrainingSet
from dart_cli.tune.training_state import Progress, TrainingFolder

FEW_UPDATES = 20
"""Least number of updates of a stage; with fewer, a warning is printed."""
SAVE_EVERY_S = 300.0
"""Seconds between two saved states. Saving one takes seconds; after a kill, the minutes since the last are
lost."""
POINTS = 100
"""Number of points of a stage's curve."""
WARM_UP = 0.03
"""Share of a stage over which the learning rate rises (arXiv 2506.03143, 4.1)."""


@dataclass(frozen=True)
class _Stage:
    """One stage of a training."""

    name: StageName
    share: float  # of the budget
    lr: float
    losses: LossSettings


def _stages(tune: TuneConfig, hyperparameters: Hyperparameters, kind: AnswerKind) -> list[_Stage]:
    """Return the stages of a training; only a pointer head has a stage before the whole model."""
    losses = LossSettings(target=tune.target)
    share = tune.head_share if kind == "pointer" else 0.0
    stages = [
        _Stage("head", share, hyperparameters.lr_head, replace(losses, lm=False)),
        _Stage("all", 1.0 - share, hyperparameters.lr, losses),
    ]
    return [stage for stage in stages if stage.share > 0]


def train_stages(
    config: Config,
    hyperparameters: Hyperparameters,
    kind: AnswerKind,
    policy: LoadedPolicy,
    training_set: TrainingSet,
    training_folder: TrainingFolder,
    held_out: HeldOutWatch,
) -> None:
    """Train all stages from where they are; the model has the weights afterwards.

    Raises KeyboardInterrupt if a signal asked the process to end; a second start continues from there.
    """
    stages = _stages(config.tune, hyperparameters, kind)
    budgets = [_budget(config.tune, hyperparameters, stage, training_set) for stage in stages]
    pace = Pace(held_out)
    tensors = training_folder.state()
    with _stop_requests() as is_stopping:
        for number, stage in enumerate(stages):
            if number < training_folder.progress.stage:
                continue
            trainer = Trainer(
                policy,
                stage.name,
                weight_decay=config.train.weight_decay,
                grad_clip=config.train.grad_clip,
                compute=dtype_of(config.model.dtype),
                freeze_vision=config.model.freeze_vision,
                recompute=config.train.recompute == "layer",
                dropout=kind == "pointer",
            )
            if tensors is not None:
                try:
                    trainer.restore(tensors)
                except ValueError as error:
                    raise UserError(
                        f"{training_folder.path / training_folder.progress.state}: {error}; begin anew with "
                        "--fresh"
                    ) from None
                tensors = None
            run = _StageRun(
                config=config,
                hyperparameters=hyperparameters,
                stage=stage,
                number=number,
                budgets=budgets[number:],
                trainer=trainer,
                training_set=training_set,
                training_folder=training_folder,
                pace=pace,
            )
            title = "training" if len(stages) == 1 else f"stage {stage.name}"
            run.train(title, is_stopping)
            trainer.finish()
            stage_progress = training_folder.progress
            totals = (stage_progress.updates, stage_progress.seconds)
            training_folder.progress = Progress(
                stage=number + 1, stages=(*stage_progress.stages, totals)
            )
            # The next stage begins with all changed tensors, and with a new optimizer.
            stage_tensors = {**changed_tensors(policy), "rng": torch.get_rng_state()}
            training_folder.save(training_folder.progress, stage_tensors)
    if tensors is not None:  # all stages were over before this start
        load_tensors(policy, tensors)


def _budget(
    tune: TuneConfig, hyperparameters: Hyperparameters, stage: _Stage, training_set: TrainingSet
) -> Budget:
    """Return the number of updates and the time limit of a stage."""
    order = Order(training_set.group_names, hyperparameters.batch, "")
    updates = order.updates(hyperparameters.epochs * stage.share)
    return Budget(updates, 60 * tune.max_minutes * stage.share)


class _StageRun:
    """One stage from where it is to its end, or until it is stopped."""

    def __init__(
        self,
        *,
        config: Config,
        hyperparameters: Hyperparameters,
        stage: _Stage,
        number: int,
        budgets: Sequence[Budget],
        trainer: Trainer,
        training_set: TrainingSet,
        training_folder: TrainingFolder,
        pace: Pace,
    ) -> None:
        """Prepare a stage. `budgets` has the budget of this stage, then of each later stage."""
        self._tune = config.tune
        self._hyperparameters = hyperparameters
        self._stage = stage
        self._number = number
        self._budgets = budgets
        self._trainer = trainer
        self._training_set = training_set
        self._training_folder = training_folder
        self._pace = pace
        seed = f"{config.run.seed}/{stage.name}"
        self._order = Order(training_set.group_names, hyperparameters.batch, seed)
        self._updates = training_folder.progress.updates
        self._start = time.monotonic() - training_folder.progress.seconds
        self._curve = Curve(number, stage.name)

    def train(self, title: str, is_stopping: Callable[[], bool]) -> None:
        """Make the updates that the budget allows.

        Raises KeyboardInterrupt once `is_stopping` returns True.
        """
        budget, last_save = self._budgets[0], time.monotonic()
        if budget.updates < FEW_UPDATES:
            sys.stderr.write(
                f"stage {self._stage.name} has {budget.updates} updates, which teach little: give it more rows, "
                f"lower tune.batch ({self._hyperparameters.batch}) or raise tune.epochs "
                f"({self._hyperparameters.epochs:g})\n"
            )
        self._pace.begin_stage()
        is_first = True
        with progress(title, budget.updates, "updates") as advance:
            advance(self._updates, self._pace.note(0.0))
            while self._share() < 1:
                if is_stopping():
                    self._save()
                    raise KeyboardInterrupt
                self._pace.add(self._update())
                if is_first:
                    is_first = False
                    self._print_length(title)
                advance(1, self._pace.note(self._left_s()))
                if time.monotonic() - last_save > SAVE_EVERY_S:
                    self._save()
                    last_save = time.monotonic()
        self._training_folder.progress = self._progress()

    def _update(self) -> float:
        """Make one update, and return its loss."""
        before, budget = self._share(), self._budgets[0]
        lr = rate(self._stage.lr, budget.share(self._updates + 0.5, self._seconds()))
        rows = self._order.of(self._updates)
        try:
            metrics = self._trainer.update(self._training_set.passes(rows, self._stage.losses), lr)
        except FloatingPointError as error:
            raise UserError(
                f"update {self._updates} of stage {self._stage.name}: {error}; train with a lower tune.lr "
                f"({self._hyperparameters.lr:g})"
            ) from None
        self._updates += 1
        if point := self._curve.add(metrics, self._updates, before, self._share(), self._seconds()):
            self._training_folder.add_point(point)
        return metrics["loss"]

    def _print_length(self, title: str) -> None:
        """Print how long this stage and the later ones take."""
        updates = sum(budget.updates for budget in self._budgets) - self._updates + 1
        print_length(title, updates, self._pace.update_s, self._left_s(), self._tune.max_minutes)

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _share(self) -> float:
        """Return the share of the stage that is over, in [0, 1]."""
        return self._budgets[0].share(self._updates, self._seconds())

    def _left_s(self) -> float:
        """Return the seconds that this stage and the later ones still take."""
        return seconds_left(self._budgets, self._updates, self._seconds(), self._pace.update_s)

    def _progress(self) -> Progress:
        """Return how far the training is."""
        return self._training_folder.progress.model_copy(
            update={"stage": self._number, "updates": self._updates, "seconds": self._seconds()}
        )

    def _save(self) -> None:
        """Save the state, so that a second start continues here."""
        self._training_folder.save(self._progress(), self._trainer.state())


def dtype_of(name: str) -> torch.dtype:
    """Return a torch dtype by its name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has asked the process to end.

    The training asks it between two updates.
    """
    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in stop_signals()
    }
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block when a signal asks the process to end."""
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
    """Return the learning rate of an update; in its middle, `share` of the stage is over."""
    if share < WARM_UP:
        return peak * share / WARM_UP
    return peak * 0.5 * (1.0 + math.cos(math.pi * (share - WARM_UP) / (1.0 - WARM_UP)))


class Curve:
    """The metrics of a stage, as POINTS means over neighbouring updates."""

    def __init__(self, number: int, stage: str) -> None:
        self._labels = {"stage": number, "name": stage}
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(
        self, metrics: dict[str, float], updates: int, before: float, over: float, seconds: float
    ) -> dict[str, Any] | None:
        """Add an update, and return the point that it completes, if any.

        `before` and `over` are the shares of the stage that were over before and after it.
        """
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        if int(before * POINTS) == int(over * POINTS):
            return None
        means = {name: value / self._count for name, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return {
            **self._labels,
            "updates": updates,
            "seconds": round(seconds, 2),
            **{name: round(value, 6) for name, value in means.items() if name != "lr"},
            "lr": metrics["lr"],
        }
