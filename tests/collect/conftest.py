"""A run on three kinds of task, and its policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.policy.loader import LoadedPolicy, load_policy

KINDS = ["mini/popup", "mini/page", "mini/scroll"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three kinds of task, with screens and texts of the past in the prompt."""
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "seed": 5},
            "env": {"tasks": KINDS, "slots": 4},
            "policy": {"history_images": 2, "history_turns": 2},
            "rollout": {"max_tokens": 12, "max_batch": 8, "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_policy("builtin:tiny")
