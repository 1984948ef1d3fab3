"""What the policy itself played: counted over any groups and restarts, and reported by a live run."""

from __future__ import annotations

import logging

import pytest

from bus.messages import Outcome
from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.data import progress, service, stalls
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.copies import copy_with
from tests.data.client import Client, serving
from tests.data.parts import (
    FAILED,
    MIXED,
    PASSED,
    Clock,
    batch_trained,
    file_member,
    make_ledger,
    one_task,
    play_group,
    step_record,
    task_of,
    train,
    trajectory_end,
)

UPDATES = 3
"""Without a success, after which these tests' runs are reported."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a success, and malformed actions, are reported after few trajectories."""
    monkeypatch.setattr(stalls, "FAILED_UPDATES", UPDATES)
    monkeypatch.setattr(stalls, "FAILED_TRAJECTORIES", 4 * UPDATES)
    monkeypatch.setattr(progress, "COMPLETIONS", 8)
    monkeypatch.setattr(service, "STALL_LOOK_S", 0.05)
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr(service, "SNAPSHOT_S", 0.0)


def pooled(config: Config) -> Config:
    """One success of the pool joins each group that failed."""
    return one_task(config.run.dir, pool_ratio=0.25)


def told(seen: Snapshot) -> dict[str, str]:
    """What is reported of learning, by kind."""
    return {each.kind: each.text for each in seen.stalls if each.kind in ("success", "actions")}


async def fail_group(client: Client, version: int, *, malformed: bool) -> None:
    """Four failing trajectories of two steps."""
    for slot in range(4):
        lease = await client.must_lease(slot)
        for step in range(2):
            record = step_record(lease.trajectory_id, step, version=version)
            if malformed:
                record = copy_with(record, action=None, error="no call", text="grey)")
            assert (await client.tell(record)).accepted
        await client.tell(trajectory_end(lease.trajectory_id, 2, "fail"))


@pytest.mark.usefixtures("soon")
async def test_a_run_whose_batches_hold_only_the_pools_successes_says_that_it_learns_nothing(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = pooled(config)
    with open_store(config.run.dir) as store:
        file_member(store, config)
    with caplog.at_level(logging.WARNING):
        async with serving(config) as client:
            await client.greet(0)
            for version in range(UPDATES):
                assert told(await client.snapshot()) == {}
                await fail_group(client, version, malformed=version == UPDATES - 1)
                batch = await client.must_batch(version)
                assert any(sample.advantage > 0 for sample in batch.samples)  # the pool's
                assert (await client.tell(batch_trained(batch.batch_id, version + 1))).accepted
            seen = await client.eventually(lambda seen: len(told(seen)) == 2)
            await client.eventually(lambda _: "none of the last" in caplog.text)
    success, actions = told(seen)["success"], told(seen)["actions"]
    assert f"none of the last 12 trajectories of the policy passed, over {UPDATES}" in success
    assert "100% of the policy's last 8 completions are no action, 0% of its first 8" in actions
    assert "dart tune" in success


@pytest.mark.usefixtures("soon")
def test_one_success_of_the_policy_begins_the_count_anew(config: Config, clock: Clock) -> None:
    config = one_task(config.run.dir)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, clock)
        for version in range(UPDATES):
            play(ledger, clock, MIXED, version)
            train(ledger, version)
        own = ledger.progress.own.view(ledger.updates)
        assert (own.passed, own.failed_since, own.updates_since) == (2 * UPDATES, 0, 1)
        again = counted_again(config, store, clock)
    assert again == own


@pytest.mark.usefixtures("soon")
def test_members_of_the_pool_count_neither_at_once_nor_after_a_restart(
    config: Config, clock: Clock
) -> None:
    config = pooled(config)
    with open_store(config.run.dir) as store:
        file_member(store, config)
        ledger = make_ledger(config, store, clock)
        for version in range(UPDATES):
            play(ledger, clock, FAILED, version)
            assert ledger.pool.members(task_of(config))
            train(ledger, version)
        own = ledger.progress.own.view(ledger.updates)
        assert (own.passed, own.failed_since, own.updates_since) == (0, 4 * UPDATES, UPDATES)
        assert own.completions == 2 * 4 * UPDATES
        assert counted_again(config, store, clock) == own


def test_the_windows_hold_the_first_and_the_newest() -> None:
    own = progress.OwnPlay()
    for number in range(3 * progress.COMPLETIONS):
        own.completion(number >= 2 * progress.COMPLETIONS)
    for number in range(2 * progress.REWARDS):
        own.trajectory(False, 0.25 if number < progress.REWARDS else 0.75, number)
    seen = own.view(9)
    assert (seen.malformed_first, seen.malformed) == (0.0, 1.0)
    assert (seen.reward_first, seen.reward) == (0.25, 0.75)
    assert seen.completions == 3 * progress.COMPLETIONS


def test_a_store_with_more_than_two_windows_gives_the_same_counts(
    config: Config, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "COMPLETIONS", 6)
    monkeypatch.setattr(progress, "REWARDS", 4)
    ledger = make_ledger(config, store, clock)
    rounds: list[list[Outcome]] = [FAILED, MIXED, PASSED, FAILED]
    for version, outcomes in enumerate(rounds):
        play(ledger, clock, outcomes, version)
    own = ledger.progress.own.view(0)
    assert (own.reward_first, own.reward) == (0.0, 0.0)
    assert (own.passed, own.failed_since) == (6, 4)
    assert counted_again(config, store, clock) == own


def play(ledger: Ledger, clock: Clock, outcomes: list[Outcome], version: int) -> None:
    """One group of two steps each, a moment after what was before."""
    clock.now += 1
    play_group(ledger, outcomes, version=version)
    clock.now += 1


def counted_again(config: Config, store: Store, clock: Clock) -> progress.OwnView:
    """What another start reads from the store."""
    store.commit()
    again = make_ledger(config, store, clock)
    return again.progress.own.view(again.updates)
