"""The mismatch of engine and trainer is what plain Python makes of it, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.logprob_gap import Mismatch, mismatch

_pairs = st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), min_size=1, max_size=40)


@given(_pairs)
def test_it_is_the_definition_written_out(pairs: list[tuple[float, float]]) -> None:
    result = mismatch([left for left, _ in pairs], [right for _, right in pairs])
    gaps = [abs(right - left) for left, right in pairs]
    assert result.tokens == len(pairs)
    assert result.mean == pytest.approx(math.fsum(gaps) / len(gaps))
    assert result.max == max(gaps)
    k3 = math.fsum(math.exp(b - a) - 1 - (b - a) for a, b in pairs) / len(pairs)
    assert result.kl == pytest.approx(k3, rel=1e-9, abs=1e-12)
    for share, quantile in ((0.5, result.p50), (0.99, result.p99)):
        enough = [gap for gap in gaps if sum(g <= gap for g in gaps) >= share * len(gaps)]
        assert quantile == min(enough)


def test_k3_is_the_kl_of_the_distributions_on_average() -> None:
    """Compute the exact expectation over a vocabulary of 50: sum of p(x) k3(x) = KL(p || q)."""
    rng = np.random.default_rng(0)
    engine, trainer = (np.log(rng.dirichlet(np.ones(50))) for _ in range(2))
    expected = float((np.exp(engine) * (engine - trainer)).sum())
    k3 = [mismatch([a], [b]).kl for a, b in zip(engine, trainer, strict=True)]
    assert float((np.exp(engine) * k3).sum()) == pytest.approx(expected, rel=1e-9)


@given(_pairs)
def test_equal_numbers_are_nothing_apart(pairs: list[tuple[float, float]]) -> None:
    same = [left for left, _ in pairs]
    assert mismatch(same, same) == Mismatch(len(same), 0, 0, 0, 0, 0)


def test_no_tokens_are_no_mismatch() -> None:
    assert mismatch([], []) == Mismatch(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_infinitely_far_apart(broken: float, side: int) -> None:
    sides = [[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]
    sides[side][1] = broken
    result = mismatch(*sides)
    assert result.max == result.mean == result.kl == math.inf
    assert result.p50 == 0
    assert mismatch([-math.inf], [-math.inf]).max == math.inf


def test_a_huge_difference_has_a_finite_kl() -> None:
    assert mismatch([-5000.0], [0.0]).kl == pytest.approx(math.expm1(20) - 20)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same length"):
        mismatch([0.0], [0.0, 1.0])
