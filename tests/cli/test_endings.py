"""Runs that end while an update is under way, which takes longer than any other process is waited for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from bus.endpoints import DATA
from bus.messages import StopRequest
from bus.requests import Requester
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.evaluation.results import AFTER, read_evaluation
from dart_cli.player.chosen_model import newest_announced
from dart_cli.runtime.liveness import workers_of
from tests.cli.test_up import children, finish, start, until, updates_done, write_config
from tests.simulated import HELD, HURRIED
from tests.waiting import PATIENCE_S

__all__ = ["children"]

pytestmark = pytest.mark.slow


def held_run(folder: Path, learner: str, *, around: bool) -> Path:
    """The configuration of a run without a model, whose first update ends at once."""
    path = write_config(folder, updates=100_000, around=around)
    text = path.read_text().replace("[rollout]", '[rollout]\nengine = "scripted"')
    path.write_text(text.replace("[train]", f'[train]\nlearner = "{learner}"'))
    (folder / "go-1").touch()
    return path


async def end_run(config: Config) -> None:
    """End the run as a bound of it does."""
    address = run_endpoints(config).address(DATA)
    async with Requester(address, name="test", peer="dart data") as requester:
        await requester.request(StopRequest(reason="enough"), PATIENCE_S)


def living(run_dir: Path) -> dict[str, int]:
    """The processes of the run -> their pids."""
    return {each.name: each.pid for each in workers_of(run_dir) if each.liveness != "gone"}


def outlast_the_others(config: Config) -> None:
    """Wait until the trainer alone works, longer after the end than any other process is waited for."""
    log = config.run.dir / "logs" / "up.log"
    until(lambda: not {"env-0", "rollout-0"} & living(config.run.dir).keys(), "the others' end")
    said = "train is still in its update on batch 2; a second signal stops at once"
    until(lambda: said in log.read_text(), "what the trainer finishes")


def counted(config: Config) -> tuple[int, int, int]:
    """The updates of the run, the number of its newest version on disk, and the updates in that."""
    newest = newest_announced(config)
    assert newest is not None
    with open_reader(config.run.dir) as reader:
        row = reader.version(newest.policy_version)
        assert row == reader.newest_version()
    assert row is not None
    return updates_done(config.run.dir), row.policy_version, row.updates


@pytest.mark.parametrize(
    ("how", "updates"), [("finishes", 2), ("is killed", 1), ("takes too long", 1)]
)
def test_an_update_under_way_when_the_run_ends_is_counted_everywhere_or_nowhere(
    tmp_path: Path, children: list[subprocess.Popen[str]], how: str, updates: int
) -> None:
    learner = HURRIED if how == "takes too long" else HELD
    path = held_run(tmp_path, learner, around=how == "finishes")
    config = load_config(path)
    child = start("up", path)
    children.append(child)
    until((tmp_path / "began-2").exists, "the second update")
    train = living(config.run.dir)["train"]
    asyncio.run(end_run(config))
    outlast_the_others(config)
    if how == "finishes":
        assert "data" in living(config.run.dir)
        (tmp_path / "go-2").touch()
    elif how == "is killed":
        os.kill(train, signal.SIGKILL)
    out, err = finish(child)
    assert child.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["updates"], result["policy_version"]) == (updates, updates)
    assert counted(config) == (updates, updates, updates)
    if how == "finishes":
        after = read_evaluation(config.run.dir, AFTER)
        assert after is not None
        assert after.policy_version == updates
    assert err.count("train: progress: train is still in its update") == 1
    assert "WARNING" not in err, err
    assert ("it is not started again" in err) == (how != "finishes"), err


def test_a_closed_terminal_within_an_update_counts_it_everywhere(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    path = held_run(tmp_path, HELD, around=False)
    config = load_config(path)
    child = start("up", path)
    children.append(child)
    until((tmp_path / "began-2").exists, "the second update")
    child.send_signal(signal.SIGHUP)
    outlast_the_others(config)
    (tmp_path / "go-2").touch()
    _, err = finish(child)
    assert child.returncode == 130, err
    assert counted(config) == (2, 2, 2)
    assert "WARNING" not in err


def test_a_run_that_has_needed_attention_for_too_long_ends_and_says_why(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    path = held_run(tmp_path, HELD, around=False)
    limit = ("--set", "up.rollouts=0", "--set", "train.attention_minutes=0.001")
    child = start("up", path, *limit)
    children.append(child)
    out, err = finish(child)
    assert child.returncode == 3, err
    why = r"it needed attention for 0\.001 minutes \(train\.attention_minutes\): it waits for .*dart rollout"
    [line] = [each for each in err.splitlines() if each.startswith("error: ")]
    assert re.match(rf"error: data ended with 3: {why}.*; once that is fixed", line)
    assert re.search(why, json.loads(out.splitlines()[-1])["note"])
