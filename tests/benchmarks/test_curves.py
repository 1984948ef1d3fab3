"""Curves: rising fits, first crossings, bands."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learning.curves import band, isotonic, reach, value_at

HEIGHTS = st.lists(st.integers(0, 20).map(lambda k: k / 20), min_size=1, max_size=7)


def brute_isotonic(ys: list[float]) -> list[float]:
    """min over ends of max over beginnings of the means between: Barlow's min-max formula."""
    size = len(ys)
    return [
        min(max(float(np.mean(ys[a : b + 1])) for a in range(i + 1)) for b in range(i, size))
        for i in range(size)
    ]


@given(HEIGHTS)
def test_the_rising_fit_is_that_of_the_min_max_formula(ys: list[float]) -> None:
    fit = isotonic([(float(x), y) for x, y in enumerate(ys)])
    assert [value_at(fit, float(x)) for x in range(len(ys))] == pytest.approx(brute_isotonic(ys))


@given(st.lists(st.tuples(st.integers(0, 5).map(float), st.floats(0, 1)), min_size=1, max_size=20))
def test_the_rising_fit_rises_whatever_it_is_given(points: list[tuple[float, float]]) -> None:
    fit = isotonic(points)
    assert all(x0 <= x1 and y0 <= y1 + 1e-12 for (x0, y0), (x1, y1) in pairwise(fit))
    assert fit[0][0] == min(x for x, _ in points)
    assert fit[-1][0] == max(x for x, _ in points)


def test_points_of_equal_cost_count_as_their_mean() -> None:
    assert isotonic([(0, 0.2), (0, 0.4), (5, 0.9)]) == [(0, pytest.approx(0.3)), (5, 0.9)]


def test_a_level_is_reached_between_points() -> None:
    curve = [(0.0, 0.2), (100.0, 0.4), (200.0, 0.8)]
    assert reach(curve, 0.3) == pytest.approx(50)
    assert reach(curve, 0.8) == 200
    assert reach(curve, 0.1) == 0
    assert reach(curve, 0.81) is None
    assert reach([], 0.5) is None


def test_a_plateau_counts_from_where_it_begins() -> None:
    assert reach([(0, 0.1), (10, 0.5), (90, 0.5), (100, 0.9)], 0.5) == 10


@given(HEIGHTS, st.floats(0, 1))
def test_the_curve_is_at_the_level_where_it_is_reached(ys: list[float], level: float) -> None:
    fit = isotonic([(float(x), y) for x, y in enumerate(ys)])
    at = reach(fit, level)
    assert (at is None) == (fit[-1][1] < level)
    if at is not None:
        assert value_at(fit, at) >= level - 1e-9
        assert at == fit[0][0] or value_at(fit, at) == pytest.approx(max(level, fit[0][1]))


def test_a_band_goes_as_far_as_all_its_curves() -> None:
    found = band([[(0, 0.0), (10, 1.0)], [(2, 0.5), (20, 0.5)]], points=5)
    assert found.x == [2, 4, 6, 8, 10]
    assert found.low == pytest.approx([0.2, 0.4, 0.5, 0.5, 0.5])
    assert found.high == pytest.approx([0.5, 0.5, 0.6, 0.8, 1.0])
    assert found.mean == pytest.approx([0.35, 0.45, 0.55, 0.65, 0.75])
