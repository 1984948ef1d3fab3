"""Sizes and step limits of new groups follow from how their task fares."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data import leasing
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    PASSED,
    a_batch,
    ask_lease,
    file_member,
    make_ledger,
    next_batch,
    one_task,
    play,
    play_group,
    task_of,
)


def ledger_of(config: Config, store: Store) -> Ledger:
    """As a data process that starts now has it."""
    store.commit()
    return make_ledger(config, store)


def test_a_solved_task_gets_smaller_groups_once_a_whole_group_passed(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", dynamic_number=True, group_size=8)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(7):
            play(ledger, 0, "pass")
            assert ledger.leasing.next_size(task_of(config)) == 8
        play(ledger, 0, "pass")
        assert ledger.leasing.next_size(task_of(config)) == 2
        assert len({play(ledger, 0, "pass").group_id for _ in range(4)}) == 2
        assert [group.size for group in store.groups()] == [8, 2, 2]
        again = ledger_of(config, store)
        assert again.leasing.next_size(task_of(config)) == 2


def test_a_smaller_group_is_trained_on_like_any_other(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", dynamic_number=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, PASSED)
        small = play_group(ledger, ["pass", "fail"])
        batch = a_batch(next_batch(ledger, 0))
        assert batch.group_ids == [small]
        advantages = {sample.trajectory_id: sample.advantage for sample in batch.samples}
        assert list(advantages.values()) == pytest.approx([1.0, -1.0], rel=1e-5)


def test_early_stop_never_stops_at_one_trajectory(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", group_size=2, early_stop=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ["pass", "fail"])
        assert [group.state for group in store.groups()] == ["ready"]


def test_a_tasks_limit_is_its_longest_success_and_slack(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", dynamic_length=True)
    limit = training_tasks(config)[0].max_steps
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        group = play_group(ledger, ["fail", "pass", "fail", "pass"], steps=1)
        assert [row.max_steps for row in store.trajectories()] == [limit] * 4
        lease = ask_lease(ledger, 0)
        assert lease.max_steps == min(limit, 3)
        assert ledger.leasing.step_limit(task_of(config)) == min(limit, 3)
        longer = play(ledger, 1, "pass", steps=2)
        assert (longer.group_id, longer.max_steps) == (lease.group_id, lease.max_steps)
        assert ledger.leasing.step_limit(task_of(config)) == min(limit, 4)
        again = ledger_of(config, store)
        assert ask_lease(again, 0) == lease  # of the same group: the same limit
        assert again.leasing.step_limit(task_of(config)) == min(limit, 4)
        assert group != lease.group_id


def test_a_success_of_the_pool_is_a_success_of_the_task(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", dynamic_length=True)
    with open_store(config.run.dir) as store:
        file_member(store, config, steps=1)
        assert ask_lease(make_ledger(config, store), 0).max_steps == 3


def test_slack_never_goes_beyond_the_tasks_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "LENGTH_SLACK", 99)
    config = one_task(tmp_path / "run", dynamic_length=True)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, PASSED)
        assert ledger.leasing.step_limit(task_of(config)) == training_tasks(config)[0].max_steps
