"""Supervised training of a model folder: the `dart model sft` verb.

run_sft      reads the data, trains, writes the folder whole or not at all
SftOptions   what the verb was asked for
Trained      what came of it

OUT.part holds what a second start goes on from; it is gone when OUT is there. OUT/sft.json tells how OUT was
made: settings, updates, seconds, and the curve.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors import SafetensorError

from bus.errors import ConfigError, DiskError, UserError
from dart_cli.algo.pointing import GAUSSIAN_WIDTH
from dart_cli.config.models import model_problem
from dart_cli.config.schema import Config
from dart_cli.evaluation.grounding.formats import AnswerFormat, folder_of, grounding_config
from dart_cli.evaluation.grounding.items import Item
from dart_cli.evaluation.grounding.reader import read_set
from dart_cli.evaluation.grounding.run import folder_digest
from dart_cli.evaluation.grounding.verify import verifier_config
from dart_cli.policy.device import pick_device
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.saved_folder import copy_rest, share, write_model
from dart_cli.policy.verifier import FILE as VERIFIER
from dart_cli.policy.verifier import VerifierSpec, answer_tokens
from dart_cli.runtime.progress import progress
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.tables import page_table
from dart_cli.sft.examples import (
    Answers,
    Example,
    Examples,
    Place,
    PointerAnswers,
    TextAnswers,
    TruthAnswers,
)
from dart_cli.sft.kept import KeptTraining, Progress, SftSettings
from dart_cli.sft.loss import LossSettings, Target
from dart_cli.sft.order import Order
from dart_cli.sft.rows import read_rows
from dart_cli.sft.schedule import Budget, rate
from dart_cli.sft.trainer import StageName, Trainer

Task = Literal["pointer", "text", "verifier"]

RECORD = "sft.json"

POINTS = 100
"""Points of a stage's curve."""


@dataclass(frozen=True)
class SftOptions:
    """What was asked for. The defaults are GUI-Actor's (arXiv 2506.03143, 4.1)."""

    data: Path  # a grounding set; for a verifier, rows
    model: str
    out: Path
    task: Task = "pointer"
    layout: str = ""
    codec: str = ""
    overrides: list[str] = field(default_factory=list)
    place: Place = "centre"
    head_share: float = 0.5  # of the budget, for the stage of the head alone
    epochs: float = 2.0
    seconds: float = 0.0  # in place of epochs
    batch: int = 32
    micro_batch: int = 0  # examples of one forward pass; 0 for all
    lr: float = 5e-6
    lr_head: float = 1e-4
    lm_weight: float = 1.0
    pointer_weight: float = 1.0
    target: Target = "box"
    gaussian_width: float = GAUSSIAN_WIDTH
    suppress: float = 0.0
    max_pixels: int = 0
    limit: int = 0
    seed: int = 0
    save_every: float = 300.0  # seconds of the clock
    skip_malformed: bool = False
    fresh: bool = False
    as_json: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    out: Path
    examples: int
    updates: int
    seconds: float
    curve: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        last = self.curve[-1] if self.curve else {}
        return {
            "out": str(self.out),
            "examples": self.examples,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            **{name: last[name] for name in _SHOWN if name in last},
        }


def run_sft(options: SftOptions) -> Trained | None:
    """Train; None for a dry run. Raises UserError, ConfigError and ModelError before anything starts.

    Raises KeyboardInterrupt where SIGINT or SIGTERM came: a second start goes on from there.
    """
    _check(options)
    items, digest, left_out = _items(options)
    config, answers = _configured(options)
    settings = _settings(options, config, answers, digest, len(items))
    part = options.out.with_name(f"{options.out.name}.part")
    console = Console(markup=False, highlight=False)
    if options.dry_run:
        for name, value in settings.model_dump().items():
            console.print(f"{name + ':':<16} {value}")
        console.print("valid; nothing was trained")
        return None
    limit_threads(config.train.threads)
    end_with_parent()
    torch.manual_seed(options.seed)
    policy = load_policy(
        options.model,
        "float32",
        pick_device(config.rollout.device),
        pointing=config.policy.pointing,
    )
    if options.max_pixels:
        policy.images.bounds = config.policy.resize_min_pixels, config.policy.resize_max_pixels
    examples = Examples(policy, config, items, _answers_of(options, policy, config, answers))
    with KeptTraining(part, settings, fresh=options.fresh) as kept:
        _train(options, config, policy, examples, kept)
        trained = Trained(
            options.out,
            len(items),
            sum(updates for updates, _ in kept.progress.stages),
            sum(seconds for _, seconds in kept.progress.stages),
            kept.curve(),
        )
        _write(options, policy, settings, trained)
        kept.remove()
    if options.as_json:
        sys.stdout.write(f"{json.dumps(trained.summary())}\n")
    else:
        _tell(console, trained, left_out)
    return trained


# --- what is trained on ----------------------------------------------------------------------


def _check(options: SftOptions) -> None:
    """Refuse what cannot be before data and model are read."""
    out = options.out
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}")
    if problem := model_problem(options.model):
        raise ConfigError(f"MODEL {problem}")
    if options.seconds <= 0 and options.epochs <= 0:
        raise UserError("--epochs must be > 0, or give --seconds")
    if options.task != "pointer" and options.pointer_weight != SftOptions.pointer_weight:
        raise UserError("--pointer-weight is for --task pointer; leave it out")
    if options.task == "pointer" and options.place != "centre":
        raise UserError(
            "--points is for --task text; a pointer's target is the whole box; leave it out"
        )


def _items(options: SftOptions) -> tuple[list[Item], str, int]:
    """What is trained on, the digest of its files, and how many items name no place."""
    if options.task == "verifier":
        rows = read_rows(options.data)
        return _first(rows.items, options.limit), rows.digest, 0
    told = read_set(options.data, options.layout)
    if told.malformed and not options.skip_malformed:
        raise UserError(
            f"{len(told.malformed)} of {len(told.malformed) + len(told.items)} rows are malformed, the "
            f"first is {told.malformed[0]}; mend the files, or leave such rows out with --skip-malformed"
        )
    items = [item for item in told.items if item.region is not None]
    if not items:
        raise UserError(f"{options.data} has no items that name a place; is it the whole set?")
    return _first(items, options.limit), told.digest, told.refusals


def _first(items: Sequence[Item], most: int) -> list[Item]:
    return list(items[:most] if most else items)


def _configured(options: SftOptions) -> tuple[Config, AnswerFormat]:
    own = ['policy.pointing="pointer"'] if options.task == "pointer" else []
    overrides = [*options.overrides, *own]
    if options.task == "verifier":
        config, answers = verifier_config(options.model, VerifierSpec.of(options.data), overrides)
    else:
        config, answers = grounding_config(options.model, options.codec, overrides, refusals=False)
    if config.model.lora is not None:
        raise ConfigError(
            "model.lora: supervised training changes the weights themselves; leave it out"
        )
    if options.max_pixels:
        least = config.policy.resize_min_pixels
        if options.max_pixels < least:
            raise ConfigError(f"--max-pixels must be >= {least}, the model's fewest pixels")
        policy = config.policy.model_copy(update={"resize_max_pixels": options.max_pixels})
        config = config.model_copy(update={"policy": policy})
    return config, answers


def _answers_of(
    options: SftOptions, policy: LoadedPolicy, config: Config, answers: AnswerFormat
) -> Answers:
    if options.task == "verifier":
        answer_tokens(policy)
        return TruthAnswers(policy)
    if options.task == "pointer":
        return PointerAnswers(policy, config, answers)
    return TextAnswers(policy, config, answers, options.place)


def _settings(
    options: SftOptions, config: Config, answers: AnswerFormat, digest: str, count: int
) -> SftSettings:
    policy, train = config.policy, config.train
    is_pointer = options.task == "pointer"
    return SftSettings(
        task=options.task,
        data_digest=digest,
        examples=count,
        model_digest=folder_digest(folder_of(options.model)),
        codec=answers.name,
        prompt=json.dumps([policy.system_prompt, policy.template, policy.part_order]),
        coordinates=policy.coordinates,
        max_pixels=policy.resize_max_pixels,
        place="the whole box" if is_pointer else options.place,
        head_share=options.head_share if is_pointer else 0.0,
        epochs=0.0 if options.seconds else options.epochs,
        seconds=options.seconds,
        batch=options.batch,
        micro_batch=options.micro_batch,
        lr=options.lr,
        lr_head=options.lr_head,
        lm_weight=options.lm_weight,
        pointer_weight=options.pointer_weight,
        target=options.target,
        gaussian_width=options.gaussian_width,
        suppress=options.suppress,
        betas=train.betas,
        weight_decay=train.weight_decay,
        grad_clip=train.grad_clip,
        freeze_vision=config.model.freeze_vision,
        recompute=train.recompute == "layer",
        dtype=config.model.dtype,
        device=pick_device(config.rollout.device).type,
        seed=options.seed,
    )


# --- training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """What one stage is."""

    name: StageName
    share: float  # of the budget
    lr: float
    losses: LossSettings


def _stages(options: SftOptions) -> list[_Stage]:
    def losses(lm: float) -> LossSettings:
        return LossSettings(
            lm, options.pointer_weight, options.target, options.gaussian_width, options.suppress
        )

    share = options.head_share if options.task == "pointer" else 0.0
    stages = [
        _Stage("head", share, options.lr_head, losses(0.0)),
        _Stage("all", 1.0 - share, options.lr, losses(options.lm_weight)),
    ]
    return [stage for stage in stages if stage.share > 0]


def _train(
    options: SftOptions,
    config: Config,
    policy: LoadedPolicy,
    examples: Examples,
    kept: KeptTraining,
) -> None:
    """All stages from where they are; the model has the weights then."""
    stages = _stages(options)
    tensors = kept.state()
    with _told_to_stop() as stopped:
        for number, stage in enumerate(stages):
            if number < kept.progress.stage:
                continue
            trainer = Trainer(
                policy,
                stage.name,
                stage.losses,
                betas=config.train.betas,
                weight_decay=config.train.weight_decay,
                grad_clip=config.train.grad_clip,
                micro_batch=options.micro_batch,
                compute=_dtype(config.model.dtype),
                freeze_vision=config.model.freeze_vision,
                recompute=config.train.recompute == "layer",
            )
            if tensors is not None:
                try:
                    trainer.restore(tensors)
                except ValueError as error:
                    raise UserError(
                        f"{kept.folder / kept.progress.state}: {error}; begin anew with --fresh"
                    ) from None
                tensors = None
            _run_stage(options, stage, number, trainer, examples, kept, stopped)
            trainer.finish()
            ended = (kept.progress.updates, kept.progress.seconds)
            kept.progress = Progress(stage=number + 1, stages=(*kept.progress.stages, ended))
            # The next stage begins with all tensors of the model; no optimizer has moved yet.
            whole = {name: each.detach() for name, each in policy.model.named_parameters()}
            kept.save(kept.progress, {**whole, "rng": torch.get_rng_state()})
    if tensors is not None:  # everything was over but the folder
        _put_in(policy, tensors)


def _put_in(policy: LoadedPolicy, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(tensors[name])


def _run_stage(
    options: SftOptions,
    stage: _Stage,
    number: int,
    trainer: Trainer,
    examples: Examples,
    kept: KeptTraining,
    stopped: Callable[[], bool],
) -> None:
    order = Order(examples.pictures, options.batch, f"{options.seed}/{stage.name}")
    budget = (
        Budget(seconds=options.seconds * stage.share)
        if options.seconds
        else Budget(updates=order.updates(options.epochs * stage.share))
    )
    clock = _Clock(kept.progress.seconds, on_cpu=next(_devices(trainer)).type == "cpu")
    updates, curve, saved = kept.progress.updates, _Curve(number, stage.name), time.monotonic()

    def save() -> None:
        at = kept.progress.model_copy(
            update={"stage": number, "updates": updates, "seconds": clock.seconds()}
        )
        kept.save(at, trainer.state())

    total = budget.updates or round(budget.seconds)
    unit = "updates" if budget.updates else "s"
    with progress(f"{options.task}, {stage.name}", total, unit) as advance:
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
                metrics = trainer.update(_batch(examples, order, updates, options.seed), lr)
            except FloatingPointError as error:
                raise UserError(
                    f"update {updates} of stage {stage.name}: {error}; train with a lower --lr"
                ) from None
            updates += 1
            over = budget.share(updates, clock.seconds())
            if point := curve.add(metrics, updates, share_over, over, clock.seconds()):
                kept.add_point(point)
            now = min(total, updates if budget.updates else int(clock.seconds()))
            advance(now - shown)
            shown = now
            if time.monotonic() - saved > options.save_every:
                save()
                saved = time.monotonic()
    kept.progress = kept.progress.model_copy(
        update={"updates": updates, "seconds": clock.seconds()}
    )


def _batch(examples: Examples, order: Order, update: int, seed: int) -> list[Example]:
    return [
        examples.of(index, Random(f"{seed}/{epoch}/{index}"))  # noqa: S311 - repeatable
        for epoch, index in order.of(update)
    ]


def _devices(trainer: Trainer) -> Iterator[torch.device]:
    return (parameter.device for parameter in trainer.parameters.values())


def _dtype(name: str) -> torch.dtype:
    """The dtype of products; weights and the optimizer's state are in float32."""
    found: torch.dtype = getattr(torch, name)
    return found


class _Clock:
    """Seconds of a stage: of this process's CPU, on a GPU of the clock."""

    def __init__(self, before: float, *, on_cpu: bool) -> None:
        self._read = time.process_time if on_cpu else time.monotonic
        self._begin = self._read() - before

    def seconds(self) -> float:
        return self._read() - self._begin


class _Curve:
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


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come; both then end the training between two updates."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda sent, _: came.append(sent))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what comes of it ------------------------------------------------------------------------


def _write(
    options: SftOptions, policy: LoadedPolicy, settings: SftSettings, trained: Trained
) -> None:
    """The folder, whole or absent."""
    out, base = options.out, policy.folder
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        policy.model.to(_dtype(settings.dtype))
        write_model(policy.model, base, draft, settings.dtype)
        copy_rest(base, draft)
        (draft / VERIFIER).unlink(missing_ok=True)
        if options.task == "verifier":
            VerifierSpec.of(options.data).write(draft)
        record = {
            "settings": settings.model_dump(),
            **trained.summary(),
            "curve": trained.curve,
        }
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        share(draft)
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{out} cannot be written: {error}; is the disk full?") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


_SHOWN = ("loss", "lm", "tokens_right", "pointer", "outside", "cells_right")
_ROWS = 8


def _tell(console: Console, trained: Trained, left_out: int) -> None:
    """The curve in a few rows."""
    curve = trained.curve
    shown = [name for name in _SHOWN if any(name in point for point in curve)]
    right = ("updates", "seconds", "lr", *shown)
    table = page_table(f"{trained.out}", "stage", *right, right=right)
    for point in [curve[i] for i in _spread(len(curve), _ROWS)]:
        table.add_row(
            point["name"],
            str(point["updates"]),
            f"{point['seconds']:.0f}",
            f"{point['lr']:.2g}",
            *(f"{point[name]:.3f}" if name in point else "" for name in shown),
        )
    console.print(table)
    if left_out:
        console.print(f"{left_out} items name no place, and were left out")
    console.print(
        f"{trained.examples} examples, {trained.updates} updates, {trained.seconds:.0f} s; the whole curve "
        f"is in {trained.out / RECORD}"
    )


def _spread(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
