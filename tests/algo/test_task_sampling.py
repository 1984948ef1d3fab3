"""Task probabilities and group sizes: formulas, bounds, and that every task is played."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.task_sampling import (
    DECAY,
    FLOOR,
    MovingAverage,
    deviation_weights,
    frontier_weights,
    group_size,
    uniform_weights,
)


def of(success: list[float | None]) -> list[float | None]:
    """Return the variances of outcomes with these success rates."""
    return [None if rate is None else rate * (1 - rate) for rate in success]


rates = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40)


@given(rates)
def test_frontier_is_the_normalised_floored_variance(success: list[float | None]) -> None:
    p = np.array([0.5 if rate is None else rate for rate in success], dtype=np.float64)
    expected = np.maximum(4 * p * (1 - p), FLOOR)
    np.testing.assert_allclose(frontier_weights(of(success)), expected / expected.sum(), rtol=1e-9)


@given(rates)
def test_probabilities_sum_to_one_and_no_task_starves(success: list[float | None]) -> None:
    weights = frontier_weights(of(success))
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= FLOOR / len(success) * (1 - 1e-9)


def test_half_success_comes_first_and_unknown_counts_as_half() -> None:
    half, unknown, easy, hard = frontier_weights(of([0.5, None, 0.95, 0.0]))
    assert half == unknown
    assert half > easy > hard


def test_a_task_that_always_breaks_is_played_least_and_not_most() -> None:
    assert frontier_weights([None, 0.25, 0.25], [1.0, 0.0, 0.5]) == pytest.approx(
        [0.1 / 1.6, 1 / 1.6, 0.5 / 1.6]
    )
    assert frontier_weights([None, 0.21], [0.0, 0.0]) == frontier_weights([None, 0.21])


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


@pytest.mark.parametrize(("variance", "floor"), [(0.3, 0.1), (-0.1, 0.1), (0.2, 0.0)])
def test_variances_and_floors_out_of_range_are_refused(variance: float, floor: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        frontier_weights([variance], floor=floor)


@pytest.mark.parametrize(
    ("success", "size"),
    [(0.0, 8), (0.6, 8), (0.65, 6), (0.7, 5), (0.75, 5), (0.8, 4), (0.9, 3), (1.0, 2), (None, 8)],
)
def test_group_sizes_are_those_of_the_release(success: float | None, size: int) -> None:
    assert group_size(success, 8, 2) == size


@given(st.integers(1, 60), st.integers(0, 60), st.integers(2, 10))
def test_a_group_of_eight_follows_the_table_at_every_rate(
    judged: int, passed: int, least: int
) -> None:
    rate = Fraction(min(passed, judged), judged)
    table = max(least, floor(9 / rate - 7)) if rate > Fraction(6, 10) else 8
    assert group_size(float(rate), 8, least) == min(table, 8)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 1024), st.integers(2, 1024))
def test_an_easier_task_never_gets_more_and_none_less_than_the_least(
    one: float, other: float, full: int, least: int
) -> None:
    easy, hard = (group_size(rate, full, least) for rate in (max(one, other), min(one, other)))
    assert min(full, least) <= easy <= hard <= full


@given(st.floats(0.6, 1), st.integers(1, 100))
def test_other_sizes_shrink_by_the_same_share(success: float, times: int) -> None:
    share = group_size(success, 8 * times, 2) / (8 * times)
    assert share == pytest.approx(max(min(1, (9 / success - 7) / 8), 1 / 4), abs=1 / (8 * times))


def test_a_success_rate_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="must be in"):
        group_size(1.01, 8, 2)


@given(rates)
def test_deviation_is_the_normalised_root_of_the_variance(success: list[float | None]) -> None:
    p = np.array([0.5 if rate is None else rate for rate in success], dtype=np.float64)
    expected = np.sqrt(p * (1 - p)) + 0.05
    result = deviation_weights([None if rate is None else rate * (1 - rate) for rate in success])
    np.testing.assert_allclose(result, expected / expected.sum(), rtol=1e-9)


def test_tasks_that_break_are_played_less_by_deviation_too() -> None:
    result = deviation_weights([0.25, 0.25], invalid_shares=[0.0, 0.6])
    assert result == pytest.approx([1 / 1.4, 0.4 / 1.4])


def test_variances_out_of_range_are_refused_by_deviation() -> None:
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="must be in"):
            deviation_weights([wrong])
