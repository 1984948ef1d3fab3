"""A slot may ask for a task by its name; a step may bring several images."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import TaskError
from bus.messages import Lease, LeaseRequest
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.queues import LeaseQueue
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_store
from envs.contract.blobs import content_hash
from tests.copies import copy_with
from tests.data.parts import (
    make_ledger,
    next_batch,
    picture,
    play_group,
    small_config,
    step_record,
    trajectory_end,
)


def named(slot: int, task: str, seed: int | None = None) -> LeaseRequest:
    return LeaseRequest(worker="serve-0", slot=slot, suites=["mini"], task=task, task_seed=seed)


def leased(ledger: Ledger, request: LeaseRequest) -> Lease:
    found = ledger.lease(request)
    assert isinstance(found, Lease), found
    return found


@pytest.mark.parametrize("scheduling", ["rollout", "batch"])
def test_a_named_task_joins_its_open_group_or_opens_one(tmp_path: Path, scheduling: str) -> None:
    config = small_config(tmp_path / "run", scheduling=scheduling)
    first, second = (task.id for task in training_tasks(config))
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        one = leased(ledger, named(0, second))
        assert one.task_id == second
        other = leased(ledger, named(1, first))
        assert (other.task_id, other.group_id != one.group_id) == (first, True)
        again = leased(ledger, named(2, second))
        assert (again.group_id, again.task_seed) == (one.group_id, one.task_seed)


def test_a_seed_that_is_named_is_that_of_its_group(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    task = training_tasks(config)[0].id
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        five = leased(ledger, named(0, task, 5))
        six = leased(ledger, named(1, task, 6))
        any_seed = leased(ledger, named(2, task))
        assert (five.task_seed, six.task_seed) == (5, 6)
        assert five.group_id != six.group_id
        assert any_seed.group_id == five.group_id, "the oldest open group of the task"


@pytest.mark.parametrize(
    ("task", "seed", "told"),
    [
        ("mini/clik", None, r"no training task 'mini/clik'.*did you mean"),
        ("", 4, "a seed needs a task"),
        ("mini/click", 2**40, r"must be in env.seeds, \[0, "),
    ],
)
def test_what_the_run_does_not_train_on_is_refused(
    tmp_path: Path, task: str, seed: int | None, told: str
) -> None:
    config = small_config(tmp_path / "run")
    task = training_tasks(config)[0].id if task == "mini/click" else task
    with open_store(config.run.dir) as store, pytest.raises(TaskError, match=told):
        make_ledger(config, store).lease(named(0, task, seed))


def test_named_tasks_open_no_more_groups_than_others(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", max_open_groups=2)
    task = training_tasks(config)[0].id
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for seed in range(2):
            leased(ledger, named(seed, task, seed))
        found = ledger.lease(named(2, task, 2))
        assert isinstance(found, NotYet)
        assert "data.max_open_groups = 2" in found.reason


async def test_a_slot_that_waits_for_a_task_holds_no_other_up(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", max_open_groups=2, groups_per_batch=2)
    first, second = (task.id for task in training_tasks(config))
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        queue = LeaseQueue(ledger)
        full = [leased(ledger, named(slot, first)) for slot in range(4)]
        leased(ledger, named(4, first, 3))
        waits, _ = queue.ask(named(5, second))
        anything, _ = queue.ask(named(6, first, full[0].task_seed))
        assert not waits.answer.done()
        assert not anything.answer.done()
        ledger.end(trajectory_end(full[0].trajectory_id, 0, "invalid"))
        queue.serve()
        assert isinstance(anything.answer.result(), Lease)
        assert not waits.answer.done()
        queue.refuse("over")


def test_a_slot_that_wants_another_task_gives_up_what_it_was_leased(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    first, second = (task.id for task in training_tasks(config))
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        lost = leased(ledger, named(0, first))
        assert leased(ledger, named(0, first)) == lost, "the answer was lost"
        assert leased(ledger, named(0, second)).task_id == second
        row = store.trajectory(lost.trajectory_id)
        assert row is not None
        assert (row.state, row.reason) == ("dropped", "cancelled")


def test_images_that_a_step_brings_are_kept_and_trained_on(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", groups_per_batch=1)
    goal = picture("goal")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        leases = [leased(ledger, named(slot, "")) for slot in range(4)]
        for member, lease in enumerate(leases):
            record = step_record(lease.trajectory_id, 0)
            hashes = [content_hash(goal), *record.image_hashes]
            brought = [] if member == 3 else [goal]
            ledger.step(copy_with(record, image_hashes=hashes, images=brought))
            ledger.end(trajectory_end(lease.trajectory_id, 1, "pass" if member else "fail"))
        batch = next_batch(ledger, 0)
        assert not isinstance(batch, NotYet)
        assert batch.images[content_hash(goal)] == goal
        assert len(batch.samples) == 4


def test_an_image_that_no_step_brought_makes_the_trajectory_invalid(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_group(ledger, ["pass", "fail", "pass", "fail"])
        lease = leased(ledger, named(0, ""))
        record = step_record(lease.trajectory_id, 0)
        hashes = [content_hash(picture("unknown")), *record.image_hashes]
        ledger.step(copy_with(record, image_hashes=hashes))
        ack = ledger.end(trajectory_end(lease.trajectory_id, 1))
        assert "1 prompt images are unknown" in ack.note
