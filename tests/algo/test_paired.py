"""Tests of pairs, compared with an enumeration of all signs."""

from __future__ import annotations

from itertools import product

import pytest

from dart_cli.algo.statistics import mcnemar, sign_flip


def _enumerated(differences: list[float]) -> float:
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * each for sign, each in zip(signs, differences, strict=True)))
        for signs in product([-1, 1], repeat=len(differences))
    ]
    return sum(each >= observed - 1e-12 for each in sums) / len(sums)


def test_mcnemar_equals_enumeration_of_all_signs() -> None:
    for first in range(7):
        for second in range(7):
            expected = _enumerated([1.0] * first + [-1.0] * second)
            assert mcnemar(first, second) == pytest.approx(expected, abs=1e-15)


def test_known_values_of_mcnemar() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 6) == mcnemar(6, 0) == 2 / 64
    assert mcnemar(0, 1000) == 2.0**-999  # integers of any size


def test_random_signs_estimate_the_exact_probability() -> None:
    for differences in ([0.5, 0.25, -0.25, 1.0, 0.75, 0.5], [1.0, 1.0, 1.0, -1.0, 1.0, 0.0, 1.0]):
        exact = _enumerated(differences)
        assert sign_flip(differences, seed=2) == pytest.approx(exact, abs=0.015)
    assert sign_flip([0.0, 0.0], seed=0) == 1.0
    assert sign_flip([1.0] * 60, seed=0) == 1 / 20_001
