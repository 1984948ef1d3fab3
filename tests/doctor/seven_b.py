"""UI-TARS-1.5-7B as a plan reads it: its two small files, without weights; and a run that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dart_cli.config.model_folder import Screens
from dart_cli.config.published import PUBLISHED
from dart_cli.config.schema import Config
from dart_cli.doctor.plan import H100, Plan, make_plan
from tests.config.model_parts import write_json

_PUBLISHED = PUBLISHED["qwen2_5_vl"]
CONFIG: dict[str, Any] = {"model_type": "qwen2_5_vl", **_PUBLISHED.tree}
PREPROCESSOR: dict[str, Any] = {"patch_size": 14, "merge_size": 2, **_PUBLISHED.preprocessor}
CUT = Screens(28, PREPROCESSOR["min_pixels"], PREPROCESSOR["max_pixels"])


def write_seven_b(folder: Path) -> Path:
    """Write both files into `folder`, which is created if it is missing, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder, "config.json", CONFIG)
    write_json(folder, "preprocessor_config.json", PREPROCESSOR)
    return folder


def config_of(**sections: dict[str, Any]) -> Config:
    """Return a run with DART's prompts on 8 GPUs, of which the trainer has four."""
    given: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16", "freeze_vision": True},
        "policy": {"history_images": 5, "history_turns": 35},
        "rollout": {"engine": "vllm", "max_tokens": 512, "max_batch": 32, "device": "cuda"},
        "data": {"group_size": 8, "groups_per_batch": 6},
        "train": {"ranks": 4, "recompute": "layer", "kl_beta": 0.1, "device": "cuda"},
        "up": {"rollouts": 4, "envs": 4, "rollout_gpus": [4, 5, 6, 7]},
        "env": {"slots": 32, "options": {"size": "1920x1080"}},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return Config.model_validate(given)


def plan_of(**sections: dict[str, Any]) -> Plan:
    return make_plan(config_of(**sections), CONFIG, CUT, H100)
