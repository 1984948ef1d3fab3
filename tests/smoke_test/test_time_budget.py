"""A smoke test fits its time: measured costs decide what it reduces, in a fixed order."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from dart_cli.config.schema import Config
from dart_cli.policy.loader import load_policy
from dart_cli.smoke_test.pass_timer import PassTimer
from dart_cli.smoke_test.time_budget import Costs, RunSize, TimeBudget, choose_size, run_sizes

WRITTEN: dict[str, dict[str, Any]] = {
    "policy": {"history_images": 5, "history_turns": 35},
    "rollout": {"engine": "vllm"},
    "env": {"slots": 2, "options": {"size": "1920x1080", "slow": 1}},
    "data": {"group_size": 2, "groups_per_batch": 2},
    "train": {"ranks": 2},
    "up": {"envs": 2, "rollouts": 2},
}


def config_of(**sections: dict[str, Any]) -> Config:
    given = {**WRITTEN}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return Config.model_validate(given)


def test_screens_are_dropped_first_and_processes_last_each_level_leaves_out_more() -> None:
    result = run_sizes(config_of(), (1920, 1080))
    assert result[0].values == {}
    for less, more in pairwise(result):
        assert less.values.keys() <= more.values.keys()
        assert less.values != more.values
    sizes = [each.screen for each in result]
    assert sizes[:5] == [(1920, 1080), (1280, 720), (960, 540), (640, 360), (480, 270)]
    assert result[4].values == {"env.options": {"size": "480x270", "slow": 1}}
    added = [[*(more.values.keys() - less.values.keys())] for less, more in pairwise(result[4:])]
    assert added[:3] == [
        ["policy.history_images"],
        ["rollout.engine"],
        ["data.groups_per_batch"],
    ]
    assert set(added[3]) == {"up.envs", "up.rollouts", "train.ranks"}
    assert result[-1].images == 2


def test_a_suite_that_takes_no_size_keeps_its_screens() -> None:
    result = run_sizes(config_of(env={"suite": "osworld", "options": {}}), (1920, 1080))
    assert {each.screen for each in result} == {(1920, 1080)}
    assert not any("env.options" in each.values for each in result)


@pytest.mark.parametrize(
    ("most_s", "chosen"), [(1000.0, 0), (400.0, 0), (399.0, 1), (150.0, 2), (100.0, 3), (1.0, 3)]
)
def test_the_least_is_left_out_that_fits(most_s: float, chosen: int) -> None:
    costs = {(40, 40): 400.0, (30, 30): 200.0, (20, 20): 150.0, (10, 10): 100.0}
    steps = [RunSize(screen, 1) for screen in costs]
    assert choose_size(steps, lambda each: costs[each.screen], most_s) == steps[chosen]


def test_nothing_is_measured_beyond_a_level_that_does_not_fit() -> None:
    steps = [RunSize((side, side), 1) for side in (40, 30, 20, 10)]
    requests = []

    def seconds_of(level: RunSize) -> float:
        requests.append(level.screen[0])
        return level.screen[0] * 10.0

    assert choose_size(steps, seconds_of, 210.0).screen == (20, 20)
    assert requests == [10, 20, 30]


def test_a_slower_machine_leaves_out_more() -> None:
    config = config_of()
    steps = run_sizes(config, (1920, 1080))
    chosen = []
    for slowness in (0.02, 0.3, 1.0, 3.0, 30.0):

        def pass_s(level: RunSize, slowness: float = slowness) -> float:
            return slowness * level.images * level.screen[0] * level.screen[1] / 500_000

        costs = Costs(8 * slowness, 0.1 * slowness, pass_s, cores=2)
        level = choose_size(steps, partial(costs.seconds_of, config), 215.0)
        chosen.append(steps.index(level))
    assert chosen[0] == 0
    assert chosen == sorted(chosen)
    assert chosen[-1] == len(steps) - 1


def test_costs_count_starts_passes_and_episodes() -> None:
    costs = Costs(start_s=1.0, episode_s=3.0, pass_s=lambda _: 100.0, cores=2)
    config = config_of(rollout={"engine": "transformers"})
    whole = costs.seconds_of(config, RunSize((1, 1), 1))
    one_group = costs.seconds_of(config, RunSize((1, 1), 1, {"data.groups_per_batch": 1}))
    one_each = costs.seconds_of(
        config,
        RunSize((1, 1), 1, {"up.envs": 1, "up.rollouts": 1, "train.ranks": 1}),
    )
    assert whole - one_group == pytest.approx(9 * 100 + 8 * 3 / 4)
    # Four processes on two cores, two ranks that resume, export and evaluation; with one of each 1 + 1 + 2.
    assert one_each - whole == pytest.approx(2 * 8 * 3 / 2 - 2 * 8 * 3 / 4 - 1)
    assert costs.seconds_of(config_of(), RunSize((1, 1), 1)) - whole == pytest.approx(3 + 3)


def test_the_time_left_never_runs_below_nothing() -> None:
    now = 100.0
    budget = TimeBudget(300.0, 20.0, lambda: now)
    now = 175.0
    assert (budget.spent_s, budget.left_s, str(budget)) == (95.0, 205.0, "3:25 left")
    now = 500.0
    assert (budget.left_s, str(budget)) == (0.0, "0:00 left")


def test_a_pass_is_measured_once_and_not_at_all_where_it_cannot_fit() -> None:
    policy = load_policy("builtin:tiny")
    passes = PassTimer(policy, most_s=1e9)
    small = RunSize((168, 168), 1)
    assert passes(small) == passes(small) > 0
    none_fits = PassTimer(policy, most_s=0.0)
    one = none_fits(small)
    assert none_fits(RunSize((168, 168), 3)) == pytest.approx(3 * one), "reckoned, not measured"
    assert all(each.grad is None for each in policy.model.parameters())
