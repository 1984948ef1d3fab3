"""Evaluates the learning curves of a study: the cost of reaching a level, and bands over seeds.

    isotonic   the best rising curve through noisy points
    reach      where a curve first reaches a level
    band       mean and extremes of several curves on one grid

Pure. A curve is a sequence of (x, y) in order of x: trajectories, actions or minutes against success
in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[float, float]]


def isotonic(points: Points) -> list[tuple[float, float]]:
    """The non-decreasing curve nearest to `points` in least squares (pool adjacent violators).

    Success measured on some hundred episodes has an error of a few hundredths: the first noisy point
    above a level would come too early, as would a running maximum. Averaging the points that fall is
    not biased in either direction. Barlow et al., Statistical Inference under Order Restrictions (1972).
    Points of equal x are merged into their mean.
    """
    blocks: list[tuple[float, int, list[float]]] = []  # sum of y, points, xs
    for x, y in sorted(points):
        total, count, xs = y, 1, [x]
        while blocks and (blocks[-1][2][-1] == x or blocks[-1][0] / blocks[-1][1] >= total / count):
            before, more, earlier = blocks.pop()
            total, count, xs = total + before, count + more, earlier + xs
        blocks.append((total, count, xs))
    return [
        (x, total / count) for total, count, xs in blocks for x in dict.fromkeys((xs[0], xs[-1]))
    ]


def reach(curve: Points, level: float) -> float | None:
    """The x at which a rising curve first reaches `level`, interpolated linearly; None if it does not."""
    if not curve or curve[-1][1] < level:
        return None
    if curve[0][1] >= level:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= level:
            return x1 if y1 == y0 else x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    raise AssertionError("its last point is at the level")


def value_at(curve: Points, x: float) -> float:
    """The curve at `x`: linear between its points, constant beyond its ends."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return curve[-1][1]


@dataclass(frozen=True)
class Band:
    """Several curves on one grid."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(curves: Sequence[Points], points: int = 60) -> Band:
    """Mean, lowest and highest of `curves` over the range that all of them cover."""
    begin = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    grid = [begin + (end - begin) * index / (points - 1) for index in range(points)]
    rows = [[value_at(curve, x) for curve in curves] for x in grid]
    return Band(
        grid,
        [sum(row) / len(row) for row in rows],
        [min(row) for row in rows],
        [max(row) for row in rows],
    )
