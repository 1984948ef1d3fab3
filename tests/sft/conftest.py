"""A small set of our own screens and models for it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.evaluation.grounding.made import make_set


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grounding set: 9 items on 168x168 pixels in `train`, 3 on other sizes in `test_layout`."""
    out = tmp_path_factory.mktemp("sets") / "made"
    make_set(out, ["mini"], {"train": 9, "test_layout": 3})
    return out
