"""`dart serve` before it serves: what it would do, and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.runtime.commands import commands_of

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", str(CONFIG), *map(str, arguments)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_a_dry_run_says_where_and_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ("--set", f"run.dir={tmp_path / 'run'}")
    assert run("--dry-run", "--port", "8555", *there) == 0
    output = capsys.readouterr().out
    assert "[serve]:   port = 8555" in output
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run("--dry-run") == 2
    assert "`dart serve` needs the package uvicorn: pip install" in capsys.readouterr().err


def test_a_cluster_places_no_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(CONFIG), "--ray", "local", "--set", "up.serve=true", "--dry-run"])
    assert exit_.value.code == 2
    assert "up.serve cannot be true with --ray" in capsys.readouterr().err


def test_up_starts_it_where_it_is_asked_to() -> None:
    plain, served = Config(), Config.model_validate({"up": {"serve": True, "envs": 0}})
    assert list(commands_of(plain, ["c.toml"])) == ["env-0", "rollout-0", "train", "data"]
    assert commands_of(served, ["c.toml"]) == {
        "serve-0": ["serve", "c.toml", "--worker", "serve-0"],
        "rollout-0": ["rollout", "c.toml", "--worker", "rollout-0"],
        "train": ["train", "c.toml"],
        "data": ["data", "c.toml"],
    }
