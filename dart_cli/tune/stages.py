"""The stages of a training, update by update, and where one that was stopped goes on.

train_stages   all of them; the model has the weights then
Budget         of a stage: epochs, or seconds
rate           rises over the first WARM_UP of the budget, then falls along half a cosine
Curve          what the updates cost, in POINTS means of each stage

A budget of epochs gives the same weights every time. One of seconds gives as many updates as the machine
makes of them: CPU seconds of this process, on a GPU seconds of the clock.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bus.errors import UserError
from dart_cli.config.schema import Config, TuneConfig
from dart_cli.policy.model import LoadedPolicy
from dart_cli.runtime.role import stop_signals
from dart_cli.runtime.tables import progress
from dart_cli.tune.defaults import Chosen
from dart_cli.tune.examples import Learned
from dart_cli.tune.kept import KeptTraining, Progress
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.trainer import StageName, Trainer, put_in, tuned
from dart_cli.tune.training_set import Order, TrainingSet

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
) -> None:
    """All stages from where they are; the model has the weights then.

    Raises KeyboardInterrupt where a signal asked it to end: a second start goes on from there.
    """
    stages = _stages(config.tune, use, learned)
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
            _run_stage(config, use, stage, number, trainer, training_set, kept, stopped)
            trainer.finish()
            ended = (kept.progress.updates, kept.progress.seconds)
            kept.progress = Progress(stage=number + 1, stages=(*kept.progress.stages, ended))
            # The next stage begins with all that was changed; no optimizer has moved yet.
            kept.save(kept.progress, {**tuned(policy), "rng": torch.get_rng_state()})
    if tensors is not None:  # everything was over but the folder
        put_in(policy, tensors)


def _run_stage(
    config: Config,
    use: Chosen,
    stage: _Stage,
    number: int,
    trainer: Trainer,
    training_set: TrainingSet,
    kept: KeptTraining,
    stopped: Callable[[], bool],
) -> None:
    tune, seed = config.tune, config.run.seed
    order = Order(training_set.together, use.batch, f"{seed}/{stage.name}")
    budget = (
        Budget(seconds=tune.seconds * stage.share)
        if tune.seconds
        else Budget(updates=order.updates(use.epochs * stage.share))
    )
    clock = StageClock(kept.progress.seconds, on_cpu=next(_devices(trainer)).type == "cpu")
    updates, curve, saved = kept.progress.updates, Curve(number, stage.name), time.monotonic()

    def save() -> None:
        at = kept.progress.model_copy(
            update={"stage": number, "updates": updates, "seconds": clock.seconds()}
        )
        kept.save(at, trainer.state())

    if 0 < budget.updates < FEW_UPDATES:
        sys.stderr.write(
            f"stage {stage.name} has {budget.updates} updates, which teach little: give it more rows, lower "
            f"tune.batch ({use.batch}) or raise tune.epochs ({use.epochs:g})\n"
        )
    total = budget.updates or round(budget.seconds)
    unit = "updates" if budget.updates else "s"
    with progress(stage.name, total, unit) as advance:
        shown = 0
        while (share_over := budget.share(updates, clock.seconds())) < 1:
            if stopped():
                save()
                sys.stderr.write(
                    f"stopped after {updates} updates of stage {stage.name}; the same command goes on\n"
                )
                raise KeyboardInterrupt
            lr = rate(stage.lr, budget.share(updates + 0.5, clock.seconds()))
            try:
                metrics = trainer.update(training_set.passes(order.of(updates), stage.losses), lr)
            except FloatingPointError as error:
                raise UserError(
                    f"update {updates} of stage {stage.name}: {error}; train with a lower tune.lr ({use.lr:g})"
                ) from None
            updates += 1
            over = budget.share(updates, clock.seconds())
            if point := curve.add(metrics, updates, share_over, over, clock.seconds()):
                kept.add_point(point)
            now = min(total, updates if budget.updates else int(clock.seconds()))
            advance(now - shown)
            shown = now
            if time.monotonic() - saved > SAVE_EVERY_S:
                save()
                saved = time.monotonic()
    kept.progress = kept.progress.model_copy(
        update={"updates": updates, "seconds": clock.seconds()}
    )


def _devices(trainer: Trainer) -> Iterator[torch.device]:
    return (parameter.device for parameter in trainer.parameters.values())


def dtype_of(name: str) -> torch.dtype:
    """The dtype of products; weights and the optimizer's state are in float32."""
    found: torch.dtype = getattr(torch, name)
    return found


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked the process to end; it then ends the training between two updates."""
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


# --- budget and curve -------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Of one stage: either is 0."""

    updates: int = 0
    seconds: float = 0.0

    def share(self, updates: float, seconds: float) -> float:
        """Share in [0, 1] that is over after so many updates, which took so many seconds."""
        gone = updates / self.updates if self.updates else seconds / self.seconds
        return min(1.0, gone)


def rate(peak: float, share: float) -> float:
    """The learning rate of an update that begins when `share` of the stage is over."""
    if share < WARM_UP:
        return peak * share / WARM_UP
    return peak * 0.5 * (1.0 + math.cos(math.pi * (share - WARM_UP) / (1.0 - WARM_UP)))


class StageClock:
    """Seconds of a stage: of this process's CPU, on a GPU of the clock."""

    def __init__(self, before: float, *, on_cpu: bool) -> None:
        self._read = time.process_time if on_cpu else time.monotonic
        self._begin = self._read() - before

    def seconds(self) -> float:
        """Since the stage began, those before a stop included."""
        return self._read() - self._begin


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
