"""The whole configuration of a run: its sections, their keys, types and ranges.

    Config         the sections; each field carries its meaning, unit and range below it
    section_types  the sections by name

`dart init` writes the field texts as comments, docs/config.md holds them as tables. load.py reads a
TOML file into a Config; rules/ has what no single field can show.

The sections are in modules by their names, and imported from here:

    base           the base of all sections, types and bounds that fields share
    run_bus_up     [run], [bus], [up]
    model_policy   [model], [model.lora], [policy]
    env            [env], [env.judge]
    rollout        [rollout]
    vllm           [vllm]
    data           [data]
    train          [train]
    weights        [weights]
    eval           [eval]
    serve          [serve]
    tune           [tune]
"""

from __future__ import annotations

from typing import Any, get_args

from dart_cli.config.schema.base import (
    TRAIN_SEEDS,
    Section,
)
from dart_cli.config.schema.data import BY_BASELINE, DataConfig
from dart_cli.config.schema.env import EnvConfig, JudgeConfig, observed_kinds
from dart_cli.config.schema.eval import EvalConfig
from dart_cli.config.schema.model_policy import (
    ACTION_PARSER_PARTS,
    ACTION_PARSERS,
    POINT_PARTS,
    LoraConfig,
    ModelConfig,
    Pointing,
    PolicyConfig,
)
from dart_cli.config.schema.rollout import MODEL_ENGINES, RolloutConfig
from dart_cli.config.schema.run_bus_up import BusConfig, RunConfig, UpConfig
from dart_cli.config.schema.serve import ServeConfig
from dart_cli.config.schema.train import KEEP_CHECKPOINTS, LEAST_RATE, TrainConfig
from dart_cli.config.schema.tune import TuneConfig
from dart_cli.config.schema.vllm import VllmConfig
from dart_cli.config.schema.weights import WeightsConfig

__all__ = [
    "ACTION_PARSERS",
    "ACTION_PARSER_PARTS",
    "BY_BASELINE",
    "KEEP_CHECKPOINTS",
    "LEAST_RATE",
    "MODEL_ENGINES",
    "POINT_PARTS",
    "TRAIN_SEEDS",
    "Config",
    "DataConfig",
    "EnvConfig",
    "JudgeConfig",
    "LoraConfig",
    "ModelConfig",
    "Pointing",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
    "TuneConfig",
    "UpConfig",
    "VllmConfig",
    "WeightsConfig",
    "inner_section",
    "observed_kinds",
    "section_types",
]


class Config(Section):
    """A run, whole."""

    run: RunConfig = RunConfig()
    bus: BusConfig = BusConfig()
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()
    serve: ServeConfig = ServeConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    up: UpConfig = UpConfig()
    tune: TuneConfig = TuneConfig()


def section_types() -> dict[str, type[Section]]:
    """Return the sections of a configuration by name, in their order of presentation.

    An optional section within another, `model.lora`, comes after it.
    """
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        found[name] = type(field.default)
        for key, inner in found[name].model_fields.items():
            if (kind := inner_section(inner.annotation)) is not None:
                found[f"{name}.{key}"] = kind
    return found


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section of a field that may hold one, or be unset; None for every other field."""
    for kind in get_args(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
