"""Adaptive curation in the ledger: high-entropy steps, the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bus.messages import Outcome
from dart_cli.algo.objective import Normalise
from dart_cli.config.schema import Config
from dart_cli.data import pool
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from dart_cli.train.packs.batch_tokens import batch_loss_weights, trajectory_of
from tests.data.parts import (
    FAILED,
    MIXED,
    PASSED,
    a_batch,
    assert_sums_are_conserved,
    batch_trained,
    file_member,
    make_ledger,
    next_batch,
    one_task,
    picture_of,
    play,
    play_group,
    step_record,
    train,
)

POOL = {"pool_ratio": 0.2}  # 1 of 5


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_a_group_that_failed_throughout_is_compared_with_a_success_of_its_task(
    tmp_path: Path, has_logprobs: bool
) -> None:
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        file_member(store, config, has_logprobs=has_logprobs)
        ledger = make_ledger(config, store)
        group = play_group(ledger, FAILED)
        [row] = store.groups("ready")
        assert (row.id, row.pool_member) == (group, "xa")
        batch = a_batch(next_batch(ledger, 0))
        rewards = np.array([0.0] * 4 + [1.0])
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        got = [sample.advantage for sample in batch.samples]
        np.testing.assert_allclose(got, np.repeat(wanted, 2), rtol=1e-9)
        *fresh, first, second = batch.samples
        assert {sample.trajectory_id for sample in fresh} == {f"{group}-{i:02d}" for i in range(4)}
        for step, sample in enumerate((first, second)):
            filed = step_record("xa", step)
            assert (sample.trajectory_id, sample.step, sample.weight) == ("xa", step, 1.0)
            assert list(batch.completion(sample)) == filed.sampled.token_ids
            assert list(sample.behaviour_logprobs) == (
                filed.sampled.behaviour_logprobs if has_logprobs else []
            )
            assert sample.version_spans == []
            assert [batch.images[name] for name in batch.image_hashes(sample)] == [filed.screenshot]
        assert [(d.subject, d.reason) for d in store.decisions() if d.used] == [
            (group, "pool"),
            *((f"{group}-{i:02d}", "mixed") for i in range(4)),
            ("xa", "pool"),
        ]
        assert [(s.batch_id, s.reason) for s in store.sample_rows("xa")] == [(1, "pool")] * 2
        assert [member.used for member in store.pool()] == [1]
        assert_sums_are_conserved(ledger, store)


@pytest.mark.parametrize("normalise", ["trajectories", "samples"])
def test_a_member_of_the_pool_in_two_groups_of_a_batch_counts_in_each(
    tmp_path: Path, normalise: Normalise
) -> None:
    """So the batch's net advantage stays 0, and the divisor counts every compared trajectory."""
    config = one_task(tmp_path / "run", **POOL, groups_per_batch=2)
    with open_store(config.run.dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store)
        groups = [play_group(ledger, FAILED), play_group(ledger, FAILED)]
        batch = a_batch(next_batch(ledger, 0))
        rows = store.batch_rows(1)
    joined = [sample.group_id for sample in batch.samples if sample.trajectory_id == "xa"]
    assert joined == [groups[0]] * 2 + [groups[1]] * 2
    assert [row.group_id for row in rows] == [sample.group_id for sample in batch.samples]
    shares = batch_loss_weights(batch, normalise)
    assert shares.divisor == {"trajectories": 10, "samples": 20}[normalise]
    net = sum(
        shares.of(trajectory_of(sample), 3) * 3 * sample.advantage for sample in batch.samples
    )
    assert net / shares.divisor == pytest.approx(0, abs=1e-12)


def test_the_pool_counts_neither_as_success_nor_as_fresh_tokens(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        file_member(store, config, steps=4)
        ledger = make_ledger(config, store)
        play_group(ledger, FAILED, version=3)
        train(ledger, 5)
        assert ledger.progress.all.passed == 0
        assert ledger.progress.mean_success() == 0.0
        assert store.staleness() == {2: 4 * 2 * 3}
        metrics = ledger.progress.metrics()
        assert metrics["reward"] == 0.0
        assert metrics["pool_tokens"] == pytest.approx(4 / (4 * 2 + 4))
        assert store.success_curve()[0].passed == 0


def test_a_success_of_the_run_joins_when_its_group_is_done_with_and_is_drawn_however_old(
    tmp_path: Path,
) -> None:
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        mixed = play_group(ledger, ["fail", "fail", "pass", "fail"], version=0)
        assert play_group(ledger, FAILED, version=0)  # nothing to draw yet
        assert [g.reason for g in store.groups("dropped")] == ["all_fail"]
        train(ledger, 0)
        [member] = store.pool()
        assert (member.trajectory_id, member.source, member.has_logprobs) == (
            f"{mixed}-02",
            "online",
            True,
        )
        assert member.origin == f"{store.run().id}/{mixed}-02"
        far = config.data.max_staleness + 90
        play_group(ledger, FAILED, version=far)
        batch = a_batch(next_batch(ledger, far))
        drawn = [each for each in batch.samples if each.trajectory_id == member.trajectory_id]
        assert [each.version_spans for each in drawn] == [[], []]
        assert [list(each.behaviour_logprobs) for each in drawn] == [
            step_record(member.trajectory_id, step).sampled.behaviour_logprobs for step in range(2)
        ]
        assert store.trajectory(member.trajectory_id).batch_id == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("played", "reason"),
    [
        (FAILED, None),
        (PASSED, "all_success"),
        (["fail", *["invalid"] * 7], "single_member"),
        (["fail", "fail", "fail", *["invalid"] * 5], "all_fail"),  # 1 of 4 is above 0.2
        (["invalid"] * 8, "no_valid_member"),
    ],
)
def test_only_a_large_enough_group_that_failed_gets_a_member(
    tmp_path: Path, played: list[Outcome], reason: str | None
) -> None:
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store)
        for outcome in played:
            play(ledger, 0, outcome)
        [group] = store.groups()
        assert (group.pool_member is not None) == (reason is None)
        assert (group.state, group.reason) == (("dropped", reason) if reason else ("ready", ""))
        assert_sums_are_conserved(ledger, store)


@pytest.mark.parametrize("changes", [{"task_id": "mini/other"}, None])
def test_without_a_success_of_its_own_task_a_failed_group_is_dropped(
    tmp_path: Path, changes: dict[str, object] | None
) -> None:
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        if changes:
            file_member(store, config, **changes)
        ledger = make_ledger(config, store)
        play_group(ledger, FAILED)
        assert [group.reason for group in store.groups("dropped")] == ["all_fail"]


def test_without_a_pool_no_success_of_the_run_joins_it(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", pool_ratio=0.0)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, PASSED)
        assert store.pool(evicted=True) == []


def test_which_success_joins_is_drawn_for_each_group(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", **POOL, max_open_groups=40)
    with open_store(config.run.dir) as store:
        for name in ("xa", "xb", "xc"):
            file_member(store, config, name)
        ledger = make_ledger(config, store)
        for _ in range(30):
            play_group(ledger, FAILED)
            train(ledger, 0)
        assert {group.pool_member for group in store.groups()} == {"xa", "xb", "xc"}
        assert sum(member.used for member in store.pool()) == 30


def test_a_restart_between_draw_and_batch_changes_nothing(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", **POOL, high_entropy=0.5)
    with open_store(config.run.dir) as store:
        for name in ("xa", "xb"):
            file_member(store, config, name)
        ledger = make_ledger(config, store)
        play_group(ledger, FAILED)
        store.commit()
        before = picture_of(ledger)
        again = make_ledger(config, store)
        assert picture_of(again) == before
        served = a_batch(next_batch(again, 0))
        assert a_batch(next_batch(ledger_of(config, store), 0)) == served


def ledger_of(config: Config, store: Store) -> Ledger:
    """As a data process that starts now has it."""
    store.commit()
    return make_ledger(config, store)


def test_a_member_that_is_evicted_after_its_draw_is_still_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PER_TASK", 1)
    config = one_task(tmp_path / "run", **POOL, max_open_groups=8)
    with open_store(config.run.dir) as store:
        file_member(store, config, source="online")
        ledger = make_ledger(config, store)
        failed = play_group(ledger, FAILED)
        passed = play_group(ledger, PASSED)
        assert [row.trajectory_id for row in store.pool()] == [f"{passed}-03"]
        while ledger.make_room(3):
            pass
        ledger = ledger_of(config, store)
        batch = a_batch(next_batch(ledger, 0))
        assert batch.group_ids == [failed]
        drawn = [each for each in batch.samples if each.trajectory_id == "xa"]
        assert len(drawn) == 2
        assert all(batch.image_hashes(each)[-1] in batch.images for each in drawn)


def test_screenshots_of_the_pool_are_never_removed_for_room(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", **POOL)
    train_config = config.train.model_copy(update={"checkpoint_every": 1})
    config = config.model_copy(update={"train": train_config})
    with open_store(config.run.dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store)
        for version in range(8):
            play_group(ledger, MIXED, version=version)
            train(ledger, version)
        while ledger.make_room(5):
            pass
        members = [row.trajectory_id for row in store.pool()]
        assert len(members) == 1 + 8 * 2
        for name in members:
            shown = [step.screenshot for step in store.steps(name)]
            assert len(store.screenshots(shown)) == 2
        assert store.screenshots(step.screenshot for step in store.steps("g000001-01")) == {}


def test_of_a_task_the_newest_successes_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PER_TASK", 3)
    config = one_task(tmp_path / "run", **POOL)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        groups = [play_group(ledger, PASSED) for _ in range(2)]
        assert [row.trajectory_id for row in store.pool()] == [
            f"{groups[1]}-{i:02d}" for i in (1, 2, 3)
        ]
        assert len(store.pool(evicted=True)) == 8
        monkeypatch.setattr(pool, "PER_TASK", 1)
        ledger_of(config, store)
        assert [row.trajectory_id for row in store.pool()] == [f"{groups[1]}-03"]


def test_steps_of_low_entropy_are_left_out_with_the_reason_and_again_after_a_restart(
    tmp_path: Path,
) -> None:
    config = one_task(tmp_path / "run", high_entropy=0.5)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, MIXED, steps=5)
        ledger = ledger_of(config, store)
        batch = a_batch(next_batch(ledger, 0))
        rows = store.batch_rows(1)
        means = [
            float(np.mean(step_record(r.trajectory_id, r.step).sampled.entropies)) for r in rows
        ]
        assert len(rows) == 4 * 5
        assert [row.entropy for row in rows] == pytest.approx(means)
        threshold = np.sort(means)[10]  # the 10th largest of 20
        for row, mean in zip(rows, means, strict=True):
            is_kept = mean >= threshold - 1e-12
            assert (row.weight, row.reason) == ((1.0, "mixed") if is_kept else (0.0, "low_entropy"))
        kept = [(row.trajectory_id, row.step) for row in rows if row.weight]
        assert [(s.trajectory_id, s.step) for s in batch.samples] == kept
        assert set(batch.images) == {n for s in batch.samples for n in batch.image_hashes(s)}
        assert a_batch(next_batch(ledger_of(config, store), 0)) == batch
        ledger.batch_trained(batch_trained(1))
        assert ledger.progress.metrics()["steps_left_out"] == pytest.approx(1 - len(kept) / 20)
        weights = {d.subject: d.weight for d in store.decisions()}
        for name in {row.trajectory_id for row in rows}:
            assert weights[name] == sum(of == name for of, _ in kept) / 5
