"""The same seed and a single worker of each kind: the whole ledger again, curation and all."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dart_cli.data.store.writer import open_reader

CONFIG = """
[run]
dir = "{folder}/run"
seed = 3
[model]
path = "builtin:tiny"
[policy]
codec = "compact"
coordinates = "thousandths"
[env]
suite = "composed"
slots = 1
tasks = ["composed/click", "composed/popup+click", "composed/popup+popup+menu+confirm"]
[rollout]
max_tokens = 12
threads = 1
[data]
scheduling = "batch"
coupled = true
group_size = 4
groups_per_batch = 2
dynamic_number = true
dynamic_length = true
high_entropy = 0.8
pool_ratio = 0.25
pool = ["{pool}"]
[train]
updates = 3
lr = 2.5e-4
threads = 1
"""

UNREPEATED = {"opened_at", "closed_at", "leased_at", "ended_at", "reset_s", "wall_s", "worker"}
"""Moments and durations, and a name that holds the process id."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def dart(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dart_cli", *arguments],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def decided(folder: Path, pool: Path) -> dict[str, Any]:
    """All that a fresh run decided up to its last batch."""
    folder.mkdir()
    config = folder / "c.toml"
    config.write_text(CONFIG.format(folder=folder, pool=pool))
    if not pool.exists():
        dart("data", "collect", str(config), "--out", str(pool), "--per-task", "3")
    dart("up", str(config), "--set", "eval.around=false")
    with open_reader(folder / "run") as run:
        batches = run.batches()
        served = {each: batch.id for batch in batches for each in run.batch_groups(batch.id)}
        newest = max(served)  # whatever was opened after it, the end of the run cut off
        groups = [group for group in run.groups() if group.id <= newest]
        return {
            "groups": [timeless(group) for group in groups],
            "trajectories": [
                timeless(each) for each in run.trajectories(group_ids=[g.id for g in groups])
            ],
            "samples": [asdict(row) for batch in batches for row in run.batch_rows(batch.id)],
            "decisions": [each for each in run.decisions() if each.subject[:7] <= newest],
            "metrics": [
                (point.name, point.step, point.value)
                for point in run.metrics()
                if not point.name.endswith("_s")
            ],
        }


def timeless(row: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in UNREPEATED}


def test_a_run_with_all_of_curation_is_the_same_again(tmp_path: Path) -> None:
    first, again = (decided(tmp_path / name, tmp_path / "pool") for name in ("a", "b"))
    for name, rows in first.items():
        assert rows, name
        assert again[name] == rows, name
    assert {group["reason"] for group in first["groups"]} > {"", "all_success"}
    assert {row["reason"] for row in first["samples"]} == {"mixed", "pool", "low_entropy"}
    assert len({group["size"] for group in first["groups"]}) > 1
