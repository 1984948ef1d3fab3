"""What is played next: bounds, seeds, and decisions that can be repeated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bus.errors import TaskError
from bus.messages import LeaseRequest
from dart_cli.config import Config
from dart_cli.data.groups import Attempt, Board, Group
from dart_cli.data.scheduler import (
    NewGroup,
    Scheduler,
    Situation,
    Success,
    Wait,
    make_scheduler,
    sampling_seed,
    task_seed,
    training_tasks,
)
from envs.base import Task

TASKS = [Task(f"t/{name}", "t", "do it", 5) for name in ("easy", "half", "hard")]


def make(seed: int = 0, **data: object) -> Scheduler:
    settings = {"groups_per_batch": 2, "group_size": 2, "max_open_groups": 3, **data}
    config = Config.model_validate({"run": {"seed": seed}, "env": {"suite": "t"}, "data": settings})
    return make_scheduler(config, TASKS)


def ask(
    scheduler: Scheduler, board: Board, slot: int = 99, success: Success | None = None, **seen: Any
) -> Group | NewGroup | Wait:
    """What a slot is told."""
    request = LeaseRequest(worker="env-0", slot=slot, suites=["t"])
    return scheduler.next(Situation(board, success or {}, **seen), request)


def a_group(number: int, size: int = 2, attempts: int = 0) -> Group:
    group = Group(f"g{number}", number, "t", "t/half", 0, size)
    for index in range(attempts):
        group.attempts[str(index)] = Attempt(str(index), index, "env-0", index, 0, 0.0)
    return group


def a_board(*groups: Group) -> Board:
    return Board({group.id: group for group in groups}, opened=len(groups))


def test_a_free_slot_fills_the_oldest_group_that_wants_members() -> None:
    board = a_board(a_group(1, attempts=2), a_group(2, attempts=1), a_group(3))
    assert ask(make(), board) is board.groups["g2"]


def test_full_groups_hold_no_slot_back() -> None:
    found = ask(make(), a_board(a_group(1, attempts=2)))
    assert isinstance(found, NewGroup)


def test_no_group_is_opened_beyond_the_bound() -> None:
    board = a_board(*(a_group(n, attempts=2) for n in (1, 2, 3)))
    found = ask(make(max_open_groups=3), board)
    assert isinstance(found, Wait)
    assert "max_open_groups = 3" in found.reason


def test_a_worker_of_another_suite_is_told_so() -> None:
    with pytest.raises(TaskError, match="the run plays t, this worker only mini"):
        make().next(Situation(Board(), {}), LeaseRequest(worker="e", slot=0, suites=["mini"]))


def choices(scheduler: Scheduler, success: Success, rounds: int) -> list[str]:
    board, chosen = Board(), []
    for _ in range(rounds):
        found = ask(scheduler, board, success=success)
        assert isinstance(found, NewGroup)
        chosen.append(found.task.id)
        board.opened += 1
    return chosen


def test_the_same_seed_and_history_choose_the_same_tasks() -> None:
    success = {"t/easy": 0.9, "t/half": 0.5, "t/hard": 0.0}
    assert choices(make(seed=5), success, 50) == choices(make(seed=5), success, 50)
    assert choices(make(seed=5), success, 50) != choices(make(seed=6), success, 50)


def test_frontier_plays_half_successful_tasks_most_and_forgets_none() -> None:
    success = {"t/easy": 0.95, "t/half": 0.5, "t/hard": 0.0}
    counts = Counter(choices(make(), success, 600))
    assert counts["t/half"] > 3 * counts["t/easy"]
    assert min(counts.values()) > 10


def test_uniform_plays_all_tasks_alike() -> None:
    counts = Counter(choices(make(task_sampling="uniform"), {"t/hard": 0.0}, 600))
    assert min(counts.values()) > 150


def test_training_seeds_differ_and_stay_below_the_held_out_ones() -> None:
    seeds = [task_seed(3, number) for number in range(1, 20_000)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < Config().eval.seed


def test_every_attempt_samples_with_a_seed_of_its_own() -> None:
    seeds = {sampling_seed(0, group, attempt) for group in range(50) for attempt in range(8)}
    assert len(seeds) == 400
    assert sampling_seed(1, 2, 3) == sampling_seed(1, 2, 3) != sampling_seed(2, 2, 3)


def test_the_run_trains_on_the_tasks_it_names_else_on_the_training_split() -> None:
    everything = training_tasks(Config())
    assert everything
    assert {task.split for task in everything} == {"train"}
    named = Config.model_validate({"env": {"tasks": [everything[-1].id]}})
    assert training_tasks(named) == everything[-1:]


# --- groups ---------------------------------------------------------------------------------


def finish(group: Group, *passed: bool | None) -> None:
    """End the attempts in order; None is an invalid one."""
    for attempt, verdict in zip(group.attempts.values(), passed, strict=False):
        attempt.state = "dropped" if verdict is None else "finished"
        attempt.outcome = None if verdict is None else ("pass" if verdict else "fail")


def test_early_stop_plays_half_and_stops_when_all_of_it_passed() -> None:
    group = a_group(1, size=4)
    assert group.wanted(early_stop=True) == 2
    group.attempts = a_group(1, size=4, attempts=2).attempts
    assert group.wanted(early_stop=True) == 0
    assert not group.over(early_stop=True)
    finish(group, True, True)
    assert group.over(early_stop=True)
    assert not group.over(early_stop=False)


def test_early_stop_plays_the_whole_group_once_one_failed() -> None:
    group = a_group(1, size=4, attempts=2)
    finish(group, False)
    assert group.wanted(early_stop=True) == 2


def test_a_lost_attempt_is_replaced_but_not_for_ever() -> None:
    group = a_group(1, size=2, attempts=2)
    finish(group, True, None)
    assert group.wanted(early_stop=False) == 1
    group.attempts = a_group(1, size=2, attempts=4).attempts
    finish(group, True, None, None, None)
    assert group.over(early_stop=False)
