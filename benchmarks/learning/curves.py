"""Evaluates the learning curves of a study: the cost of reaching a level, and bands over seeds.

    isotonic   the best rising curve through noisy points
    reach      where a curve first reaches a level
    band       mean and extremes of several curves on one grid

Pure. A curve is a sequence of (x, y) in order of x: trajectories, actions or minutes against success
in [0, 1].

ArmLine    one arm's curves, one for each seed
ArmPanel   lines on one pair of axes
draw       panels side by side, a PNG: a line for each arm, the range over its seeds as a band
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Points = Sequence[tuple[float, float]]


def isotonic(points: Points) -> list[tuple[float, float]]:
    """Return the non-decreasing curve nearest to `points` in least squares (pool adjacent violators).

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
    """Return the x at which a rising curve first reaches `level`, interpolated linearly; None if it does not."""
    if not curve or curve[-1][1] < level:
        return None
    if curve[0][1] >= level:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= level:
            return x1 if y1 == y0 else x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    raise AssertionError("its last point is at the level")


def value_at(curve: Points, x: float) -> float:
    """Return the curve at `x`: linear between its points, constant beyond its ends."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return curve[-1][1]


@dataclass(frozen=True)
class Band:
    """The mean and the limits of several curves on one grid."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(curves: Sequence[Points], points: int = 60) -> Band:
    """Return the mean, lowest and highest of `curves` over the range that all of them cover."""
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


# --- pictures -------------------------------------------------------------------------------

PALETTE = (
    "#2563eb",
    "#059669",
    "#d97706",
    "#db2777",
    "#7c3aed",
    "#0891b2",
    "#65a30d",
    "#b91c1c",
)


@dataclass(frozen=True)
class ArmLine:
    """One arm."""

    label: str
    curves: Sequence[Points]
    colour: str
    is_bold: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class ArmPanel:
    """One panel of lines that are compared."""

    title: str
    x_label: str
    lines: Sequence[ArmLine]
    level: float | None = None  # drawn across
    y_label: str = "held-out success"


def draw(path: Path, panels: Sequence[ArmPanel], *, columns: int) -> None:
    """Write the panels, rows of `columns`, sharing their y axis, a success."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.8 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        for line in panel.lines:
            limits = band(line.curves)
            width = 2.6 if line.is_bold else 1.4
            style = "--" if line.is_dashed else "-"
            axis.plot(
                limits.x, limits.mean, style, color=line.colour, linewidth=width, label=line.label
            )
            if len(line.curves) > 1:
                axis.fill_between(limits.x, limits.low, limits.high, color=line.colour, alpha=0.13)
        if panel.level is not None:
            axis.axhline(panel.level, color="#6b7280", linewidth=0.8, linestyle=":")
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.set_xlabel(panel.x_label)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel(panels[0].y_label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
