"""The whole configuration of a run: its sections, their keys, types and ranges.

    Config         the sections; each field carries its meaning, unit and range below it
    section_types  the sections by name

`dart init` writes the field texts as comments, docs/config.md holds them as tables. load.py reads a
TOML file into a Config; rules/ has what no single field can show.

The sections are in modules by subject, and imported from here:

    base     the base of all sections, types and bounds that fields share
    process  [run], [bus], [up]
    model    [model], [model.lora], [policy]
    played   [env], [env.judge], [eval], [serve]
    served   [rollout], [vllm], [weights]
    learned  [data], [train], [tune]
"""

from __future__ import annotations

from typing import Any, get_args

from dart_cli.config.schema.base import (
    TRAIN_SEEDS,
    Section,
)
from dart_cli.config.schema.learned import (
    BY_TRACKER,
    KEEP_CHECKPOINTS,
    LEAST_RATE,
    DataConfig,
    TrainConfig,
    TuneConfig,
)
from dart_cli.config.schema.model import (
    CODEC_PARTS,
    CODECS,
    POINT_PARTS,
    LoraConfig,
    ModelConfig,
    Pointing,
    PolicyConfig,
)
from dart_cli.config.schema.played import (
    EnvConfig,
    EvalConfig,
    JudgeConfig,
    ServeConfig,
    observed_kinds,
)
from dart_cli.config.schema.process import BusConfig, RunConfig, UpConfig
from dart_cli.config.schema.served import MODEL_ENGINES, RolloutConfig, VllmConfig, WeightsConfig

__all__ = [
    "BY_TRACKER",
    "CODECS",
    "CODEC_PARTS",
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
