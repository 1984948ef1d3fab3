"""Success within k attempts, compared with enumerations of all choices and resamples."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import numpy as np
import pytest

from dart_cli.algo.statistics import (
    LEAST_DRAWN,
    counts_of,
    interval_of_mean,
    over_tasks,
    pass_at_k,
    pass_hat_k,
)


@pytest.mark.parametrize("attempts", range(1, 8))
def test_estimates_equal_the_mean_over_all_choices_of_k_attempts(attempts: int) -> None:
    for passed in range(attempts + 1):
        outcomes = [True] * passed + [False] * (attempts - passed)
        for k in range(1, attempts + 1):
            chosen = list(combinations(outcomes, k))
            some, every = (sum(map(test, chosen)) / len(chosen) for test in (any, all))
            assert pass_at_k(attempts, passed, k) == pytest.approx(some, abs=1e-15)
            assert pass_hat_k(attempts, passed, k) == pytest.approx(every, abs=1e-15)


def test_estimates_are_unbiased() -> None:
    """Average over all outcomes of 5 attempts that pass with p: the mean is exact for k attempts."""
    p = 0.3
    for k in (1, 2, 4, 5):
        some = every = 0.0
        for outcomes in product([0, 1], repeat=5):
            passed = sum(outcomes)
            weight = p**passed * (1 - p) ** (5 - passed)
            some += weight * pass_at_k(5, passed, k)
            every += weight * pass_hat_k(5, passed, k)
        assert some == pytest.approx(1 - (1 - p) ** k)
        assert every == pytest.approx(p**k)


def test_many_attempts_neither_overflow_nor_lose_digits() -> None:
    n, c, k = 10_000, 3, 4096
    by_product = 1.0 - float(np.prod([1.0 - k / i for i in range(n - c + 1, n + 1)]))
    assert pass_at_k(n, c, k) == pytest.approx(by_product, rel=1e-12)


@pytest.mark.parametrize(("attempts", "passed", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_counts_that_cannot_be_are_refused(attempts: int, passed: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="want"):
            estimate(attempts, passed, k)


def test_powers_of_two_and_all_attempts_are_told() -> None:
    assert [counts_of(n) for n in (0, 1, 3, 4, 6, 8)] == [
        *([], [1], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8])
    ]


def test_the_interval_is_that_of_all_resamples_of_tasks() -> None:
    values = [0.0, 0.1, 0.25, 0.5, 1.0]
    means = [np.mean(drawn) for drawn in product(values, repeat=len(values))]  # all 3,125
    low, high = np.quantile(means, [0.025, 0.975])
    result = interval_of_mean(values, seed=1, resamples=40_000)
    assert result == pytest.approx((low, high), abs=0.011)  # values lie on a grid of 0.01
    assert result == interval_of_mean(values, seed=1, resamples=40_000)
    assert interval_of_mean([0.5], seed=1) is None


def test_tasks_weigh_alike_however_many_instances_they_have() -> None:
    mean, interval = over_tasks([[1.0], [0.0] * 9] * 5, seed=0, resamples=500)
    assert (mean, interval) == (0.5, interval_of_mean([1.0, 0.0] * 5, seed=0, resamples=500))
    rng = Random(3)
    alone = [float(rng.random() < 0.5) for _ in range(40)]
    mean, interval = over_tasks([alone], seed=0)
    assert mean == pytest.approx(np.mean(alone))
    assert interval == interval_of_mean(alone, seed=0)


def test_an_interval_of_few_tasks_or_instances_is_not_given_as_it_holds_the_mean_too_rarely() -> (
    None
):
    for few in ([[0.5]] * (LEAST_DRAWN - 1), [[0.5] * (LEAST_DRAWN - 1)]):
        assert over_tasks(few, seed=0) == (0.5, None)
    for enough in ([[0.5]] * LEAST_DRAWN, [[0.5] * LEAST_DRAWN]):
        assert over_tasks(enough, seed=0) == (0.5, (0.5, 0.5))
    rng = np.random.default_rng(0)

    def holds(values: list[float]) -> bool:
        low, high = interval_of_mean(values, seed=0, resamples=500) or (1.0, -1.0)
        return low <= 0 <= high

    rates = {
        count: np.mean([holds(list(rng.normal(0, 1, count))) for _ in range(400)])
        for count in (3, LEAST_DRAWN)
    }
    assert rates[3] < 0.8
    assert rates[LEAST_DRAWN] > 0.85
