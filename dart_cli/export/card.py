"""The model card of an exported folder: how the model was trained, and its success over how many episodes.

model_card   returns README.md as text
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version as installed
from typing import Any

from pydantic import BaseModel

from bus.errors import RunDirectoryError, StoreError
from dart_cli.algo.statistics import wilson
from dart_cli.config.model_folder import TUNED, base_name, model_folder, read_json
from dart_cli.config.schema import Config, section_types
from dart_cli.config.values import to_toml
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.evaluation.results import Evaluation, eval_dir, read_evaluation
from dart_cli.export.sources import Trained

_SECTIONS = ("model", "policy", "env", "rollout", "data", "train")
"""Sections of the card: those that describe how the model was trained. The others describe the hosts."""
_LOCAL_KEYS = frozenset({"model.path", "train.device", "train.wandb", "data.pool"})
"""Keys of these sections that belong to a host, and are left out."""

_ADAPTERS = (
    "This folder has only adapters (LoRA): `peft.PeftModel.from_pretrained(model, FOLDER)` adds them to the "
    "base model, and `dart export --merged` writes both as one model."
)


_DRAFTING = (
    "The multi-token prediction layer (`mtp.*`) is the base model's, unchanged: it was not trained here. It only "
    "drafts tokens for speculative decoding, which does not change what is sampled."
)


def model_card(
    config: Config, trained: Trained, *, adapters: bool = False, drafting: bool = False
) -> str:
    """Return README.md of the folder.

    `adapters`: the folder has only the adapters of `model.lora`. `drafting`: it has layers that were not trained.
    """
    settings = "\n".join(_settings(config))
    fence = "```"
    while fence in settings:  # a prompt may contain fences
        fence += "`"
    parts = [
        _front(config, adapters=adapters),
        f"# {base_name(config.model.path)}, trained by dart: {trained.name}",
        _introduction(config),
        *([_ADAPTERS] if adapters else []),
        *([_DRAFTING] if drafting else []),
        _table(_facts(config, trained)),
        "## Success",
        "\n".join(_success(config, trained)),
        "## Settings",
        "Settings other than dart's defaults:",
        f"{fence}toml\n{settings}\n{fence}",
    ]
    return "\n\n".join(parts) + "\n"


def _front(config: Config, *, adapters: bool) -> str:
    """Return the header that the Hugging Face hub reads."""
    return "\n".join(
        [
            "---",
            f"library_name: {'peft' if adapters else 'transformers'}",
            f"base_model: {json.dumps(base_name(config.model.path))}",
            "pipeline_tag: image-text-to-text",
            f"tags: [gui-agent, reinforcement-learning{', lora' if adapters else ''}]",
            "---",
        ]
    )


def _introduction(config: Config) -> str:
    """Return a paragraph on what the model is."""
    return (
        f"A GUI agent, trained by reinforcement learning from `{base_name(config.model.path)}` on suite "
        f"`{config.env.suite}`, with the action language `{config.policy.action_parser}` and coordinates in "
        f"`{config.policy.coordinates}`. Tokenizer, chat template and image processor are taken from "
        "that model."
    )


def _facts(config: Config, trained: Trained) -> Iterator[tuple[str, str]]:
    """Yield the rows of the card's table: a name and a value."""
    yield "base model", f"`{base_name(config.model.path)}`"
    yield from _tuning(config)
    if trained.policy_version is not None:
        yield "policy version", str(trained.policy_version)
        yield "digest", f"`{trained.digest}`"
    updates, total, run = _progress(config, trained)
    yield "updates", "unknown" if updates is None else f"{updates} of {config.train.updates}"
    yield "trajectories of the run so far", "unknown" if total is None else str(total)
    yield "run", f"`{run or config.run.dir.name}`, seed {config.run.seed}"
    yield "dtype", config.model.dtype
    yield "dart", installed("dart-cli")


def _tuning(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a row on supervised training, if `dart tune` made the base model."""
    folder = model_folder(config.model.path)
    if not (folder / TUNED).is_file():
        return
    record = read_json(folder, TUNED)
    examples, updates = record.get("examples"), record.get("updates")
    yield "supervised training", f"`{folder.name}`: {examples} examples, {updates} updates"


def _progress(config: Config, trained: Trained) -> tuple[int | None, int | None, str]:
    """Return (updates of the weights, trajectories with a verdict, run id), if the database has them."""
    try:
        with open_reader(config.run.dir) as reader:
            trajectories = sum(
                row.trajectories for row in reader.counters() if row.outcome in ("pass", "fail")
            )
            updates = trained.updates
            if trained.policy_version is not None:
                row = reader.version(trained.policy_version)
                updates = row.updates if row is not None else None
            return updates, trajectories, reader.run().id
    except (StoreError, RunDirectoryError):
        return trained.updates, None, ""


def _success(config: Config, trained: Trained) -> Iterator[str]:
    """Yield a table of the success of these weights: in held-out evaluations, and in the run itself."""
    rows = [*_held_out(config, trained), *_in_training(config, trained)]
    if not rows:
        yield "Success was not measured for these weights: `dart eval` plays held-out tasks."
        return
    yield "| | success | 95 % interval | episodes |"
    yield "|---|---|---|---|"
    for name, passed, episodes in rows:
        low, high = wilson(passed, episodes)
        yield f"| {name} | {passed / episodes:.3f} | {low:.3f} - {high:.3f} | {episodes} |"


def _held_out(config: Config, trained: Trained) -> Iterator[tuple[str, int, int]]:
    """Yield (name, passed, episodes) for each held-out evaluation of these weights."""
    if trained.policy_version is None:
        return
    for evaluation in _evaluations(config):
        if evaluation.policy_version != trained.policy_version:
            continue
        for mode, score in evaluation.modes.items():
            for heldout, whole in ((False, score.overall), (True, score.heldout_overall)):
                if mode != "random" and whole.episodes:
                    name = f"{evaluation.part_name(heldout=heldout)}, {mode}"
                    yield name, whole.passed, whole.episodes


def _evaluations(config: Config) -> Iterator[Evaluation]:
    """Yield the evaluations of the run that can be read."""
    for file in sorted(eval_dir(config.run.dir).glob("*.json")):
        try:
            evaluation = read_evaluation(config.run.dir, file.stem)
        except RunDirectoryError:
            continue
        if evaluation is not None:
            yield evaluation


def _in_training(config: Config, trained: Trained) -> Iterator[tuple[str, int, int]]:
    """Yield (name, passed, episodes) of the trajectories that these weights sampled in the run."""
    if trained.policy_version is None:
        return
    try:
        with open_reader(config.run.dir) as reader:
            passed, episodes = _count_sampled_by(reader, trained.policy_version)
    except (StoreError, RunDirectoryError):
        return
    if episodes:
        yield "training tasks, sampled by this version in the run", passed, episodes


def _count_sampled_by(reader: Reader, version: int) -> tuple[int, int]:
    """Return how many trajectories of a version passed, and how many there are."""
    points = [point for point in reader.success_curve() if point.policy_version == version]
    return sum(point.passed for point in points), sum(point.trajectories for point in points)


def _settings(config: Config) -> Iterator[str]:
    """Yield the lines of a TOML text with the settings that are not defaults."""
    defaults = section_types()
    for name in _SECTIONS:
        section: BaseModel = getattr(config, name)
        default_values: Any = defaults[name]().model_dump(mode="json")
        lines = [
            f"{key} = {to_toml(value)}"
            for key, value in section.model_dump(mode="json").items()
            if value != default_values[key]
            and value is not None
            and f"{name}.{key}" not in _LOCAL_KEYS
        ]
        if lines:
            yield f"[{name}]"
            yield from lines


def _table(rows: Iterator[tuple[str, str]]) -> str:
    """Return rows as a Markdown table without a header."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
