"""The same seed and one worker of each kind: the same weights and ledger again, curation and all.

One of the two runs is never interrupted; the other's trainer is killed within and between updates.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bus.errors import RunDirectoryError
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.rows import BatchRow
from dart_cli.runtime.liveness import workers_of
from tests.waiting import PATIENCE_S, wait_until

UPDATES = 3
CONFIG = """
[run]
dir = "{folder}/run"
seed = 3
[model]
path = "builtin:tiny"
[policy]
action_parser = "compact"
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
group_size = 4
groups_per_batch = 2
dynamic_number = true
dynamic_length = true
high_entropy = 0.8
pool_ratio = 0.25
pool = ["{pool}"]
[train]
updates = {updates}
lr = 2.5e-4
pack_tokens = 512
threads = 1
checkpoint_every = 1
"""
UNREPEATED = {"opened_at", "closed_at", "leased_at", "ended_at", "reset_s", "wall_s", "worker"}
"""Moments and durations, and a name that holds the process id."""
pytestmark = pytest.mark.slow


def dart(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dart_cli", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def begin(folder: Path, pool: Path) -> subprocess.Popen[str]:
    """`dart up` of a run whose processes take turns."""
    folder.mkdir()
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, pool=pool, updates=UPDATES))
    if not pool.exists():
        finish(dart("data", "collect", str(path), "--out", str(pool), "--per-task", "3"))
    return dart("up", str(path))


def finish(child: subprocess.Popen[str]) -> None:
    try:
        _, err = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0, err
    finally:
        child.kill()
        child.wait()


def batches(run_dir: Path) -> list[BatchRow]:
    try:
        with open_reader(run_dir) as reader:
            return reader.batches()
    except RunDirectoryError:  # not there yet
        return []


def kill_trainer_when(run_dir: Path, true: Callable[[list[BatchRow]], bool]) -> int:
    """Kill -9 as soon as `true` holds for the ledger's batches; returns how many of them are not trained then."""
    wait_until(lambda: true(batches(run_dir)), every_s=0.005)
    [trainer] = [worker for worker in workers_of(run_dir) if worker.name == "train"]
    os.kill(trainer.pid, signal.SIGKILL)
    return sum(batch.state != "trained" for batch in batches(run_dir))


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that a run ends with: weights, optimizer, and what it trained on."""
    newest = run_dir / "checkpoints" / f"c{UPDATES:06d}"
    with open_reader(run_dir) as reader:
        samples = [asdict(row) for batch in reader.batches() for row in reader.batch_rows(batch.id)]
        version = reader.newest_version()
    assert version is not None
    return {
        "trainer": {path.name: path.read_bytes() for path in newest.glob("*.safetensors")},
        "published": {path.name: path.read_bytes() for path in Path(version.path).iterdir()},
        "samples": samples,
    }


def decided(run_dir: Path) -> dict[str, Any]:
    """All that a run decided up to its last batch."""
    with open_reader(run_dir) as run:
        batches = run.batches()
        served = {each: batch.id for batch in batches for each in run.batch_groups(batch.id)}
        newest = max(served)  # later groups are cut off by the end of the run
        groups = [group for group in run.groups() if group.id <= newest]
        return {
            "groups": [timeless(group) for group in groups],
            "trajectories": [
                timeless(each) for each in run.trajectories(group_ids=[g.id for g in groups])
            ],
            "decisions": [each for each in run.decisions() if each.subject[:7] <= newest],
            "metrics": [
                (point.name, point.step, point.value)
                for point in run.metrics()
                if not point.name.endswith("_s")
            ],
        }


def timeless(row: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in UNREPEATED}


def test_the_same_seed_is_the_same_run_and_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path,
) -> None:
    pool = tmp_path / "pool"
    finish(begin(tmp_path / "whole", pool))
    killed, run_dir = begin(tmp_path / "killed", pool), tmp_path / "killed" / "run"
    try:
        # Batch 2 has been served and is not acknowledged: the trainer computes on it.
        within = kill_trainer_when(
            run_dir, lambda seen: len(seen) == 2 and seen[1].state != "trained"
        )
        # It is acknowledged and in a complete checkpoint, the next is still played: the trainer waits.
        second = run_dir / "checkpoints" / "c000002"
        between = kill_trainer_when(
            run_dir,
            lambda seen: len(seen) == 2 and seen[1].state == "trained" and second.exists(),
        )
    except BaseException:
        killed.kill()
        raise
    finish(killed)
    assert (within, between) == (1, 0)
    log = (run_dir / "logs" / "train.log").read_text()
    assert log.count("train starts, pid") == 3
    assert "c000001, batch 1" in log
    assert "c000002, batch 2" in log
    for read in (outcome, decided):
        whole, resumed = read(tmp_path / "whole" / "run"), read(run_dir)
        for name, value in whole.items():
            assert value, name
            assert resumed[name] == value, f"{name} differs"
    # The run was rich enough: all of curation had something to decide.
    groups, samples = decided(run_dir)["groups"], outcome(run_dir)["samples"]
    assert {group["reason"] for group in groups} > {"", "all_success"}
    assert {row["reason"] for row in samples} == {"mixed", "pool", "low_entropy"}
    assert len({group["size"] for group in groups}) > 1
