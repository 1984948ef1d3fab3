"""The store's promises, on real SQLite files."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from sqlite_utils import Database

from bus.errors import ProtocolError, RunDirectoryError, StoreError
from bus.messages import BatchTrained, WeightsPublished
from dart_cli.data.store.migrations import MIGRATIONS
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import BatchRow, Decision, GroupRow, PlannedSample, UsageRow
from dart_cli.data.store.writer import Store
from envs.base import Task
from tests.altered import altered
from tests.data.parts import (
    make_ledger,
    picture,
    play_group,
    pool_member,
    small_config,
    step_record,
    sync_done,
    trajectory_end,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def add_lease(
    store: Store,
    trajectory_id: str,
    attempt: int,
    *,
    worker: str = "env-0",
    slot: int = 0,
    sampling_seed: int = 1,
    at: float = 1.0,
) -> None:
    """File a trajectory of group g1."""
    store.add_lease(
        trajectory_id,
        group_id="g1",
        attempt=attempt,
        worker=worker,
        slot=slot,
        sampling_seed=sampling_seed,
        at=at,
    )


def fill(store: Store, *, steps: int = 3) -> str:
    """One group with one trajectory of some steps; returns the trajectory's id."""
    store.begin_run(1, "{}", [])
    store.add_group(GroupRow("g1", 1, "mini", "mini/click", 5, 4, "open", "", 1.0, None, None))
    add_lease(store, "g1-00", 0, slot=2, sampling_seed=77)
    for step in range(steps):
        store.add_step(step_record("g1-00", step, version=step), 2.0 + step)
    store.commit()
    return "g1-00"


def test_a_second_writer_is_refused_and_told_who_holds_the_run(run_dir: Path) -> None:
    with open_store(run_dir), pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        open_store(run_dir)
    open_store(run_dir).close()


def test_the_run_directory_is_private(run_dir: Path) -> None:
    open_store(run_dir).close()
    assert run_dir.stat().st_mode & 0o077 == 0


def test_a_run_keeps_its_identity_over_starts(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        first = store.begin_run(1, '{"a": 1}', [])
    with open_store(run_dir) as store:
        second = store.begin_run(2, '{"a": 2}', [])
    assert (second.id, second.created_at) == (first.id, first.created_at)
    assert (second.seed, second.config) == (2, '{"a": 2}')


def test_what_was_handed_in_comes_back_bit_for_bit(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store)
        rows = store.steps(name)
        images = store.screenshots(row.screenshot for row in rows)
    for step, row in enumerate(rows):
        sent = step_record(name, step, version=step)
        assert row.prompt_token_ids == sent.prompt_token_ids
        assert row.sampled == sent.sampled
        assert (row.text, row.action, row.error) == (sent.text, sent.action, sent.error)
        assert images[row.screenshot] == sent.screenshot


def test_the_same_step_twice_changes_nothing(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store, steps=1)
        before = store.steps(name)
        assert not store.add_step(step_record(name, 0, version=9), 99.0)
        assert store.steps(name) == before


def test_a_screenshot_is_stored_once_however_often_it_is_shown(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store, steps=0)
        for step in range(50):
            store.add_step(step_record(name, step, image=picture("same")), 1.0)
        store.commit()
        assert store.total("steps") == 50
        assert store.total("screenshots") == 1


def test_a_reader_sees_what_is_committed_and_nothing_else(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store, steps=1)
        with open_reader(run_dir) as reader:
            store.add_step(step_record(name, 1), 1.0)
            assert len(reader.steps(name)) == 1
            store.commit()
            assert len(reader.steps(name)) == 2


def test_an_abandoned_store_forgets_what_is_not_committed_and_writes_no_more(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store, steps=1)
        store.add_step(step_record(name, 1), 1.0)
        store.abandon()
        with pytest.raises(StoreError, match="readonly"):
            store.add_step(step_record(name, 1), 1.0)
    with open_reader(run_dir) as reader:
        assert len(reader.steps(name)) == 1


def test_a_reader_cannot_write(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store)
    with open_reader(run_dir) as reader, pytest.raises(StoreError, match="readonly"):
        reader._rows("DELETE FROM steps")


def test_a_checkpoint_leaves_the_rows_as_they_are(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store)
        store.checkpoint()
        assert len(store.steps(name)) == 3
    with open_reader(run_dir) as reader:
        assert len(reader.steps(name)) == 3


def test_a_batch_is_read_as_it_was_planned(run_dir: Path) -> None:
    planned = [PlannedSample("g1-00", step, 0.5 - step, 1.0) for step in (2, 0, 1)]
    with open_store(run_dir) as store:
        fill(store)
        store.finish(trajectory_end("g1-00", 3), 9.0, 0, 2)
        store.add_batch(
            BatchRow(1, "batched", 10.0, 4, 1.0, 0.5, None, None), ["g1"], planned, ["g1-00"]
        )
        samples = store.batch_samples(1)
        assert [(s.step, s.advantage, s.weight) for s in samples] == [
            (p.step, p.advantage, p.weight) for p in planned
        ]
        assert (
            samples[0].sampled.behaviour_logprobs
            == step_record("g1-00", 2).sampled.behaviour_logprobs
        )
        assert store.batch_groups(1) == ["g1"]
        assert [row.state for row in store.trajectories()] == ["batched"]
        done = BatchTrained(batch_id=1, policy_version=5, metrics={"loss": 0.25})
        store.batch_trained(done, done.metrics, 11.0)
        [row] = store.trajectories(state="trained")
        assert (row.batch_id, row.oldest_version, row.newest_version) == (1, 0, 2)
        assert store.batches()[0].trained_version == 5
        assert [(m.name, m.step, m.value) for m in store.metrics()] == [("loss", 1, 0.25)]


@pytest.mark.parametrize("table", ["groups", "trajectories"])
@pytest.mark.parametrize(
    "statement",
    ["UPDATE {} SET state = ? WHERE batch_id = ?", "SELECT ?, id FROM {} WHERE batch_id = ?"],
)
def test_a_batchs_rows_are_found_without_a_look_at_all_others(
    run_dir: Path, table: str, statement: str
) -> None:
    with open_store(run_dir) as store:
        plan = store._rows(f"EXPLAIN QUERY PLAN {statement.format(table)}", ("trained", 1))
    assert [f"INDEX {table}_by_batch" in step["detail"] for step in plan] == [True]


def test_curves_count_judged_trajectories_by_their_oldest_version(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store, steps=0)
        for number, (outcome, version) in enumerate(
            [("pass", 0), ("fail", 1), ("pass", 2), ("invalid", 2), ("pass", 3)], start=1
        ):
            name = f"g1-{number:02d}"
            add_lease(store, name, number)
            store.finish(trajectory_end(name, 0, outcome), float(number), version, version)  # type: ignore[arg-type]
        curve = store.success_curve(bucket=2)
        assert [(p.policy_version, p.trajectories, p.passed) for p in curve] == [
            (0, 2, 1),
            (2, 2, 2),
        ]
        assert [p.success for p in curve] == [0.5, 1.0]
        assert {p.task_id for p in store.success_curve()} == {"mini/click"}
        assert [row.outcome for row in store.outcomes()] == [
            "pass",
            "fail",
            "pass",
            "invalid",
            "pass",
        ]


def test_the_version_published_last_is_the_newest_even_if_its_number_is_lower(
    run_dir: Path,
) -> None:
    with open_store(run_dir) as store:
        for at, version in enumerate((1, 2, 3, 2)):
            weights = WeightsPublished(policy_version=version, path=f"w{version}", digest="d")
            store.add_version(weights, float(at))
        newest = store.newest_version()
        assert newest is not None
        assert newest.policy_version == 2


def test_decisions_tell_a_subjects_story_in_order(run_dir: Path) -> None:
    told = [Decision("a", False, "stale", 0.0), Decision("b", True, "mixed", 1.0, 3)]
    with open_store(run_dir) as store:
        store.add_decisions(told, 1.0)
        assert store.decisions() == told
        assert store.decisions("b") == told[1:]


# --- files that are not as they should be ---------------------------------------------------


def test_no_run_is_an_error_that_says_what_to_start(run_dir: Path) -> None:
    with pytest.raises(RunDirectoryError, match="start `dart data`"):
        open_reader(run_dir)


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


def test_a_run_of_before_keeps_its_steps_when_instructions_are_added(run_dir: Path) -> None:
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


def test_timelines_say_who_played_when_and_who_answered(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store)
        add_lease(store, "g1-01", 1, worker="env-1", at=4.0)
        store.finish(trajectory_end(name, 3, "fail"), 9.0, 0, 2)
    with open_reader(run_dir) as reader:
        ended, playing = reader.episode_times()
        assert (ended.id, ended.worker, ended.slot) == (name, "env-0", 2)
        assert (ended.leased_at, ended.ended_at, ended.reset_s) == (1.0, 9.0, 0.01)
        assert (ended.state, ended.outcome, ended.steps) == ("finished", "fail", 3)
        assert (playing.worker, playing.ended_at, playing.outcome) == ("env-1", None, None)
        assert reader.episode_times(after=1.0) == [playing]
        steps = reader.step_times()
        assert [(step.step, step.at, step.worker) for step in steps] == [
            (0, 2.0, "rollout-0"),
            (1, 3.0, "rollout-0"),
            (2, 4.0, "rollout-0"),
        ]
        assert (steps[0].model_s, steps[0].env_s) == (0.01, 0.001)
        assert reader.step_times(after=2.0) == steps[1:]


def test_syncs_are_kept_in_order_with_their_times_apart(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        store.add_sync(sync_done("rollout-1", 1), 10.0, 11.0)
        store.add_sync(sync_done("rollout-0", 1), 11.0, 12.0)
        store.add_sync(sync_done("rollout-0", 2, "bad digest"), 13.0, 14.0)
        store.add_sync(sync_done("rollout-0", 1), 11.5, 15.0)  # told again: nobody heard the Ack
    with open_reader(run_dir) as reader:
        assert [row.worker for row in reader.syncs()] == ["rollout-1", "rollout-0", "rollout-0"]
        [first, second] = reader.syncs("rollout-0")
        assert (first.granted_at, first.done_at, first.error) == (11.0, 12.0, "")
        for field in ("waited_s", "transfer_s", "pause_s", "finish_s", "resume_s", "in_flight"):
            assert getattr(first, field) == getattr(sync_done("", 0), field)
        newest = {row.worker: (row, syncs, bad) for row, syncs, bad in reader.newest_syncs()}
        assert newest["rollout-0"] == (second, 2, 1)
        assert newest["rollout-1"][1:] == (1, 0)


def test_usage_holds_the_newest_row_of_a_worker_and_phase(run_dir: Path) -> None:
    older = UsageRow("env-0", "playing", "env", 1.0, 5.0, 0.0)
    newer = UsageRow("env-0", "playing", "env", 9.0, 2.0, 5.0)
    with open_store(run_dir) as store:
        store.save_usage([older])
        store.save_usage([newer])
    with open_reader(run_dir) as reader:
        assert reader.usage() == [newer]
        assert newer.total_s == 7.0


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


def test_another_programs_database_is_left_alone(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("CREATE TABLE diary (text)")
    db.close()
    with pytest.raises(StoreError, match="not dart's database"):
        open_store(run_dir)


def test_a_first_start_that_was_cut_off_is_made_up_for_by_the_next(
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


@pytest.mark.parametrize("damage", ["noise", "header", "truncated"])
def test_a_damaged_file_is_an_error_that_names_it_and_the_cure(run_dir: Path, damage: str) -> None:
    with open_store(run_dir) as store:
        fill(store, steps=40)
    path = run_dir / "run.db"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "noise": os.urandom(len(whole)),
            "header": b"x" * 200 + whole[200:],
            "truncated": whole[:9000],
        }[damage]
    )
    with pytest.raises(StoreError, match=r"run\.db.*damaged.*recover"):
        read_everything(run_dir)


def read_everything(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        store.steps("g1-00")
        list(store.outcomes())


def test_a_full_disk_is_one_clear_error_and_what_was_committed_stays(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store)
        [pages] = store._rows("PRAGMA page_count")
        store._connection.execute(f"PRAGMA max_page_count = {pages['page_count']}")
        with pytest.raises(StoreError, match="free space"):
            add_steps(store, name, range(3, 200))
        store.abandon()
        assert len(store.steps(name)) == 3


def add_steps(store: Store, name: str, steps: range) -> None:
    for step in steps:
        store.add_step(step_record(name, step), 1.0)


def test_a_directory_without_permission_is_an_error_that_says_so(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "data.lock").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        open_store(run_dir)


# --- the experience pool --------------------------------------------------------------------


def test_a_success_from_outside_joins_the_pool_once_and_keeps_what_is_trained_on(
    run_dir: Path,
) -> None:
    row, steps, images = pool_member("xa", known=True)
    with open_store(run_dir) as store:
        store.begin_run(1, "{}", [])
        assert store.add_pool_member(row, steps, images)
        assert not store.add_pool_member(row, steps, images)
        assert store.pool() == [row]
        assert store.pool("mini/click") == [row]
        assert store.pool("mini/other") == []
        filed = store.steps("xa")
        assert [step.sampled.behaviour_logprobs for step in filed] == [
            s.sampled.behaviour_logprobs for s in steps
        ]
        assert [step.sampled.version_spans for step in filed] == [[], []]
        assert store.screenshots(step.screenshot for step in filed) == images
        assert store.longest_successes() == {"mini/click": 2}


def test_log_probabilities_nobody_knows_are_not_kept(run_dir: Path) -> None:
    row, steps, images = pool_member("xa", known=False)
    with open_store(run_dir) as store:
        store.add_pool_member(row, steps, images)
        assert [step.sampled.behaviour_logprobs for step in store.steps("xa")] == [[], []]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_ids": []}, "must not be empty"),
        ({"token_ids": [2**31]}, "token ids"),
        ({"behaviour_logprobs": [-1.0]}, "one for each token"),
        ({"behaviour_logprobs": [float("nan")] * 3}, "finite"),
        ({"entropies": [float("inf")]}, "entropies"),
        ({"image_hashes": []}, "image_hashes"),
        ({"image_hashes": ["0" * 32, "{own}"]}, "1 prompt images are unknown"),
        ({"step": 5}, "numbered from 0"),
        ({"trajectory_id": "xb"}, "belongs to xb"),
    ],
)
def test_a_member_that_could_not_be_trained_on_is_refused_and_leaves_no_trace(
    run_dir: Path, change: dict[str, object], told: str
) -> None:
    row, steps, images = pool_member("xa", known=True)
    hashes = change.get("image_hashes")
    if isinstance(hashes, list):
        change = {"image_hashes": [h.replace("{own}", steps[1].screenshot) for h in hashes]}
    with open_store(run_dir) as store:
        with pytest.raises(ProtocolError, match=told):
            store.add_pool_member(row, [steps[0], altered(steps[1], **change)], images)  # type: ignore[arg-type]
        assert (store.pool(), store.total("steps"), store.total("screenshots")) == ([], 0, 0)


def test_an_image_that_is_not_what_its_hash_says_is_refused(run_dir: Path) -> None:
    row, steps, images = pool_member("xa", known=True)
    with open_store(run_dir) as store, pytest.raises(ProtocolError, match="other content"):
        store.add_pool_member(row, steps, dict.fromkeys(images, b"another"))


def test_screenshots_of_the_pool_stay_until_the_last_member_that_shows_them_is_evicted(
    run_dir: Path,
) -> None:
    common = picture("common")
    with open_store(run_dir) as store:
        name = fill(store)
        for member in ("xa", "xb"):
            row, steps, images = pool_member(member, known=True, first=common)
            store.add_pool_member(row, steps, images)
        kept = [step.screenshot for step in store.steps("xa")]

        def held() -> list[bool]:
            store.remove_screenshots(2, 1000)
            return [bool(store.screenshots([key])) for key in kept]

        assert held() == [True, True]
        assert store.screenshots(step.screenshot for step in store.steps(name)) == {}
        store.evict_from_pool("xa", 9.0)
        assert held() == [True, False]
        store.evict_from_pool("xb", 9.0)
        assert held() == [False, False]
        assert store.pool() == []
        assert [row.evicted_at for row in store.pool(evicted=True)] == [9.0, 9.0]


def test_a_screenshot_of_an_evicted_member_stays_for_the_groups_that_are_open(
    run_dir: Path,
) -> None:
    with open_store(run_dir) as store:
        fill(store)
        row, steps, images = pool_member("xa", known=True)
        store.add_pool_member(row, steps, images)
        store.evict_from_pool("xa", 9.0)
        store.remove_screenshots(1, 1000)  # group 1 is still needed
        assert store.screenshots(images) == images


@pytest.mark.parametrize(("batches", "most"), [(0, 3), (1, 3), (3, 3), (4, 3), (10, 3), (7, 100)])
def test_metric_curves_are_means_of_buckets_over_the_whole_run(
    batches: int, most: int, run_dir: Path
) -> None:
    values = {batch: 0.5 * batch * batch for batch in range(1, batches + 1)}
    with open_store(run_dir) as store:
        for batch, value in values.items():
            told = BatchTrained(batch_id=batch, policy_version=batch, metrics={})
            store.batch_trained(told, {"a": value, "b": -value}, at=float(batch))
        store.commit()
        points = store.metric_curves(most)
    size = max(1, -(-batches // most)) if batches else 1
    buckets = [list(values)[start : start + size] for start in range(0, batches, size)]
    for name, sign in (("a", 1), ("b", -1)):
        found = [point for point in points if point.name == name]
        assert len(found) <= most
        assert [point.step for point in found] == [bucket[-1] for bucket in buckets]
        assert [point.value for point in found] == pytest.approx(
            [sign * sum(values[each] for each in bucket) / len(bucket) for bucket in buckets]
        )
