"""What the store promises as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bus.errors import StoreError
from bus.messages import BatchTrained, StepRecord
from bus.packed import int32s
from bus.weights import WeightsPublished
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import BatchRow, Decision, PlannedSample
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    DRAG,
    picture,
    pointer_record,
    step_record,
    sync_done,
    trajectory_end,
)
from tests.data.store.parts import add_lease, fill


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
        assert row.prompt_token_ids == list(sent.prompt_token_ids)
        assert row.sampled == sent.sampled
        assert (row.text, row.action, row.error) == (sent.text, sent.action, sent.error)
        assert images[row.screenshot] == sent.screenshot


def test_all_actions_of_a_completion_come_back(run_dir: Path) -> None:
    more = [{"kind": "type", "text": "a\n\u65e5"}, {"kind": "keypress", "keys": ["enter"]}]
    with open_store(run_dir) as store:
        name = fill(store, steps=1)
        sent = step_record(name, 1).model_copy(update={"more_actions": more})
        store.add_step(sent, 3.0)
        store.add_step(step_record(name, 2).model_copy(update={"action": None}), 4.0)
        store.commit()
        one, several, none = store.steps(name)
        assert (one.more_actions, one.actions) == ([], [one.action])
        assert (several.more_actions, several.actions) == (more, [sent.action, *more])
        assert none.actions == []
        assert [step.actions for step in store.played_steps(name)] == [one.actions, several.actions]


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
        store.abandon(StoreError("the disk is full"))
        store.abandon(StoreError("a consequence"))
        with pytest.raises(StoreError, match=r"^the disk is full$"):
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
    planned = [PlannedSample("g1", "g1-00", step, 0.5 - step, 1.0) for step in (2, 0, 1)]
    with open_store(run_dir) as store:
        fill(store)
        store.finish(trajectory_end("g1-00", 3), 9.0, 0, 2)
        store.add_batch(
            BatchRow(1, "batched", 10.0, 4, 1.0, 0.5, None, None), ["g1"], planned, ["g1-00"]
        )
        samples = store.batch_steps(1)
        assert [(s.step, s.advantage, s.weight) for s in samples] == [
            (p.step, p.advantage, p.weight) for p in planned
        ]
        sent = step_record("g1-00", 2).sampled
        assert list(samples[0].token_ids) == sent.token_ids
        assert list(samples[0].behaviour_logprobs) == sent.behaviour_logprobs
        assert store.batch_groups(1) == ["g1"]
        assert [row.state for row in store.trajectories()] == ["batched"]
        done = BatchTrained(batch_id=1, policy_version=5, metrics={"loss": 0.25})
        store.batch_trained(done, done.metrics, 11.0)
        [row] = store.trajectories(state="trained")
        assert (row.batch_id, row.oldest_version, row.newest_version) == (1, 0, 2)
        assert store.batches()[0].trained_version == 5
        assert [(m.name, m.step, m.value) for m in store.metrics()] == [("loss", 1, 0.25)]


def routed(trajectory_id: str, step: int, routing: bytes) -> StepRecord:
    record = step_record(trajectory_id, step)
    return record.model_copy(
        update={
            "prompt_token_ids": int32s([5] * 198),
            "sampled": record.sampled.model_copy(update={"routing": routing}),
        }
    )


def test_the_experts_of_common_tokens_are_stored_once_and_removed_with_their_group(
    run_dir: Path,
) -> None:
    """200 computed tokens of four bytes: three whole parts of 64 tokens, and one of 8."""
    first = bytes(range(256)) * 3 + b"last" * 8
    other = first[:512] + bytes(288)
    with open_store(run_dir) as store:
        fill(store, steps=0)
        store.add_step(routed("g1-00", 0, first), 2.0)
        assert (store.sizes().routing_bytes, store.sizes().screenshots) == (256 + 32, 1)
        store.add_step(routed("g1-00", 1, other), 3.0)
        assert store.sizes().routing_bytes == 256 + 32 + 256 + 32
        assert store.sizes().screenshots == 2

        def read(step: int, reason: str = "") -> bytes:
            [own] = store.planned_steps([PlannedSample("g1", "g1-00", step, 0.5, 1.0, reason)])
            return own.routing

        assert (read(0), read(1)) == (first, other)
        assert read(0, "pool") == b""  # other weights chose them
        assert [each.sampled.routing for each in store.steps("g1-00")] == [b"", b""]
        store.remove_screenshots(2, 1000)
        assert (read(0), store.sizes().routing_bytes) == (b"", 0)


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


def test_the_version_published_last_is_the_newest_even_if_its_number_is_lower(
    run_dir: Path,
) -> None:
    with open_store(run_dir) as store:
        for at, version in enumerate((1, 2, 3, 2)):
            weights = WeightsPublished(
                policy_version=version, path=f"w{version}", digest="d", updates=0
            )
            store.add_version(weights, float(at))
        newest = store.newest_version()
        assert newest is not None
        assert newest.policy_version == 2


def test_decisions_on_a_subject_come_in_order(run_dir: Path) -> None:
    told = [Decision("a", False, "stale", 0.0), Decision("b", True, "mixed", 1.0, 3)]
    with open_store(run_dir) as store:
        store.add_decisions(told, 1.0)
        assert store.decisions() == told
        assert store.decisions("b") == told[1:]


def test_syncs_are_kept_in_order_with_their_times_apart(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        store.add_sync(sync_done("rollout-1", 1), 10.0, 11.0)
        store.add_sync(sync_done("rollout-0", 1), 11.0, 12.0)
        store.add_sync(sync_done("rollout-0", 2, "bad digest"), 13.0, 14.0)
        store.add_sync(sync_done("rollout-0", 1), 11.5, 15.0)  # sent again: its Ack was lost
    with open_reader(run_dir) as reader:
        assert [row.worker for row in reader.syncs()] == ["rollout-1", "rollout-0", "rollout-0"]
        [first, second] = reader.syncs("rollout-0")
        assert (first.granted_at, first.done_at, first.error) == (11.0, 12.0, "")
        for field in ("waited_s", "transfer_s", "pause_s", "in_flight"):
            assert getattr(first, field) == getattr(sync_done("", 0), field)
        newest = {row.worker: row for row in reader.newest_syncs()}
        assert newest["rollout-0"].done_at == second.done_at
        counts = [(newest[name].syncs, newest[name].refused) for name in ("rollout-0", "rollout-1")]
        assert counts == [(2, 1), (1, 0)]


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
        store.trajectories()


def test_a_full_disk_is_one_clear_error_and_what_was_committed_stays(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        name = fill(store)
        [pages] = store._rows("PRAGMA page_count")
        store._connection.execute(f"PRAGMA max_page_count = {pages['page_count']}")
        with pytest.raises(StoreError, match="free space") as full:
            add_steps(store, name, range(3, 200))
        store.abandon(full.value)
        with pytest.raises(StoreError, match="database or disk is full; free space"):
            add_steps(store, name, range(3, 4))
        assert len(store.steps(name)) == 3


def add_steps(store: Store, name: str, steps: range) -> None:
    for step in steps:
        store.add_step(step_record(name, step), 1.0)


def test_a_batch_has_the_patches_of_its_completions(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store, steps=1)
        add_lease(store, "g1-01", 1)
        store.add_step(pointer_record("g1-01", 0), 9.0)
        own = [PlannedSample("g1", name, 0, 0.5, 1.0) for name in ("g1-00", "g1-01")]
        found = list(store.planned_steps(own))
    assert [step.patches for step in found] == [[], DRAG.patches]
