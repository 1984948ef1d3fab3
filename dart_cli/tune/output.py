"""The output of a training: the new model folder, and what is printed.

TuneResult           the result of a training
write_model_folder   writes the new folder; its tune.json has the settings and the curve
dry_run_lines        what a training would do, for --dry-run
print_result         prints the curve in a few rows, and what was learned
print_stopped        prints what a training that was stopped has so far
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from dart_cli.config.model_folder import TUNED, VERIFIER, base_name
from dart_cli.config.schema import Config
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.lora import is_adapter, merge_into
from dart_cli.policy.model_files import copy_rest, new_folder, write_adapters, write_model
from dart_cli.policy.verifier import VerifierSpec
from dart_cli.runtime.tables import page_table
from dart_cli.tune.defaults import Hyperparameters
from dart_cli.tune.examples import AnswerKind
from dart_cli.tune.held_out import Measurement, Outcome, Split, first_and_last_loss
from dart_cli.tune.pace import HeldOutWatch
from dart_cli.tune.settings import TuneSettings, part_of
from dart_cli.tune.stages import dtype_of
from dart_cli.tune.trainer import changed_tensors, load_tensors
from dart_cli.tune.training_state import Point, TrainingFolder


@dataclass(frozen=True)
class TuneResult:
    """The result of a training."""

    out: Path
    examples: int
    updates: int
    seconds: float
    curve: list[dict[str, Any]]
    hyperparameters: Hyperparameters
    outcome: Outcome

    def summary(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        last = self.curve[-1] if self.curve else {}
        return {
            "out": str(self.out),
            "examples": self.examples,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            **{name: last[name] for name in _METRICS if name in last},
            "used": {
                key: getattr(self.hyperparameters, key)
                for key in ("lr", "lr_head", "batch", "epochs")
            },
            **self.outcome.summary(),
        }


def write_model_folder(
    config: Config,
    policy: LoadedPolicy,
    settings: TuneSettings,
    result: TuneResult,
    verifier: VerifierSpec | None,
) -> None:
    """Write the model folder. If that fails, there is no folder."""
    base, dtype, lora = policy.folder, config.model.dtype, policy.lora
    with new_folder(result.out) as draft:
        if lora is not None and config.tune.write == "adapters":
            adapters = {
                name: tensor.to(dtype_of(dtype)) for name, tensor in changed_tensors(policy).items()
            }
            write_adapters(adapters, lora, config.model.path, draft)
        else:
            write_model(_whole(policy, dtype), base, draft, dtype)
        copy_rest(base, draft)
        (draft / VERIFIER).unlink(missing_ok=True)
        if verifier is not None:
            verifier.write(draft)
        record = {
            "base": base_name(config.model.path),
            "settings": settings.model_dump(),
            **result.summary(),
            "curve": result.curve,
        }
        (draft / TUNED).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _whole(policy: LoadedPolicy, dtype: str) -> PreTrainedModel:
    """Return the model to write.

    With adapters, this is their base, read again, with the adapters in its weights.
    """
    if policy.lora is None:
        policy.model.to(dtype_of(dtype))
        return policy.model
    base = load_policy(policy.folder, dtype, pointing=policy.pointing)
    tensors = changed_tensors(policy)
    adapters = {name: tensor.cpu() for name, tensor in tensors.items() if is_adapter(name)}
    others = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    load_tensors(base, others)
    merge_into(base.model, adapters, policy.lora)
    return base.model


_LEARNS = {
    "pointer": "points at the places of items",
    "text": "writes the coordinates of the places of items",
    "verifier": "answers True or False to marked places",
    "actions": "acts as in demonstrations",
    "completions": "repeats the completions of successes",
}


def dry_run_lines(
    config: Config,
    hyperparameters: Hyperparameters,
    kind: AnswerKind,
    data: str,
    split: Split,
) -> list[tuple[str, str]]:
    """Return (subject, text) lines about what a training would do; `data` describes what is learned."""
    tune, model = config.tune, config.model
    assert tune.out is not None
    part = part_of(tune.out)
    batch, epochs = hyperparameters.batch, hyperparameters.epochs
    updates = math.ceil(epochs * len(split.learned_rows) / batch)
    budget = f"{epochs:g} epochs, about {updates} updates"
    budget += f", {tune.max_minutes:g} minutes at most" if tune.max_minutes else ""
    rates = f"lr {hyperparameters.lr:g}"
    if kind == "pointer":
        rates += (
            f", of the head alone {hyperparameters.lr_head:g} for the first {tune.head_share:.0%}"
        )
    heldout = len(split.heldout_rows)
    state = "goes on from" if part.exists() else "a second start goes on from"
    return [
        ("data", data),
        ("held out", f"{heldout} of {heldout + len(split.learned_rows)} rows"),
        ("learns", _LEARNS[kind]),
        ("model", f"{model.path}, products in {model.dtype} on {config.train.device}"),
        ("trains", _trained_parts(config, kind)),
        ("training", f"{budget}, {batch} examples an update, {rates}, seed {config.run.seed}"),
        ("out", f"{tune.out}; {state} {part}"),
    ]


def _trained_parts(config: Config, kind: AnswerKind) -> str:
    """Return which weights are trained, and in which form they are written."""
    lora = config.model.lora
    if lora is None:
        return "all weights" + (" but the vision tower" if config.model.freeze_vision else "")
    what = f"adapters of rank {lora.rank}, alpha {lora.alpha:g}"
    what += f", begun with {config.model.adapters}" if config.model.adapters else ""
    what += ", the pointer head and its tokens" if kind == "pointer" else ""
    merged = (
        "in the weights of the folder" if config.tune.write == "model" else "alone in the folder"
    )
    return f"{what}; they will be {merged}"


_METRICS = ("loss", "lm", "tokens_right", "pointer", "outside", "cells_right", "entropy")
"""Metrics that are printed, where a training has them."""
_ROWS = 8  # of the printed curve


def print_result(console: Console, result: TuneResult, data: str) -> None:
    """Print the curve in a few rows, and what was learned; `data` describes what it was learned from."""
    console.print(_curve_table(f"{result.out}", result.curve))
    console.print(data, soft_wrap=True)
    for line in result.outcome.lines(result.hyperparameters.lr, result.updates):
        console.print(line, soft_wrap=True)
    console.print(
        f"{result.updates} updates, {result.seconds:.0f} s; the whole curve "
        f"is in {result.out / TUNED}",
        soft_wrap=True,
    )


def print_stopped(
    console: Console,
    folder: TrainingFolder,
    before: Measurement | None,
    held_out: HeldOutWatch,
    *,
    as_json: bool,
) -> None:
    """Print what a training that was stopped has so far, and how to continue; with `as_json` no table."""
    progress, curve = folder.progress, folder.curve()
    updates = progress.updates + sum(count for count, _ in progress.stages)
    if curve and not as_json:
        console.print(_curve_table(f"{folder.path}", curve))
    parts = [f"stopped after {updates} updates"]
    if curve:
        first, last = first_and_last_loss(curve)
        parts.append(f"loss of the learned rows {first:.3f} -> {last:.3f}")
    if before is not None:
        parts.append(f"held-out rows before: {held_out.words(before)}")
    if (newest := held_out.newest) and newest != before:
        parts.append(f"held-out rows at the last measurement: {held_out.words(newest)}")
    sys.stderr.write(
        f"{'; '.join(parts)}\n{folder.path} holds its state; the same command continues it\n"
    )


def _curve_table(title: str, curve: Sequence[Point]) -> Table:
    """Return a table of at most _ROWS points of the curve."""
    metrics = [name for name in _METRICS if any(name in point for point in curve)]
    right = ("updates", "seconds", "lr", *metrics)
    table = page_table(title, "stage", *right, right=right)
    for point in [curve[i] for i in _spread(len(curve), _ROWS)]:
        table.add_row(
            point["name"],
            str(point["updates"]),
            f"{point['seconds']:.0f}",
            f"{point['lr']:.2g}",
            *(f"{point[name]:.3f}" if name in point else "" for name in metrics),
        )
    return table


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices, evenly spread over 0 to count - 1, both included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
