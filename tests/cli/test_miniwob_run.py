"""A short `dart up configs/miniwob.toml`: the shipped model learns in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bus.errors import MissingPartError
from dart_cli.data.store.open import open_reader
from envs.contract.registry import check_parts
from tests.waiting import PATIENCE_S

CONFIG = Path(__file__).parents[2] / "configs" / "miniwob.toml"
ONE_STEP = ("click-test", "click-color", "focus-text", "click-dialog")
PAGES = (*ONE_STEP, "click-dialog-2", "click-tab", "click-button")

pytestmark = pytest.mark.slow


def finished(*arguments: str) -> dict[str, Any]:
    """The last line of `dart ARGUMENTS`."""
    run = subprocess.run(
        [sys.executable, "-m", "dart_cli", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


def test_the_shipped_model_points_in_pages_and_trains_on_them(tmp_path: Path) -> None:
    try:
        check_parts("miniwob", {})
    except MissingPartError as missing:
        pytest.skip(str(missing))
    run_dir = tmp_path / "run"
    settings = {
        "run.dir": run_dir,
        "env.tasks": json.dumps([f"miniwob/{page}" for page in PAGES]),
        "env.slots": 8,
        "data.group_size": 4,
        "data.groups_per_batch": 1,
        "train.updates": 2,
        "eval.episodes": 14,  # of each task two
        "eval.around": "false",  # tests/cli/test_up.py has evaluations around a run
    }
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    # The base has learned to point: these pages of one step pass mostly.
    evaluation = finished("eval", str(CONFIG), *sets, "--mode", "sampled", "--json")
    before = [evaluation["sampled_tasks"]["per_task"][f"miniwob/{page}"] for page in ONE_STEP]
    assert sum(before) / len(before) >= 0.8
    assert finished("up", str(CONFIG), *sets)["policy_version"] == 2
    with open_reader(run_dir) as reader:
        assert sum(batch.state == "trained" for batch in reader.batches()) == 2
