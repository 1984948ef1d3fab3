"""A trainer killed within and between its steps ends with the weights of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.data.store.rows import BatchRow
from dart_cli.data.store.writer import open_reader
from dart_cli.runtime.liveness import workers_of

UPDATES = 3
CONFIG = """
[run]
dir = "{folder}/run"
seed = 5
[model]
path = "builtin:tiny"
[env]
suite = "mini"
slots = 1
tasks = ["mini/popup", "mini/confirm"]
[rollout]
max_tokens = 12
[data]
scheduling = "batch"
coupled = true
group_size = 4
groups_per_batch = 1
[train]
updates = {updates}
lr = 1e-3
micro_batch = 1
checkpoint_every = 1
"""
PATIENCE_S = 300.0  # a bound, no expectation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def begin(folder: Path) -> subprocess.Popen[str]:
    """`dart up` of a run in which everybody takes turns."""
    folder.mkdir()
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, updates=UPDATES))
    return subprocess.Popen(
        [sys.executable, "-m", "dart_cli", "up", str(path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


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
    """Kill -9 as soon as the ledger's batches are so; how many of them are not trained then."""
    deadline = time.monotonic() + PATIENCE_S
    while not true(batches(run_dir)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    [trainer] = [worker for worker in workers_of(run_dir) if worker.name == "train"]
    os.kill(trainer.pid, signal.SIGKILL)
    return sum(batch.state != "trained" for batch in batches(run_dir))


def outcome(run_dir: Path) -> dict[str, object]:
    """All that a run ends with: weights, optimizer, and what it trained on."""
    newest = run_dir / "checkpoints" / f"c{UPDATES:06d}"
    with open_reader(run_dir) as reader:
        samples = [asdict(row) for batch in reader.batches() for row in reader.batch_rows(batch.id)]
        version = reader.newest_version()
    assert version is not None
    return {
        "model": (newest / "model.safetensors").read_bytes(),
        "optimizer": (newest / "optimizer.safetensors").read_bytes(),
        "published": {path.name: path.read_bytes() for path in Path(version.path).iterdir()},
        "samples": samples,
    }


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    finish(begin(tmp_path / "whole"))
    killed, run_dir = begin(tmp_path / "killed"), tmp_path / "killed" / "run"
    try:
        # Batch 2 has been served and is not acknowledged: the trainer computes on it.
        within = kill_trainer_when(
            run_dir, lambda seen: len(seen) == 2 and seen[1].state != "trained"
        )
        # It is acknowledged and the next is still played: the trainer waits.
        between = kill_trainer_when(
            run_dir, lambda seen: len(seen) == 2 and seen[1].state == "trained"
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
    whole, resumed = outcome(tmp_path / "whole" / "run"), outcome(run_dir)
    for name, value in whole.items():
        assert value, name
        assert resumed[name] == value, f"{name} differs"
