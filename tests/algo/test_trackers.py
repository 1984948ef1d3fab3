"""Expected rewards and advantages from them, against fractions and numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.trackers import (
    PRIOR,
    RHO_MAX,
    RHO_MIN,
    WHOLE_TASK,
    Tracker,
    TrackerScale,
    batch_normalised,
    decay_of,
    expected_by_step,
    moved_per_version,
    tracked_advantages,
)

rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30)
decays = st.sampled_from([0.5, 0.875, 1.0])  # exact as floats


@given(rewards, decays)
def test_a_tracker_is_the_mean_of_rewards_each_of_which_counts_more_than_those_before(
    drawn: list[float], decay: float
) -> None:
    tracker = Tracker()
    for reward in drawn:
        tracker = tracker.after(reward, decay)
    rho, prior = Fraction(decay), Fraction(PRIOR)
    weights = [rho ** (len(drawn) - 1 - index) for index in range(len(drawn))]
    passed = prior * rho ** len(drawn) + sum(
        w * Fraction(r) for w, r in zip(weights, drawn, strict=True)
    )
    total = 2 * prior * rho ** len(drawn) + sum(weights)
    assert tracker.value == pytest.approx(float(passed / total), rel=1e-12)
    assert 0 < tracker.value < 1


def test_a_tracker_without_outcomes_expects_one_half() -> None:
    assert Tracker().value == 0.5


@pytest.mark.parametrize(("reward", "decay"), [(-0.1, 0.9), (1.1, 0.9), (1.0, 0.0), (1.0, 1.1)])
def test_impossible_rewards_and_decays_are_refused(reward: float, decay: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Tracker().after(reward, decay)


def test_a_step_without_outcomes_expects_what_the_one_before_it_does() -> None:
    task, first, third = Tracker(1, 2), Tracker(3, 4), Tracker(5, 6)
    assert expected_by_step({}, 2) == [Tracker(), Tracker()]
    assert expected_by_step({WHOLE_TASK: task}, 2) == [task, task]
    found = expected_by_step({WHOLE_TASK: task, 0: first, 2: third}, 4)
    assert found == [first, first, third, third]
    assert expected_by_step({0: first}, 0) == []


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=50))
def test_advantages_are_centred_and_scaled_over_the_batch(drawn: list[float]) -> None:
    values = np.array(drawn)
    wanted = (values - values.mean()) / (values.std() + 1e-6)
    np.testing.assert_allclose(batch_normalised(drawn), wanted, rtol=1e-6, atol=1e-6)


@given(st.floats(-1, 1), st.integers(0, 40))
def test_equal_differences_give_exactly_zero(difference: float, count: int) -> None:
    assert batch_normalised([difference] * count) == [0.0] * count


@given(st.lists(st.floats(-1, 1), max_size=20), st.sampled_from([0.0, 0.25]))
def test_unscaled_advantages_expect_less_by_the_margin(drawn: list[float], margin: float) -> None:
    wanted = [Fraction(each) + Fraction(margin) for each in drawn]
    assert tracked_advantages(drawn, "none", margin) == [float(each) for each in wanted]
    assert tracked_advantages(drawn, "batch", 0.0) == batch_normalised(drawn)


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_a_difference_that_is_not_finite_is_refused(scale: TrackerScale) -> None:
    with pytest.raises(ValueError, match="finite"):
        tracked_advantages([0.0, float("nan")], scale, 0.0)


def test_forgetting_follows_how_far_the_policy_moved() -> None:
    assert decay_of(0.0, 0.01) == RHO_MAX
    assert decay_of(-1.0, 0.01) == RHO_MAX  # an outcome that came late
    assert decay_of(1.0, 0.01) == RHO_MIN
    assert decay_of(0.001, 0.01) == pytest.approx(0.5**0.1)
    with pytest.raises(ValueError, match="half_life"):
        decay_of(0.1, 0.0)


def test_a_tracker_remembers_the_farthest_at_which_an_outcome_was_sampled() -> None:
    tracker = Tracker().after(1.0, 0.9)
    assert tracker.moved is None
    tracker = tracker.after(1.0, 0.9, 0.5)
    assert tracker.moved == 0.5
    assert tracker.after(1.0, 0.9, 0.25).moved == tracker.after(1.0, 0.9).moved == 0.5


MEASURED = {"stale_kl": 0.006, "stale_tokens": 50.0, "tokens": 100.0, "staleness_mean": 1.5}


def test_movement_is_the_kl_of_stale_tokens_over_their_age() -> None:
    assert moved_per_version(MEASURED) == pytest.approx(0.002)  # they are 3 versions old
    assert moved_per_version({**MEASURED, "parity_kl": 0.003}) == pytest.approx(0.001)
    assert moved_per_version({**MEASURED, "parity_kl": 0.1}) == 0.0


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"parity_kl": 0.0, "staleness_mean": 0.0, "tokens": 100.0},  # all tokens are fresh
        {**MEASURED, "staleness_mean": 0.0},
        {**MEASURED, "pool_tokens": 0.1},
        {**MEASURED, "demonstrated_fraction": 0.1},
    ],
)
def test_a_batch_without_stale_tokens_of_its_own_measures_no_movement(
    metrics: dict[str, float],
) -> None:
    assert moved_per_version(metrics) is None
