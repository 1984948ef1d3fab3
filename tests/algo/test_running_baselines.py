"""Expected rewards and advantages from them, against fractions and numpy."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.running_baselines import (
    PRIOR,
    WHOLE_TASK,
    RunningBaseline,
    baseline_advantages,
    expected_by_step,
)

rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30)
decays = st.sampled_from([0.5, 0.875, 1.0])  # exact as floats


@given(rewards, decays)
def test_a_baseline_is_the_mean_of_rewards_each_of_which_counts_more_than_those_before(
    drawn: list[float], decay: float
) -> None:
    baseline = RunningBaseline()
    for reward in drawn:
        baseline = baseline.after(reward, decay)
    rho, prior = Fraction(decay), Fraction(PRIOR)
    weights = [rho ** (len(drawn) - 1 - index) for index in range(len(drawn))]
    passed = prior * rho ** len(drawn) + sum(
        w * Fraction(r) for w, r in zip(weights, drawn, strict=True)
    )
    total = 2 * prior * rho ** len(drawn) + sum(weights)
    assert baseline.value == pytest.approx(float(passed / total), rel=1e-12)
    assert 0 < baseline.value < 1


def test_a_baseline_without_outcomes_expects_one_half() -> None:
    assert RunningBaseline().value == 0.5


@pytest.mark.parametrize("reward", [-0.1, 1.1])
def test_impossible_rewards_are_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        RunningBaseline().after(reward)


def test_a_step_without_outcomes_expects_what_the_one_before_it_does() -> None:
    task, first, third = RunningBaseline(1, 2), RunningBaseline(3, 4), RunningBaseline(5, 6)
    assert expected_by_step({}, 2) == [RunningBaseline(), RunningBaseline()]
    assert expected_by_step({WHOLE_TASK: task}, 2) == [task, task]
    result = expected_by_step({WHOLE_TASK: task, 0: first, 2: third}, 4)
    assert result == [first, first, third, third]
    assert expected_by_step({0: first}, 0) == []


@given(st.lists(st.floats(-1, 1), max_size=20), st.sampled_from([0.0, 0.25]))
def test_unscaled_advantages_expect_less_by_the_margin(drawn: list[float], margin: float) -> None:
    wanted = [Fraction(each) + Fraction(margin) for each in drawn]
    assert baseline_advantages(drawn, margin) == [float(each) for each in wanted]


def test_a_difference_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        baseline_advantages([0.0, float("nan")], 0.0)
