"""Databases of older and newer darts, and of other programs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlite_utils import Database

from bus.errors import RunDirectoryError, StoreError
from bus.messages import Outcome
from dart_cli.data.chains import chained
from dart_cli.data.store.migrations import MIGRATIONS
from dart_cli.data.store.open import open_reader, open_store
from envs.base import Task
from tests.data.parts import (
    DRAG,
    FAILED,
    a_batch,
    ask_lease,
    file_member,
    make_ledger,
    one_task,
    play,
    play_group,
    pointer_record,
    small_config,
    step_record,
    trajectory_end,
)
from tests.data.store.parts import add_lease, fill


def test_a_database_of_a_newer_dart_is_refused_by_name(run_dir: Path) -> None:
    open_store(run_dir).close()
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
            "VALUES ('dart', '0999_future', '2099')"
        )
    db.close()
    for opening in (open_store, open_reader):
        with pytest.raises(RunDirectoryError, match=r"newer dart.*0999_future"):
            opening(run_dir)


def test_an_older_database_is_migrated_by_the_writer_and_refused_to_readers(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    old = Database(run_dir / "run.db")
    MIGRATIONS.ensure_migrations_table(old)
    old.execute("PRAGMA application_id = 0x44415254")
    old.close()
    with pytest.raises(RunDirectoryError, match=r"older schema.*start `dart data`"):
        open_reader(run_dir)
    with open_store(run_dir) as store:
        fill(store)
    with open_reader(run_dir) as reader:
        assert reader.total("steps") == 3


def test_an_older_run_keeps_its_steps_when_instructions_are_added(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store)
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step of instructions found it
        db.execute("ALTER TABLE steps DROP COLUMN instruction")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0011_step_instruction'")
    db.close()
    with open_store(run_dir) as store:
        task = Task(
            id="mini/click", suite="mini", instruction="click the {colour} one", max_steps=3
        )
        store.begin_run(1, "{}", [task])
        add_lease(store, "g1-01", 1)
        store.add_step(step_record("g1-01", 0), 9.0)
        store.commit()
        assert [step.instruction for step in store.steps("g1-00")] == ["", "", ""]
        assert store.instruction("mini", "mini/click", ["g1-00"]) == "click the {colour} one"
        assert store.instruction("mini", "mini/click", ["g1-00", "g1-01"]) == "click the red one"
        assert store.instruction("mini", "mini/unknown", ["g1-02"]) == ""


def test_an_older_run_keeps_its_steps_when_texts_beside_screenshots_are_added(
    run_dir: Path,
) -> None:
    with open_store(run_dir) as store:
        fill(store)
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("ALTER TABLE steps DROP COLUMN observed_text")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0018_observed_text'")
    db.close()
    with open_store(run_dir) as store:
        add_lease(store, "g1-01", 1)
        store.add_step(step_record("g1-01", 0).model_copy(update={"observed_text": "$ ls"}), 9.0)
        store.commit()
        assert [step.observed_text for step in store.steps("g1-00")] == ["", "", ""]
        assert [step.observed_text for step in store.steps("g1-01")] == ["$ ls"]


def test_an_older_run_keeps_its_steps_when_patches_are_added(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store)
    with sqlite3.connect(run_dir / "run.db") as db:
        for name in ("patches", "pointed"):
            db.execute(f"ALTER TABLE steps DROP COLUMN {name}")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0021_patches'")
    db.close()
    with open_store(run_dir) as store:
        add_lease(store, "g1-01", 1)
        store.add_step(pointer_record("g1-01", 0), 9.0)
        store.commit()
        old = [(step.sampled.patches, step.pointed) for step in store.steps("g1-00")]
        assert old == [([], [])] * 3
        assert store.steps("g1-01")[0].sampled == DRAG


def test_rewards_of_an_older_run_follow_from_its_outcomes(run_dir: Path) -> None:
    config = small_config(run_dir)
    with open_store(run_dir) as store:
        play_group(make_ledger(config, store), ["pass", "fail", "invalid", "pass"])
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step of rewards found it
        for table in ("trajectories", "steps", "pool"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN reward")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0014_rewards'")
    db.close()
    with open_store(run_dir) as store:
        rows = store.trajectories()
        assert [(row.outcome, row.reward) for row in rows] == [
            ("pass", 1.0),
            ("fail", 0.0),
            ("invalid", None),
            ("pass", 1.0),
        ]
        assert {step.reward for row in rows for step in store.steps(row.id)} == {None}


def test_an_older_run_knows_its_newest_trajectories(run_dir: Path) -> None:
    config = small_config(run_dir)
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ["pass", "fail", "invalid", "pass"])
        known = ledger.progress.newest_success()
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step found it
        db.execute("ALTER TABLE runs DROP COLUMN learned")
        db.execute("ALTER TABLE task_progress DROP COLUMN newest")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0023_learned'")
    db.close()
    with open_store(run_dir) as store:
        assert make_ledger(config, store).progress.newest_success() == known
        assert known.counted == 3


@pytest.mark.parametrize("early_stop", [True, False])
def test_success_of_an_older_run_is_counted_again(run_dir: Path, early_stop: bool) -> None:
    """Of the first halves where data.early_stop was on; an incomplete trajectory is no pass."""
    config = one_task(run_dir, early_stop=early_stop)
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store)
        outcomes: list[Outcome] = ["pass", "invalid", "fail", "pass", "fail", "pass", "pass"]
        for outcome in outcomes:
            play(ledger, 0, outcome)
        lease = ask_lease(ledger, 0)
        ledger.end(trajectory_end(lease.trajectory_id, 2, "pass"))
        known = ledger.progress.tasks
        counted = [row.id for row in store.trajectories() if row.counted]
        assert len(counted) == (4 if early_stop else 6)
        store.commit()
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step found it
        db.execute("ALTER TABLE trajectories DROP COLUMN counted")
        db.execute("UPDATE trajectories SET outcome = 'pass' WHERE reason = 'incomplete'")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0015_counted'")
    db.close()
    with open_store(run_dir) as store:
        assert [row.id for row in store.trajectories() if row.counted] == counted
        assert make_ledger(config, store).progress.tasks == known


def test_recent_success_of_an_older_run_is_counted_again(run_dir: Path) -> None:
    """With the outcomes from before alone in the slow average, its noise would be told too low."""
    config = small_config(run_dir)
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ["pass", "fail", "fail", "pass"])
        known = ledger.progress.tasks
        store.commit()
    added = {
        "batches": ("replay_of", "reuse", "success", "success_error", "tasks", "trajectories"),
        "batch_samples": ("screen_advantage", "fork_trajectory_id", "fork_step", "baseline"),
        "steps": ("screen_key",),
        "task_progress": ("recent_total", "recent_weight", "recent_reward_total"),
    }
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step found it
        db.execute("DROP TABLE trackers")
        db.execute("DROP INDEX batches_by_replay")
        for table, columns in added.items():
            for column in columns:
                db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0020_reuse_and_credit'")
    db.close()
    with open_store(run_dir) as store:
        assert make_ledger(config, store).progress.tasks == known


def test_a_run_of_an_older_dart_is_counted_from_its_outcomes_once(run_dir: Path) -> None:
    config = small_config(run_dir)
    with open_store(run_dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ["pass", "fail", "fail", "pass"])
        known = ledger.progress.tasks
        assert store.task_progress()
        store._write("DELETE FROM task_progress")
    with open_store(run_dir) as store:
        assert make_ledger(config, store).progress.tasks == known
    with open_store(run_dir) as store:
        store._write("DELETE FROM trajectories")  # what is written down is not counted again
        assert make_ledger(config, store).progress.tasks == known


def test_an_older_batch_knows_in_which_groups_its_samples_are_compared(run_dir: Path) -> None:
    config = one_task(run_dir, pool_ratio=0.2, groups_per_batch=2)
    with open_store(run_dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store)
        play_group(ledger, FAILED)
        play_group(ledger, FAILED)
        batch = a_batch(ledger.next_batch(0))
        store.commit()
    with sqlite3.connect(run_dir / "run.db") as db:  # as the schema step found it
        db.execute("ALTER TABLE batch_samples DROP COLUMN group_id")
        db.execute("DELETE FROM _sqlite_migrations WHERE name = '0013_group_of_sample'")
    db.close()
    with open_store(run_dir) as store:
        assert chained(store.batch_steps(1)) == (batch.chains, batch.samples)


def test_another_programs_database_is_left_alone(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("CREATE TABLE diary (text)")
    db.close()
    with pytest.raises(StoreError, match="not dart's database"):
        open_store(run_dir)


def test_a_first_start_that_was_cut_off_is_completed_by_the_next(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_db: Database) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(MIGRATIONS._migrations[0], "fn", full)
        with pytest.raises(StoreError, match="free space"):
            open_store(run_dir)
    with open_store(run_dir) as store:
        fill(store)
