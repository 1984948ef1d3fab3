"""Advantages, compared with numpy in float64."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.advantage import EPSILON, Estimator, group_advantages, step_advantages

rewards_of_groups = st.lists(
    st.floats(-1e3, 1e3, allow_subnormal=False) | st.sampled_from([0.0, 1.0]),
    min_size=1,
    max_size=64,
)
binary_groups = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=64)


@given(rewards_of_groups)
def test_group_std_is_grpos_formula_in_float64(rewards: list[float]) -> None:
    array = np.asarray(rewards, dtype=np.float64)
    centred = array - array.mean()
    target = centred / (array.std(ddof=0) + EPSILON)
    if array.min() == array.max():
        target = np.zeros_like(array)
    np.testing.assert_allclose(group_advantages(rewards), target, rtol=1e-9, atol=1e-6)


@given(rewards_of_groups)
def test_group_mean_only_centres(rewards: list[float]) -> None:
    array = np.asarray(rewards, dtype=np.float64)
    target = array - array.mean()
    np.testing.assert_allclose(group_advantages(rewards, "group_mean"), target, atol=1e-9)


@given(rewards_of_groups)
def test_leave_one_out_compares_each_with_the_mean_of_the_others(rewards: list[float]) -> None:
    actual = group_advantages(rewards, "leave_one_out")
    for index, reward in enumerate(rewards):
        others = np.asarray(rewards[:index] + rewards[index + 1 :], dtype=np.float64)
        target = reward - others.mean() if len(others) else 0.0
        assert actual[index] == pytest.approx(target, rel=1e-9, abs=1e-9)


@given(binary_groups)
def test_mixed_groups_have_mean_zero_and_variance_one_at_any_size(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)
    if 0 < sum(rewards) < len(rewards):
        assert np.var(advantages) == pytest.approx(1.0, rel=1e-4)


@given(st.floats(-1e6, 1e6), st.integers(1, 32), st.sampled_from(get_args(Estimator)))
def test_constant_rewards_and_a_single_one_give_exactly_zero(
    reward: float, size: int, estimator: Estimator
) -> None:
    assert group_advantages([reward] * size, estimator) == [0.0] * size


@given(binary_groups, st.sampled_from(get_args(Estimator)))
def test_advantages_sum_to_zero_and_put_successes_above_failures(
    rewards: list[float], estimator: Estimator
) -> None:
    advantages = group_advantages(rewards, estimator)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)
    if 0 < sum(rewards) < len(rewards):
        assert all(
            (value > 0) == (reward == 1) for value, reward in zip(advantages, rewards, strict=True)
        )


@given(binary_groups, st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_does_not_matter(rewards: list[float], random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(rewards)
    shuffled = group_advantages([rewards[index] for index in order])
    np.testing.assert_allclose(shuffled, [straight[index] for index in order], rtol=1e-12)


def test_an_empty_group_has_no_advantages() -> None:
    assert group_advantages([]) == []


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, reward])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_advantages_of_steps_are_the_sum_of_their_differences(share: float) -> None:
    rng = np.random.default_rng(0)
    for steps in (1, 2, 7):
        values, reward = rng.random(steps), float(rng.integers(2))
        ahead = [*values[1:], reward]
        differences = [after - value for after, value in zip(ahead, values, strict=True)]
        expected = [
            sum(share**k * differences[at + k] for k in range(steps - at)) for at in range(steps)
        ]
        assert step_advantages(values.tolist(), reward, share) == pytest.approx(expected, abs=1e-12)
    assert step_advantages([0.3, 0.6], 1.0, 1.0) == pytest.approx([0.7, 0.4])
    assert step_advantages([], 1.0, 0.9) == []
