"""The whole configuration of a run: its sections, their keys, types and ranges.

    Config         all sections; the text below a field has its meaning, unit and range
    section_types  the class of each section, by name

`dart init --full` writes the field texts as comments, and docs/config.md has them as tables. load.py reads a
TOML file into a Config; rules/ checks what no single field can show.

Each module has the sections of its name. Import them from here:

    base           the base class of all sections, and the types and bounds that fields share
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
    teacher        [teacher], [teacher.policy]
"""

from __future__ import annotations

from typing import Any, get_args

from dart_cli.config.schema.base import TRAIN_SEEDS, Section
from dart_cli.config.schema.data import BY_BASELINE, OVER_PROVISION, DataConfig
from dart_cli.config.schema.env import EnvConfig, JudgeConfig, observed_kinds
from dart_cli.config.schema.eval import EvalConfig
from dart_cli.config.schema.model_policy import (
    ACTION_PARSER_PARTS,
    ACTION_PARSERS,
    MOST_ACTIONS,
    POINT_PARTS,
    SPLIT_PARSERS,
    SPLIT_PARTS,
    LoraConfig,
    ModelConfig,
    Pointing,
    PolicyConfig,
)
from dart_cli.config.schema.rollout import MODEL_ENGINES, RolloutConfig
from dart_cli.config.schema.run_bus_up import BusConfig, RunConfig, UpConfig
from dart_cli.config.schema.serve import ServeConfig
from dart_cli.config.schema.teacher import TeacherConfig
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
    "MOST_ACTIONS",
    "OVER_PROVISION",
    "POINT_PARTS",
    "SPLIT_PARSERS",
    "SPLIT_PARTS",
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
    "TeacherConfig",
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
    """The configuration of a run: all sections."""

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
    teacher: TeacherConfig = TeacherConfig()


def section_types() -> dict[str, type[Section]]:
    """Return the class of each section by name, in the order of the documentation.

    A section within another, such as `model.lora`, follows it.
    """
    types: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        types[name] = type(field.default)
        for key, inner in types[name].model_fields.items():
            if (kind := inner_section(inner.annotation)) is not None:
                types[f"{name}.{key}"] = kind
    return types


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the class of the section that a field may hold; None for a field of a plain value."""
    for kind in get_args(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
