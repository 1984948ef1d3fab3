"""Kappa and its interval, compared with a numerical delta method."""

from __future__ import annotations

import numpy as np
import pytest

from dart_cli.algo.statistics import Z_95, Agreement


def by_numbers(table: np.ndarray) -> tuple[float, float]:
    """Return kappa and its standard error, from differences and the covariance of a multinomial."""
    n = table.sum()

    def kappa(p: np.ndarray) -> float:
        q = p.reshape(2, 2)
        chance = q.sum(1) @ q.sum(0)
        return float((np.trace(q) - chance) / (1 - chance))

    p = (table / n).ravel()
    step = 1e-6
    gradient = np.array(
        [(kappa(p + step * e) - kappa(p - step * e)) / (2 * step) for e in np.eye(4)]
    )
    covariance = (np.diag(p) - np.outer(p, p)) / n
    return kappa(p), float(np.sqrt(gradient @ covariance @ gradient))


@pytest.mark.parametrize(
    "counts", [(20, 17, 2, 1), (3, 30, 4, 5), (1, 1, 30, 2), (500, 300, 120, 80), (7, 2, 0, 3)]
)
def test_kappa_and_its_interval(counts: tuple[int, int, int, int]) -> None:
    both_pass, both_fail, judge_alone, evaluator_alone = counts
    result = Agreement(*counts)
    table = np.array([[both_pass, judge_alone], [evaluator_alone, both_fail]], dtype=np.float64)
    kappa, error = by_numbers(table)
    assert result.kappa == pytest.approx(kappa, abs=1e-9)
    assert result.kappa_interval == pytest.approx(
        (max(-1.0, kappa - Z_95 * error), min(1.0, kappa + Z_95 * error)), abs=1e-6
    )
    assert result.share == pytest.approx((both_pass + both_fail) / table.sum())
    low, high = result.share_interval
    assert 0 <= low <= result.share <= high <= 1


def test_without_episodes_or_with_one_answer_alone_there_is_no_kappa() -> None:
    assert Agreement(0, 0, 0, 0).share is None
    assert Agreement(0, 0, 0, 0).share_interval == (0.0, 1.0)
    assert Agreement(9, 0, 0, 0).kappa is None
    assert Agreement(9, 0, 0, 0).kappa_interval is None
    assert Agreement(5, 5, 0, 0).kappa == 1.0
    assert Agreement(0, 0, 5, 5).kappa == -1.0
