"""The run that the exchange tests import into."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from tests.data.exchange.parts import TASK


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose engine has no model, so that any tokens fit it."""
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "rollout": {"engine": "scripted"},
            "env": {"tasks": [TASK, "mini/popup"]},
        }
    )
