"""A small configuration for the tests of the player."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The embedded suite, answered at random."""
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n'
        '[env]\ntasks = ["mini/click", "mini/popup"]\nslots = 4\n'
        '[eval]\nepisodes = 12\ntasks = ["mini/click", "mini/popup", "mini/popup+menu"]\n'
    )
    return path
