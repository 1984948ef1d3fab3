"""A small grounding set, some solutions, and a function that trains on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.load import DEFAULTS, Source, default_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.rules.learning import read_by_tune
from dart_cli.config.values import to_toml
from scripts.make_grounding_set import make_set


@pytest.fixture(scope="session")
def grounding_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grounding set: 9 items on 168x168 pixels in `train`, 3 on other sizes in `test_layout`."""
    out = tmp_path_factory.mktemp("sets") / "made"
    make_set(out, ["mini"], {"train": 9, "test_layout": 3})
    return out


Tune = Callable[..., Any]


@pytest.fixture(scope="session")
def solutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two solutions of each of two tasks, as Parquet files."""
    from dart_cli.collect import CollectOptions
    from dart_cli.collect.collector import run_collect
    from dart_cli.config.schema import Config

    home = tmp_path_factory.mktemp("played")
    settings = {"env": {"tasks": ["mini/page", "mini/popup"]}, "run": {"dir": home / "run"}}
    run_collect(Config.model_validate(settings), CollectOptions(per_task=2, out=home / "files"))
    return home / "files"


@pytest.fixture
def tune() -> Tune:
    """Return tune({"tune.batch": 3, ...}, **options) -> the result of `dart tune` with these keys."""
    from dart_cli.tune.tuning import run_tune

    def run(keys: dict[str, Any], **options: bool) -> Any:
        overrides = [f"{key}={to_toml(value)}" for key, value in keys.items()]
        config = read_by_tune(default_config(overrides))
        check_config(config, Source(DEFAULTS, tuple(overrides)), "tune")
        return run_tune(config, **options)

    return run
