"""High-entropy steps: the threshold (compared with numpy), ties, order, and that a step is always kept."""

from __future__ import annotations

import random
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.advantage import high_entropy_steps, mean_entropy

entropies = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7]) | st.floats(0, 8), max_size=40)
percents = st.integers(1, 100)


@given(entropies, percents)
def test_the_threshold_is_the_percentile_of_the_group(values: list[float], percent: int) -> None:
    flags = high_entropy_steps(values, percent / 100)
    if not values:
        assert flags == []
        return
    # Of T values the k-th largest is the quantile whose rank from below is T - k.
    rank = len(values) - ceil(Fraction(percent, 100) * len(values))
    threshold = np.sort(np.array(values, dtype=np.float64))[rank]
    assert flags == [bool(value >= threshold) for value in values]


@given(entropies, percents)
def test_at_least_the_share_is_kept_and_more_only_by_ties(
    values: list[float], percent: int
) -> None:
    verdicts = high_entropy_steps(values, percent / 100)
    flags = [value for value, is_kept in zip(values, verdicts, strict=True) if is_kept]
    expected = ceil(Fraction(percent, 100) * len(values))
    assert len(flags) >= expected
    assert sum(value > min(flags) for value in flags) < expected or not values


@given(entropies, percents, st.integers())
def test_the_order_of_the_steps_changes_nothing(
    values: list[float], percent: int, seed: int
) -> None:
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)
    flags = high_entropy_steps(values, percent / 100)
    assert high_entropy_steps([values[i] for i in order], percent / 100) == [
        flags[i] for i in order
    ]


def test_the_paper_keeps_the_top_eighty_percent() -> None:
    assert high_entropy_steps([0.5, 0.1, 0.4, 0.3, 0.2], 0.8) == [True, False, True, True, True]


def test_all_steps_alike_are_all_kept() -> None:
    assert high_entropy_steps([0.3] * 7, 0.1) == [True] * 7


@given(entropies)
def test_a_share_of_one_keeps_everything(values: list[float]) -> None:
    assert all(high_entropy_steps(values, 1.0))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        high_entropy_steps([1.0], share)


@given(st.lists(st.floats(0, 12), min_size=1, max_size=300))
def test_a_steps_entropy_is_the_mean_over_its_tokens(values: list[float]) -> None:
    assert mean_entropy(values) == pytest.approx(float(np.mean(values)), rel=1e-12)
