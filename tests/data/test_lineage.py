"""Staleness follows the lineage of the weights: what a killed trainer does again ages nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import WeightsError
from bus.messages import BatchTrained, Lease, LeaseRequest
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import VersionRow
from dart_cli.data.versions import Lineage
from tests.data.parts import (
    MIXED,
    a_batch,
    ask_lease,
    batch_trained,
    heartbeat,
    hello,
    make_ledger,
    next_batch,
    play_group,
    small_config,
)


def row(version: int, updates: int) -> VersionRow:
    return VersionRow(version, f"w{version}", "d", float(version), updates)


KILLED = Lineage([*(row(v, v) for v in range(6)), *(row(6 + n, n) for n in range(7))], 1)
"""v0 to v5 are updates 0 to 5; the trainer was killed and went on from update 0 as v6."""


def test_updates_that_are_done_again_are_as_old_as_they_were() -> None:
    trainer = KILLED.updates(12)
    assert trainer == 6
    assert [KILLED.behind(version, trainer) for version in (1, 5, 7, 11, 12)] == [5, 1, 5, 1, 0]


def test_tokens_that_the_trainer_has_not_reached_again_are_not_behind() -> None:
    assert KILLED.behind(5, KILLED.updates(7)) == 0


def test_no_worker_goes_back_to_weights_that_are_done_again() -> None:
    assert not KILLED.is_ahead(6, 5)
    assert not KILLED.is_ahead(11, 5)
    assert KILLED.is_ahead(12, 5)
    assert KILLED.is_ahead(6, -1)
    assert not KILLED.is_ahead(5, 6)


def test_a_version_that_is_on_its_way_is_as_far_as_its_number_says() -> None:
    lineage = Lineage([row(8, 20)], 2)
    assert [lineage.updates(version) for version in (7, 8, 10)] == [18, 20, 24]
    assert lineage.behind(8, 24) == 2
    assert Lineage([], 2).updates(3) == 6


@given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
def test_without_a_kill_it_is_the_difference_of_the_versions(
    every: int, sampled: int, trainer: int
) -> None:
    lineage = Lineage([row(v, v * every) for v in range(41)], every)
    at = lineage.updates(trainer)
    assert lineage.behind(sampled, at) == max(trainer - sampled, 0)


# --- the ledger -----------------------------------------------------------------------------


def publish(ledger: Ledger, version: int, updates: int, digest: str = "") -> None:
    ledger.weights_published(
        WeightsPublished(
            policy_version=version,
            path=f"w{version}",
            digest=digest or f"d{version}",
            updates=updates,
        )
    )


def config_of(run_dir: Path) -> Config:
    return small_config(run_dir, groups_per_batch=1, max_staleness=4, max_open_groups=0)


def train_one(ledger: Ledger, version: int) -> int:
    batch = a_batch(next_batch(ledger, version))
    publish(ledger, version + 1, batch.batch_id)
    ledger.batch_trained(batch_trained(batch.batch_id, version + 1))
    return batch.batch_id


def test_a_killed_trainer_costs_no_group(tmp_path: Path) -> None:
    with open_store(tmp_path / "run") as store:
        ledger = make_ledger(config_of(tmp_path / "run"), store)
        ledger.hello(hello(0))
        publish(ledger, 0, 0)
        for version in range(5):
            play_group(ledger, MIXED, version=version)
            train_one(ledger, version)
        waiting = [play_group(ledger, MIXED, version=5) for _ in range(2)]
        # Killed before its first checkpoint: all five batches come again.
        assert ledger.hello(hello(0)).policy_version == 5
        publish(ledger, 6, 0)
        for update in range(5):
            assert train_one(ledger, 6 + update) == update + 1
        for updates, group in enumerate(waiting, 5):
            batch = a_batch(next_batch(ledger, 6 + updates))
            assert batch.group_ids == [group]
            assert [(age.version, age.behind) for age in batch.ages] == [(5, updates - 5)]
            train_one(ledger, 6 + updates)
        assert ("dropped", "stale") not in store.count("groups")


def test_a_restarted_data_process_knows_the_lineage(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        ledger.hello(hello(0))
        for version, updates in ((0, 0), (1, 1), (2, 2), (3, 0), (4, 1)):
            publish(ledger, version, updates)
        store.commit()
    with open_store(config.run.dir) as store:
        again = make_ledger(config, store)
        assert [again.lineage.updates(version) for version in (2, 4)] == [2, 1]
        assert again.hello(hello(0)).policy_version == 4


def test_a_version_that_has_other_weights_than_before_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "run") as store:
        ledger = make_ledger(config_of(tmp_path / "run"), store)
        publish(ledger, 0, 0)
        publish(ledger, 1, 1)
        with pytest.raises(WeightsError, match="v1 was published before with other weights"):
            publish(ledger, 1, 1, "other")
        assert ledger.weights is not None
        assert ledger.weights.digest == "d1"


@pytest.mark.parametrize(("serves", "leases"), [(9, True), (10, False)])
def test_while_updates_are_done_again_only_workers_with_fresh_weights_play(
    tmp_path: Path, serves: int, leases: bool
) -> None:
    with open_store(tmp_path / "run") as store:
        ledger = make_ledger(config_of(tmp_path / "run"), store)
        ledger.hello(hello(0))
        publish(ledger, 0, 0)
        for version in range(9):
            play_group(ledger, MIXED, version=version)
            train_one(ledger, version)
        ask_lease(ledger, 0)
        ledger.hello(hello(0))
        publish(ledger, 10, 0)
        ledger.versions.observe(heartbeat("rollout-0", serves), is_new=True)
        found = ledger.lease(LeaseRequest(worker="env-0", slot=1, suites=["mini"]))
        assert isinstance(found, Lease) == leases
        for update in range(9):
            train_one(ledger, 10 + update)
        ledger.versions.observe(heartbeat("rollout-0", 19), is_new=False)
        assert ask_lease(ledger, 2)


def test_an_acknowledgement_of_a_redone_update_drops_nothing_that_is_ahead(tmp_path: Path) -> None:
    with open_store(tmp_path / "run") as store:
        ledger = make_ledger(config_of(tmp_path / "run"), store)
        ledger.hello(hello(0))
        publish(ledger, 0, 0)
        for version in range(5):
            play_group(ledger, MIXED, version=version)
            train_one(ledger, version)
        ahead = play_group(ledger, MIXED, version=5)
        ledger.hello(hello(0))
        publish(ledger, 6, 0)
        ledger.batch_trained(BatchTrained(batch_id=1, policy_version=6, metrics={}))
        assert ahead in ledger.group_table.groups
