"""What comes of a training: a folder, whole or absent, and what is told of it.

Tuned         the result
write_tuned   the folder; tune.json in it has the settings and the curve
described     what a training would do, for --dry-run
tell          the curve in a few rows; tell_stopped, of a training that was stopped
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
from dart_cli.tune.defaults import Chosen
from dart_cli.tune.examples import Learned
from dart_cli.tune.held_out import Measured, Outcome, Split, fallen
from dart_cli.tune.pace import HeldOutWatch
from dart_cli.tune.settings import TuneSettings, part_of
from dart_cli.tune.stages import dtype_of
from dart_cli.tune.trainer import put_in, tuned
from dart_cli.tune.training_state import KeptTraining, Point


@dataclass(frozen=True)
class Tuned:
    """What came of a training."""

    out: Path
    examples: int
    updates: int
    seconds: float
    curve: list[dict[str, Any]]
    used: Chosen
    outcome: Outcome

    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        last = self.curve[-1] if self.curve else {}
        return {
            "out": str(self.out),
            "examples": self.examples,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            **{name: last[name] for name in _SHOWN if name in last},
            "used": {key: getattr(self.used, key) for key in ("lr", "lr_head", "batch", "epochs")},
            **self.outcome.summary(),
        }


def write_tuned(
    config: Config,
    policy: LoadedPolicy,
    settings: TuneSettings,
    trained: Tuned,
    verifier: VerifierSpec | None,
) -> None:
    """Write the folder, which is whole or absent."""
    base, dtype, lora = policy.folder, config.model.dtype, policy.lora
    with new_folder(trained.out) as draft:
        if lora is not None and config.tune.write == "adapters":
            adapters = {name: each.to(dtype_of(dtype)) for name, each in tuned(policy).items()}
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
            **trained.summary(),
            "curve": trained.curve,
        }
        (draft / TUNED).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _whole(policy: LoadedPolicy, dtype: str) -> PreTrainedModel:
    """Return the model that is written: with adapters their base, read again, with them in its weights."""
    if policy.lora is None:
        policy.model.to(dtype_of(dtype))
        return policy.model
    base = load_policy(policy.folder, dtype, pointing=policy.pointing)
    found = tuned(policy)
    adapters = {name: each.cpu() for name, each in found.items() if is_adapter(name)}
    put_in(base, {name: each for name, each in found.items() if not is_adapter(name)})
    merge_into(base.model, adapters, policy.lora)
    return base.model


_LEARNED = {
    "pointer": "points at the places of items",
    "text": "writes the numbers of the places of items",
    "verifier": "judges marked places with True or False",
    "actions": "acts as in demonstrations",
    "completions": "says what was sampled in successes",
}


def described(
    config: Config, use: Chosen, learned: Learned, told: str, split: Split
) -> list[tuple[str, str]]:
    """(subject, text) lines of what a training would do."""
    tune, model = config.tune, config.model
    assert tune.out is not None
    part = part_of(tune.out)
    updates = math.ceil(use.epochs * len(split.learned) / use.batch)
    budget = f"{use.epochs:g} epochs, about {updates} updates"
    budget += f", {tune.max_minutes:g} minutes at most" if tune.max_minutes else ""
    rates = f"lr {use.lr:g}"
    if learned == "pointer":
        rates += f", of the head alone {use.lr_head:g} for the first {tune.head_share:.0%}"
    state = "goes on from" if part.exists() else "a second start goes on from"
    return [
        ("data", told),
        ("held out", f"{len(split.held)} of {len(split.held) + len(split.learned)} rows"),
        ("learns", _LEARNED[learned]),
        ("model", f"{model.path}, products in {model.dtype} on {config.train.device}"),
        ("trains", _trained(config, learned)),
        ("training", f"{budget}, {use.batch} examples an update, {rates}, seed {config.run.seed}"),
        ("out", f"{tune.out}; {state} {part}"),
    ]


def _trained(config: Config, learned: Learned) -> str:
    lora = config.model.lora
    if lora is None:
        return "all weights" + (" but the vision tower" if config.model.freeze_vision else "")
    what = f"adapters of rank {lora.rank}, alpha {lora.alpha:g}"
    what += f", begun with {config.model.adapters}" if config.model.adapters else ""
    what += ", the pointer head and its tokens" if learned == "pointer" else ""
    merged = (
        "in the weights of the folder" if config.tune.write == "model" else "alone in the folder"
    )
    return f"{what}; they will be {merged}"


_SHOWN = ("loss", "lm", "tokens_right", "pointer", "outside", "cells_right", "entropy")
_ROWS = 8


def tell(console: Console, trained: Tuned, told: str) -> None:
    """Print the curve in a few rows, and what was learned."""
    console.print(_curve_table(f"{trained.out}", trained.curve))
    console.print(told, soft_wrap=True)
    for line in trained.outcome.lines(trained.used.lr, trained.updates):
        console.print(line, soft_wrap=True)
    console.print(
        f"{trained.updates} updates, {trained.seconds:.0f} s; the whole curve "
        f"is in {trained.out / TUNED}",
        soft_wrap=True,
    )


def tell_stopped(
    console: Console,
    kept: KeptTraining,
    before: Measured | None,
    held_out: HeldOutWatch,
    *,
    as_json: bool,
) -> None:
    """Print what a training that was stopped has so far, and how it goes on; with `as_json` no table."""
    progress, curve = kept.progress, kept.curve()
    updates = progress.updates + sum(made for made, _ in progress.stages)
    if curve and not as_json:
        console.print(_curve_table(f"{kept.folder}", curve))
    parts = [f"stopped after {updates} updates"]
    if curve:
        first, last = fallen(curve)
        parts.append(f"loss of the learned rows {first:.3f} -> {last:.3f}")
    if before is not None:
        parts.append(f"held-out rows before: {held_out.words(before)}")
    if (newest := held_out.newest) and newest != before:
        parts.append(f"held-out rows at the last look: {held_out.words(newest)}")
    sys.stderr.write(f"{'; '.join(parts)}\n{kept.folder} holds it: the same command goes on\n")


def _curve_table(title: str, curve: Sequence[Point]) -> Table:
    shown = [name for name in _SHOWN if any(name in point for point in curve)]
    right = ("updates", "seconds", "lr", *shown)
    table = page_table(title, "stage", *right, right=right)
    for point in [curve[i] for i in _spread(len(curve), _ROWS)]:
        table.add_row(
            point["name"],
            str(point["updates"]),
            f"{point['seconds']:.0f}",
            f"{point['lr']:.2g}",
            *(f"{point[name]:.3f}" if name in point else "" for name in shown),
        )
    return table


def _spread(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
