"""What is played next: bounds, seeds, and decisions that can be repeated."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import TaskError
from bus.messages import LeaseRequest
from dart_cli.algo.task_sampling import TaskEstimate
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.groups import Attempt, Group, GroupTable
from dart_cli.data.progress import TaskProgress
from dart_cli.data.replays import Replays
from dart_cli.data.scheduler import (
    NewGroup,
    NotYet,
    Scheduler,
    Situation,
    groups_in_time,
    make_scheduler,
    sampling_seed,
    task_seed,
)
from envs.contract.base import Task

TASKS = [Task(f"t/{name}", "t", "do it", 5) for name in ("easy", "half", "hard")]


def make(seed: int = 0, **data: object) -> Scheduler:
    settings = {"groups_per_batch": 2, "group_size": 2, "max_open_groups": 3, **data}
    config = Config.model_validate({"run": {"seed": seed}, "env": {"suite": "t"}, "data": settings})
    return make_scheduler(config, TASKS)


def ask(
    scheduler: Scheduler,
    group_table: GroupTable,
    slot: int = 99,
    success: Mapping[str, float] | None = None,
    **seen: Any,
) -> Group | NewGroup | NotYet:
    """The reason that a slot gets."""
    request = LeaseRequest(worker="env-0", slot=slot, suites=["t"])
    return scheduler.next(Situation(group_table, by_success(success or {}), **seen), request)


def by_success(rates: Mapping[str, float]) -> dict[str, TaskEstimate]:
    return {task_id: TaskEstimate(rate * (1 - rate)) for task_id, rate in rates.items()}


def a_group(number: int, size: int = 2, attempts: int = 0) -> Group:
    group = Group(f"g{number}", number, "t", "t/half", 0, size, 9, 2 * size)
    for index in range(attempts):
        group.attempts[str(index)] = Attempt(str(index), index, "env-0", index, 0, 0.0)
    return group


def a_board(*groups: Group) -> GroupTable:
    return GroupTable({group.id: group for group in groups}, opened=len(groups))


def test_a_free_slot_fills_the_oldest_group_that_wants_members() -> None:
    group_table = a_board(a_group(1, attempts=2), a_group(2, attempts=1), a_group(3))
    assert ask(make(), group_table) is group_table.groups["g2"]


def test_full_groups_hold_no_slot_back() -> None:
    found = ask(make(), a_board(a_group(1, attempts=2)))
    assert isinstance(found, NewGroup)


def test_no_group_is_opened_beyond_the_bound() -> None:
    group_table = a_board(*(a_group(n, attempts=2) for n in (1, 2, 3)))
    found = ask(make(max_open_groups=3), group_table)
    assert isinstance(found, NotYet)
    assert "max_open_groups = 3" in found.reason


def test_a_worker_of_another_suite_gets_an_error() -> None:
    with pytest.raises(TaskError, match="the run plays t, this worker only mini"):
        make().next(Situation(GroupTable()), LeaseRequest(worker="e", slot=0, suites=["mini"]))


@pytest.mark.parametrize("scheduling", ["rollout", "batch", "april", "oversample"])
def test_in_the_trainers_turn_nothing_is_leased_and_the_wait_has_a_reason(
    scheduling: str,
) -> None:
    scheduler = make(scheduling=scheduling)
    for group_table in (GroupTable(), a_board(a_group(1, attempts=1))):
        assert ask(scheduler, group_table, turn="batch 3 is trained") == NotYet(
            "batch 3 is trained"
        )


# --- batch-wise and April -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "most"),
    [
        ({"scheduling": "batch", "groups_per_batch": 3}, 3),
        ({"scheduling": "april", "groups_per_batch": 4}, 8),
        ({"scheduling": "oversample", "groups_per_batch": 3}, 6),
        ({"scheduling": "april", "groups_per_batch": 4, "max_staleness": 0}, 4),
        ({"scheduling": "batch", "groups_per_batch": 3, "max_open_groups": 2}, 2),
        ({"scheduling": "rollout", "groups_per_batch": 3, "max_staleness": 2}, 9),
    ],
)
def test_so_many_groups_are_opened_and_no_more(data: dict[str, Any], most: int) -> None:
    scheduler, group_table = make(**{"max_open_groups": 0, **data}), GroupTable()
    assert scheduler.limit(Situation(group_table)) == most
    for number in range(1, most + 1):
        assert isinstance(ask(scheduler, group_table), NewGroup)
        group_table.add(a_group(number, attempts=2))
    found = ask(scheduler, group_table)
    assert isinstance(found, NotYet)
    assert not found.one_slot
    assert found.reason.startswith(f"{most} groups play and 0 wait for the trainer; ")


# --- admission ------------------------------------------------------------------------------


def staleness_when_trained(
    before: int, *, groups_per_batch: int, publish_every: int, untrained: int, updates: int
) -> int:
    """Versions published until the group with `before` others before it is trained, by counting."""
    published = 0
    batches = [None] * untrained + [None] * (before // groups_per_batch)
    for update in range(updates + 1, updates + 1 + len(batches)):
        published += update % publish_every == 0
    return published


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_the_limit_is_the_most_groups_that_are_trained_in_time(
    groups_per_batch: int,
    max_staleness: int,
    publish_every: int,
    untrained: int,
    updates: int,
    lag: int,
) -> None:
    limit = groups_in_time(
        groups_per_batch=groups_per_batch,
        max_staleness=max_staleness,
        publish_every=publish_every,
        untrained=untrained,
        unpublished=updates % publish_every,
        lag=lag,
    )
    for before in range(groups_per_batch * publish_every * (max_staleness + 2)):
        staleness = lag + staleness_when_trained(
            before,
            groups_per_batch=groups_per_batch,
            publish_every=publish_every,
            untrained=untrained,
            updates=updates,
        )
        assert (staleness <= max_staleness) == (before < limit)
    if lag <= max_staleness and not untrained:
        assert limit >= groups_per_batch  # the next batch can always be filled


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2),
)
def test_groups_opened_within_the_limit_and_trained_in_order_are_never_stale(
    seed: int,
    groups_per_batch: int,
    max_staleness: int,
    publish_every: int,
    is_eager: bool,
    reuse: int,
) -> None:
    draws = random.Random(seed)
    replays = Replays(reuse)
    version = updates = untrained = 0
    lag = 0
    oldest: deque[int] = deque()  # of each live group, in the order of opening
    for _ in range(300):
        event = draws.random()
        if event < 0.2:
            lag = draws.randint(0, min(version, max_staleness))
        limit = groups_in_time(
            groups_per_batch=groups_per_batch,
            max_staleness=max_staleness,
            publish_every=publish_every,
            untrained=untrained,
            owed=replays.owed,
            reuse=reuse,
            unpublished=updates % publish_every,
            lag=lag,
        )
        if event < 0.7 or is_eager:
            while len(oldest) < limit:
                oldest.append(version - lag)
                if not is_eager:
                    break
        use = None if untrained else replays.due()
        if use is not None:
            replays.note_filed(updates + 1, use.first, use.reused + 1)
            untrained = 1
        elif not untrained and len(oldest) >= groups_per_batch:
            replays.note_filed(updates + 1, None, 0)
            batch = [oldest.popleft() for _ in range(groups_per_batch)]
            assert version - min(batch) <= max_staleness
            untrained = 1
        elif untrained and event > 0.5:
            untrained, updates = 0, updates + 1
            version += updates % publish_every == 0
    assert updates > 10


# --- which task -----------------------------------------------------------------------------


def choices(scheduler: Scheduler, success: Mapping[str, float], rounds: int) -> list[str]:
    group_table, chosen = GroupTable(), []
    for _ in range(rounds):
        found = ask(scheduler, group_table, success=success)
        assert isinstance(found, NewGroup)
        chosen.append(found.task.id)
        group_table.opened += 1
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


def test_deviation_plays_them_as_often_as_their_rewards_deviate() -> None:
    success = {"t/easy": 0.9, "t/half": 0.5, "t/hard": 0.0}
    counts = Counter(choices(make(task_sampling="deviation"), success, 4000))
    wanted = {"t/easy": 0.35, "t/half": 0.55, "t/hard": 0.05}
    assert {name: count / 4000 for name, count in counts.items()} == pytest.approx(
        {name: weight / 0.95 for name, weight in wanted.items()}, abs=0.03
    )


def test_deviation_knows_an_unknown_task_as_one_of_the_greatest() -> None:
    scheduler = make(task_sampling="deviation")
    found = scheduler.probabilities({"t/easy": TaskEstimate(0.0), "t/half": TaskEstimate(0.04)})
    assert list(found.values()) == pytest.approx([0.05 / 0.85, 0.25 / 0.85, 0.55 / 0.85])


def test_uniform_plays_all_tasks_alike() -> None:
    counts = Counter(choices(make(task_sampling="uniform"), {"t/hard": 0.0}, 600))
    assert min(counts.values()) > 150


def test_training_seeds_differ_and_stay_below_the_held_out_ones() -> None:
    seeds = [task_seed(3, number) for number in range(1, 20_000)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < TRAIN_SEEDS


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
    assert group.vacancies(early_stop=True) == 2
    group.attempts = a_group(1, size=4, attempts=2).attempts
    assert group.vacancies(early_stop=True) == 0
    assert not group.is_over(early_stop=True)
    finish(group, True, True)
    assert group.is_over(early_stop=True)
    assert not group.is_over(early_stop=False)


def test_early_stop_plays_the_whole_group_once_one_failed() -> None:
    group = a_group(1, size=4, attempts=2)
    finish(group, False)
    assert group.vacancies(early_stop=True) == 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_success_while_training_is_that_of_the_policy(early_stop: bool) -> None:
    """Over instances that differ in difficulty, with episodes that end in any order or are invalid."""
    draw = random.Random(0)
    counted = TaskProgress()
    everything: list[bool] = []
    chances: list[float] = []
    for number in range(3000):
        chances.append(draw.choice([0.3, 0.8, 0.97, 1.0]))
        group = a_group(number, size=draw.choice([3, 4, 8]))
        play_by_chance(group, chances[-1], early_stop, draw, counted)
        everything += [attempt.outcome == "pass" for attempt in group.finished]
    true = sum(chances) / len(chances)
    played = sum(counted.counters.passed) / counted.counted
    assert played == pytest.approx(true, abs=0.02)  # 3 standard errors
    naive = sum(everything) / len(everything)
    assert (naive < true - 0.03) == early_stop  # what a mean over all of them would say


def play_by_chance(
    group: Group, chance: float, early_stop: bool, draw: random.Random, counted: TaskProgress
) -> None:
    """Play a group to its end in four slots; each episode passes by `chance`, one in ten is invalid."""
    while not group.is_over(early_stop):
        while len(group.live) < 4 and group.vacancies(early_stop):
            number = len(group.attempts)
            group.attempts[str(number)] = Attempt(str(number), number, "env-0", number, 0, 0.0)
        ended = draw.choice(group.live)
        if draw.random() < 0.1:
            ended.state = "dropped"
        else:
            ended.state = "finished"
            ended.outcome = "pass" if draw.random() < chance else "fail"
        for member in group.uncounted(early_stop):
            member.is_counted = True
            counted.count(member.outcome == "pass", 0)


def test_a_lost_attempt_is_replaced_but_not_for_ever() -> None:
    group = a_group(1, size=2, attempts=2)
    finish(group, True, None)
    assert group.vacancies(early_stop=False) == 1
    group.attempts = a_group(1, size=2, attempts=4).attempts
    finish(group, True, None, None, None)
    assert group.is_over(early_stop=False)
