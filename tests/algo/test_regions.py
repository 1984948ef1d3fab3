"""Regions of a pointer's distribution, compared with an independent computation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dart_cli.algo.regions import regions

Found = tuple[float, float, float, frozenset[int]]


def brute_force(p: NDArray[np.float64], share: float = 0.3) -> list[Found]:
    """Find regions: every cell takes the least label of its neighbours until none changes."""
    is_kept = p > share * p.max()
    label = np.where(is_kept, np.arange(p.size).reshape(p.shape), p.size)
    while True:
        padded = np.pad(label, 1, constant_values=p.size)
        around = [padded[1:-1, 1:-1], padded[:-2, 1:-1], padded[2:, 1:-1]]
        around += [padded[1:-1, :-2], padded[1:-1, 2:]]
        after = np.where(is_kept, np.min(around, axis=0), p.size)
        if (after == label).all():
            break
        label = after
    row, column = np.indices(p.shape)
    result = []
    for name in np.unique(label[is_kept]):
        inside = label == name
        weights = p[inside] / p[inside].sum()
        x = float(weights @ (column[inside] + 0.5)) / p.shape[1]
        y = float(weights @ (row[inside] + 0.5)) / p.shape[0]
        result.append((x, y, float(p[inside].mean()), frozenset(np.flatnonzero(inside).tolist())))
    return sorted(result, key=lambda each: -each[2])


def test_regions_agree_with_brute_force() -> None:
    random = np.random.default_rng(7)
    for _ in range(150):
        rows, columns = random.integers(1, 13, size=2)
        sharpness = random.choice([0.3, 1.0, 3.0])
        p = np.exp(sharpness * random.standard_normal((rows, columns)))
        p /= p.sum()
        result, expected = regions(p), brute_force(p)
        assert [frozenset(each.cells) for each in result] == [each[3] for each in expected]
        ours = np.array([[each.x, each.y, each.score] for each in result])
        assert np.allclose(ours, [each[:3] for each in expected], rtol=0, atol=1e-13)
        assert regions(p, top=2) == result[:2]


def test_cells_that_touch_at_a_corner_are_two_regions() -> None:
    first, second = regions([[0.5, 0.0], [0.0, 0.25]])
    assert (first.cells, first.x, first.y, first.score) == ((0,), 0.25, 0.25, 0.5)
    assert (second.cells, second.x, second.y, second.score) == ((3,), 0.75, 0.75, 0.25)


def test_a_cell_at_the_threshold_is_outside() -> None:
    assert [each.cells for each in regions([[0.3, 1.0, 0.3001]])] == [(1, 2)]


def test_rows_do_not_continue_at_the_other_side() -> None:
    assert [each.cells for each in regions([[0, 0, 1.0], [1.0, 0, 0]])] == [(2,), (3,)]


def test_equal_regions_are_in_reading_order() -> None:
    p = np.zeros((3, 5))
    p[2, 0] = p[0, 4] = p[0, 1] = 0.25
    assert [each.cells for each in regions(p)] == [(1,), (4,), (10,)]


def test_a_flat_distribution_is_one_region_in_the_middle() -> None:
    [only] = regions(np.full((4, 6), 1 / 24))
    assert (only.x, only.y, only.score) == pytest.approx((0.5, 0.5, 1 / 24))
    assert len(only.cells) == 24


def test_nothing_points_where_all_is_zero() -> None:
    assert regions(np.zeros((3, 3))) == []
