"""A whole smoke test, as a person starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dart_cli.cli.main import main
from dart_cli.smoke_test.parts_player import ALWAYS, OPTIONAL
from tests.simulated import QUICK
from tests.waiting import PATIENCE_S, lives, wait_until

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3.5-9b.toml"


@pytest.mark.slow
def test_the_recommended_configuration_is_played_to_its_export(tmp_path: Path) -> None:
    """New users start from it, so it must keep working."""
    run = tmp_path / "run"
    sets = [f'run.dir="{run}"', 'env.options={size="336x252"}', 'rollout.engine="transformers"']
    sets += [
        "up.envs=1",
        "up.rollouts=1",
        "train.ranks=1",
        "up.train_gpus=[]",
        "up.rollout_gpus=[]",
    ]
    command = [sys.executable, "-m", "dart_cli", "up", str(CONFIG), "--smoke-test-minutes", "1440"]
    command += [part for each in sets for part in ("--set", each)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == {}
    assert result["not_played"] == {}
    assert result["reduced"] == []
    assert {*ALWAYS, *OPTIONAL} <= result["proved"].keys()
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 100, "no line is wider than a terminal"
    assert result["parts"]["engine"] == "stood_in"
    assert result["parts"]["evaluation"] == "stood_in"
    assert result["parts"]["export"] == "configured"
    assert result["parts"]["speed"] == "machine_only"
    assert result["export_difference"] < 0.1
    assert result["malformed"] < 0.2
    assert result["steps_per_episode"] > 1
    assert "the trainer is killed" in done.stderr
    assert not run.exists()


@pytest.mark.slow
def test_an_interrupted_smoke_test_reports_what_it_has_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n'
        f'[train]\nlearner = "{QUICK}"\n'
    )
    command = [sys.executable, "-m", "dart_cli", "up", str(path), "--smoke-test-minutes", "1440"]
    locks = tmp_path / "run.smoke-test" / "run" / "workers"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len([*locks.glob("*.lock")]) >= 4, "data, train, rollout and env")
        below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        *report, last = process.communicate()[0].splitlines()
    assert process.returncode == 130
    assert len(below) > 4
    assert not any(map(lives, below))
    output = json.loads(last)
    assert output["stopped"] == "stopped by SIGTERM"
    assert output["not_played"]["export"] == "stopped by SIGTERM"
    assert output["parts"]["export"] == "not_played"
    assert "stopped by SIGTERM, in the part: run" in report
    assert (tmp_path / "run.smoke-test" / "report.txt").read_text().splitlines() == [*report, last]


@pytest.mark.parametrize(
    ("verb", "options", "named"),
    [
        ("up", ["--ray", "local"], "--ray"),
        ("up", ["--dry-run"], "--dry-run"),
        ("up", ["--fresh"], "--fresh"),
        ("doctor", ["--steps", "3"], "--steps"),
        ("doctor", ["--json"], "--json"),
    ],
)
def test_an_option_that_means_nothing_beside_it_is_refused_before_anything_is_played(
    verb: str, options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        verb,
        str(CONFIG),
        "--smoke-test",
        *options,
        "--set",
        f"run.dir={tmp_path / 'run'}",
    ]
    with pytest.raises(SystemExit) as ended:
        main(requests)
    assert ended.value.code == 2
    assert f"{named} means nothing beside --smoke-test" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
