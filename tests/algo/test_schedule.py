"""Task probabilities: formula, bounds, and that nothing starves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.schedule import (
    DECAY,
    FLOOR,
    MovingAverage,
    frontier_weights,
    uniform_weights,
)

rates = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40)


@given(rates)
def test_frontier_is_the_normalised_floored_variance(success: list[float | None]) -> None:
    p = np.array([0.5 if rate is None else rate for rate in success], dtype=np.float64)
    wanted = np.maximum(4 * p * (1 - p), FLOOR)
    np.testing.assert_allclose(frontier_weights(success), wanted / wanted.sum(), rtol=1e-9)


@given(rates)
def test_probabilities_sum_to_one_and_no_task_starves(success: list[float | None]) -> None:
    weights = frontier_weights(success)
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= FLOOR / len(success) * (1 - 1e-9)


def test_half_success_comes_first_and_unknown_counts_as_half() -> None:
    half, unknown, easy, hard = frontier_weights([0.5, None, 0.95, 0.0])
    assert half == unknown
    assert half > easy > hard


def test_uniform_ignores_success() -> None:
    assert uniform_weights(4) == [0.25] * 4


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=200))
def test_moving_average_is_the_weighted_mean_of_all_outcomes(outcomes: list[float]) -> None:
    average = MovingAverage()
    for outcome in outcomes:
        average = average.add(outcome)
    weights = DECAY ** np.arange(len(outcomes) - 1, -1, -1, dtype=np.float64)
    assert average.value == pytest.approx(float(np.average(outcomes, weights=weights)))


def test_moving_average_knows_nothing_before_the_first_outcome() -> None:
    assert MovingAverage().value is None


@pytest.mark.parametrize(("success", "floor"), [([1.5], 0.1), ([-0.1], 0.1), ([0.5], 0.0)])
def test_rates_and_floors_out_of_range_are_refused(success: list[float], floor: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        frontier_weights(success, floor)
