"""The model card of an exported folder: how it was trained, what it reaches, with how many episodes.

model_card   README.md as text
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

_TOLD = ("model", "policy", "env", "rollout", "data", "train")
"""Sections that say how the model was trained; the others, where."""
_PLACES = frozenset({"model.path", "train.device", "train.wandb", "data.pool"})


_ADAPTERS = (
    "These are adapters (LoRA) alone: `peft.PeftModel.from_pretrained(model, FOLDER)` puts them into that "
    "model, `dart export --merged` writes both as one."
)


def model_card(config: Config, trained: Trained, *, adapters: bool = False) -> str:
    """README.md of the folder; `adapters` where it holds those of `model.lora` alone."""
    settings = "\n".join(_settings(config))
    fence = "```"
    while fence in settings:  # a prompt may have fences of its own
        fence += "`"
    parts = [
        _front(config, adapters=adapters),
        f"# {base_name(config.model.path)}, trained by dart: {trained.name}",
        _said(config),
        *([_ADAPTERS] if adapters else []),
        _table(_facts(config, trained)),
        "## Success",
        "\n".join(_success(config, trained)),
        "## Settings",
        "Those other than dart's defaults:",
        f"{fence}toml\n{settings}\n{fence}",
    ]
    return "\n\n".join(parts) + "\n"


def _front(config: Config, *, adapters: bool) -> str:
    """Return the head that Hugging Face's hub reads."""
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


def _said(config: Config) -> str:
    return (
        f"A GUI agent, trained by reinforcement learning from `{base_name(config.model.path)}` on suite "
        f"`{config.env.suite}`, with the action language `{config.policy.action_parser}` and coordinates in "
        f"`{config.policy.coordinates}`. Tokenizer, chat template and image processor are those of "
        "that model."
    )


def _facts(config: Config, trained: Trained) -> Iterator[tuple[str, str]]:
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
    """Yield what the model learned from examples before it was trained here, where `dart tune` made it."""
    folder = model_folder(config.model.path)
    if not (folder / TUNED).is_file():
        return
    record = read_json(folder, TUNED)
    examples, updates = record.get("examples"), record.get("updates")
    yield "supervised before", f"`{folder.name}`: {examples} examples, {updates} updates"


def _progress(config: Config, trained: Trained) -> tuple[int | None, int | None, str]:
    """Return (updates in the weights, judged trajectories, run id), as far as the run's database tells."""
    try:
        with open_reader(config.run.dir) as reader:
            counted = sum(
                row.trajectories for row in reader.counters() if row.outcome in ("pass", "fail")
            )
            updates = trained.updates
            if trained.policy_version is not None:
                row = reader.version(trained.policy_version)
                updates = row.updates if row is not None else None
            return updates, counted, reader.run().id
    except (StoreError, RunDirectoryError):
        return trained.updates, None, ""


def _success(config: Config, trained: Trained) -> Iterator[str]:
    """Yield what is known of these very weights: held-out evaluations, and the run's own trajectories."""
    rows = [*_held_out(config, trained), *_in_training(config, trained)]
    if not rows:
        yield "Not measured for these weights: `dart eval` plays held-out tasks."
        return
    yield "| | success | 95 % interval | episodes |"
    yield "|---|---|---|---|"
    for name, passed, episodes in rows:
        low, high = wilson(passed, episodes)
        yield f"| {name} | {passed / episodes:.3f} | {low:.3f} - {high:.3f} | {episodes} |"


def _held_out(config: Config, trained: Trained) -> Iterator[tuple[str, int, int]]:
    if trained.policy_version is None:
        return
    for evaluation in _evaluations(config):
        if evaluation.policy_version != trained.policy_version:
            continue
        for mode, score in evaluation.modes.items():
            for name, whole in (("", score.overall), (", tasks never trained on", score.composed)):
                if mode != "random" and whole.episodes:
                    yield f"held out, {mode}{name}", whole.passed, whole.episodes


def _evaluations(config: Config) -> Iterator[Evaluation]:
    for file in sorted(eval_dir(config.run.dir).glob("*.json")):
        try:
            found = read_evaluation(config.run.dir, file.stem)
        except RunDirectoryError:
            continue
        if found is not None:
            yield found


def _in_training(config: Config, trained: Trained) -> Iterator[tuple[str, int, int]]:
    if trained.policy_version is None:
        return
    try:
        with open_reader(config.run.dir) as reader:
            passed, episodes = _sampled_by(reader, trained.policy_version)
    except (StoreError, RunDirectoryError):
        return
    if episodes:
        yield "training tasks, sampled by this version in the run", passed, episodes


def _sampled_by(reader: Reader, version: int) -> tuple[int, int]:
    points = [each for each in reader.success_curve() if each.policy_version == version]
    return sum(each.passed for each in points), sum(each.trajectories for each in points)


def _settings(config: Config) -> Iterator[str]:
    defaults = section_types()
    for name in _TOLD:
        section: BaseModel = getattr(config, name)
        usual: Any = defaults[name]().model_dump(mode="json")
        lines = [
            f"{key} = {to_toml(value)}"
            for key, value in section.model_dump(mode="json").items()
            if value != usual[key] and value is not None and f"{name}.{key}" not in _PLACES
        ]
        if lines:
            yield f"[{name}]"
            yield from lines


def _table(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
