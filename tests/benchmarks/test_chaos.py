"""Processes killed again and again lose nothing; and the audit would find it if they did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults.audit import FinishedTrajectories, Lineage, audit, lineage, wrong_replays
from benchmarks.faults.chaos_run import CheckpointProgress, report, run_chaos
from benchmarks.faults.pace import learning_curve, pace_ratio
from benchmarks.faults.supervise import STATUS
from bus.messages import Outcome
from dart_cli.config.load import load_config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import NotYet, make_scheduler
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.runtime.commands import commands_of
from tests.data.parts import (
    MIXED,
    a_batch,
    make_ledger,
    next_batch,
    play_group,
    small_config,
    train,
    trained,
)
from tests.simulated import QUICK

SUITE = Path(__file__).parents[1] / "own_suites" / "coin_suite.py"
CONFIG = """
[run]
dir = "{folder}/run"
[env]
suite = "{suite}:CoinSuite"
slots = 4
[rollout]
engine = "scripted"
max_tokens = 20
[data]
group_size = 4
groups_per_batch = 1
[train]
learner = "{learner}"
updates = 1000000
reuse = 1
checkpoint_every = 3
"""

LOG = """
x INFO p: train starts, pid 1, run r
x INFO t: update 1 on batch 1: loss 0
x INFO t: update 2 on batch 2: loss 0
x INFO t: update 3 on batch 3: loss 0
x INFO p: train starts, pid 2, run r
x INFO t: resumes from r/c000002, batch 2
x INFO t: update 3 on batch 3: loss 0
"""


@pytest.mark.slow
async def test_each_role_killed_in_turn_nothing_finished_is_lost_or_trained_twice(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.format(folder=tmp_path, suite=SUITE, learner=QUICK))
    config = load_config(path)
    roles = ("env", "rollout", "train", "data", STATUS)
    watching = [STATUS, str(path), "--json", "--watch", "1"]
    told: list[str] = []
    played = await run_chaos(
        config,
        {STATUS: watching, **commands_of(config, [str(path)])},
        seconds=9.0,
        every_s=1.2,
        roles=roles,
        seed=0,
        say=told.append,
    )
    found = report(played)
    assert set(found["kills_by_role"]) == set(roles), told
    assert found["kills"] == sum("killed" in line for line in told)
    assert set(found["recovery_by_role_s"]) == set(roles)
    assert (found["finished_lost"], found["double_trained"], found["never_trained"]) == (0, 0, 0)
    assert found["steps_lost_max"] <= 1
    assert found["ended_alone"] == []
    assert found["trajectories"] > 0
    assert found["replays"] > 0
    assert 0 < found["batches"] == len(played.curve().trained_at)
    assert found["effective_time_ratio"] < 1


def test_what_a_trainers_log_shows_as_trained_again_is_no_fault() -> None:
    assert lineage(LOG.splitlines()) == Lineage(2, doubled=0, passed_over=0, retrained=1)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("x INFO t: update 4 on batch 3: loss 0", Lineage(2, 1, 0, 1)),
        ("x INFO t: update 4 on batch 6: loss 0", Lineage(2, 0, 2, 1)),
    ],
)
def test_a_batch_that_came_twice_or_never_is_a_fault(line: str, fault: Lineage) -> None:
    assert lineage([*LOG.splitlines(), line]) == fault


def test_the_audit_finds_a_trajectory_that_is_no_longer_finished(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    finished = FinishedTrajectories()
    with open_store(config.run.dir) as store:
        tasks = training_tasks(config)
        store.begin_run(0, "{}", tasks)
        ledger = Ledger(config, store, tasks, make_scheduler(config, tasks))
        for _ in range(2):
            play_group(ledger, MIXED)
        play_group(ledger, ["fail"] * 4)
        a_batch(next_batch(ledger, 0))
        store.commit()
        with open_reader(config.run.dir) as reader:
            finished.update(reader)
            assert len(finished.ids) == 12
            kept = audit(reader, finished, [])
            assert (kept.finished_lost, kept.double_trained, kept.trajectories) == (0, 0, 12)
        *_, gone, wrong = sorted(finished.ids)
        store._write("UPDATE trajectories SET reason = 'worker_lost' WHERE id = ?", (wrong,))
        store._write("UPDATE trajectories SET state = 'playing' WHERE id = ?", (gone,))
        first = min(finished.ids)
        store._write("DELETE FROM steps WHERE trajectory_id = ? AND step = 0", (first,))
        store.commit()
        with open_reader(config.run.dir) as reader:
            assert audit(reader, finished, LOG.splitlines()).finished_lost == 3


def test_the_audit_finds_a_use_that_came_twice_too_early_or_never(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", train={"reuse": 2}, groups_per_batch=1)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(7):
            if isinstance(next_batch(ledger, ledger.updates), NotYet):
                play_group(ledger, MIXED, version=ledger.updates)
            train(ledger, ledger.updates)
        rows = store.batches()
        assert [row.replay_of for row in rows] == [None, None, 1, 2, None, 1, 2]
        store.commit()
        with open_reader(config.run.dir) as reader:
            found = audit(reader, FinishedTrajectories(), [])
        assert (found.double_trained, found.replays) == (0, 4)
    replay = rows[2]
    assert wrong_replays([*rows, replace(replay, id=8)]) == 1  # its first reuse again
    assert wrong_replays([rows[0], replace(replay, id=2)]) == 1  # in consecutive updates
    assert wrong_replays([*rows[:2], replace(replay, reuse=2)]) == 1  # one was left out


def test_a_trainer_that_is_killed_before_each_checkpoint_is_reported_with_the_cure(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    folder = config.run.dir / "checkpoints"
    (folder / "c000002").mkdir(parents=True)
    progress = CheckpointProgress(config)
    assert progress.trainer_killed() == ""  # it has written one
    assert progress.trainer_killed() == ""  # once is chance
    told = progress.trainer_killed()
    assert "killed 2 times since its newest checkpoint (c000002)" in told
    assert "train.checkpoint_every" in told
    (folder / "c000004").mkdir()
    assert progress.trainer_killed() == ""
    assert progress.lost_lives == 2


def test_success_is_reported_by_the_batches_in_the_weights_when_it_was_played(
    tmp_path: Path,
) -> None:
    """The resumed trainer's version is one further than its batches: they are counted, not it."""
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        played: dict[int, list[Outcome]] = {0: ["fail", "fail", "fail", "pass"], 3: MIXED}
        for version, outcomes in played.items():
            for _ in range(config.data.groups_per_batch):
                play_group(ledger, outcomes, version=version)
            batch = a_batch(next_batch(ledger, version))
            ledger.batch_trained(trained(batch.batch_id, version + 3))
        store.commit()
        course = learning_curve(store, began=0.0)
    assert course.success == [(0, 0.25), (1, 0.5)]
    assert len(course.trained_at) == 2
    assert all(at > 0 for at in course.trained_at)


def test_the_pace_is_compared_at_the_most_batches_that_both_runs_have() -> None:
    assert pace_ratio([2.0, 4.0, 8.0], [1.0, 2.0]) == 0.5
    assert pace_ratio([2.0], [1.0, 2.0]) is None
