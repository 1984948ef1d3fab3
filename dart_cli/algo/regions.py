"""Regions of a pointer's distribution over the cells of a screen: its candidates from one forward pass.

    regions         the regions of a distribution, best first
    ranked_places   candidates for a verifier: the centres of regions, then of single cells

A region is a 4-connected set of cells, each above THRESHOLD of the largest probability (arXiv 2506.03143,
3.3). A greedy answer points at a region, and regions are displayed. A sampled action never uses them, since
its likelihood would change with the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import ArrayLike, NDArray

THRESHOLD = 0.3
"""A cell belongs to a region if its probability is above this share of the largest."""

OTHER_CELLS = 0.2
"""Single cells above this share of the largest probability are candidates too, ranked behind the regions."""


@dataclass(frozen=True)
class Region:
    """A set of adjacent cells, and the point that it stands for."""

    x: float  # centre weighted by probability, in fractions of the screen's width
    y: float  # in fractions of its height
    score: float  # mean probability of its cells
    cells: tuple[int, ...]  # row-major indices, ascending


def regions(probabilities: ArrayLike, top: int = 0, threshold: float = THRESHOLD) -> list[Region]:
    """Return the regions of `probabilities` [rows, columns], best first.

    The first `top` regions are returned, or all if `top` is 0. They are ranked by mean probability; among
    equals, the one with the first cell in reading order comes first. Sums are exact, so the order of the
    cells changes nothing. The list is empty if all probabilities are 0.
    """
    values = np.asarray(probabilities, dtype=np.float64)
    is_above = values > threshold * values.max(initial=0.0)
    ranked = [_region(cells, values) for cells in _connected(is_above)]
    # The sort is stable: regions of equal score stay in reading order.
    ranked.sort(key=lambda region: -region.score)
    return ranked[: top or None]


def ranked_places(probabilities: ArrayLike, most: int) -> list[tuple[float, float, float]]:
    """Return (x, y, probability) of at most `most` candidates for a verifier, best first.

    x and y are fractions of the screen. First come the centres of the regions of `probabilities` [rows,
    columns], then the centres of single cells, as GUI-Actor's verifier has them (arXiv 2506.03143, 3.4, and
    its released code).
    """
    values = np.asarray(probabilities, dtype=np.float64)
    rows, columns = values.shape
    places = [(region.x, region.y, region.score) for region in regions(values)]
    flat = values.ravel()
    cells = np.flatnonzero(flat > OTHER_CELLS * flat.max(initial=0.0))
    for cell in cells[np.argsort(-flat[cells], kind="stable")].tolist():
        row, column = divmod(cell, columns)
        centre = (column + 0.5) / columns, (row + 0.5) / rows
        if all(centre != (x, y) for x, y, _ in places):
            places.append((*centre, float(flat[cell])))
    return places[:most]


def _connected(is_above: NDArray[np.bool_]) -> list[list[int]]:
    """Return the 4-connected sets of the cells that are set: each ascending, ordered by their first cells."""
    rows, columns = is_above.shape
    waiting = dict.fromkeys(np.flatnonzero(is_above).tolist())
    components = []
    while waiting:
        first = next(iter(waiting))
        del waiting[first]
        cells = [first]
        for cell in cells:  # the list grows in this loop
            for near in _beside(cell, rows, columns):
                if near in waiting:
                    del waiting[near]
                    cells.append(near)
        components.append(sorted(cells))
    return components


def _beside(cell: int, rows: int, columns: int) -> Sequence[int]:
    """Return the cells above, below, left and right of a cell."""
    row, column = divmod(cell, columns)
    beside = []
    if row > 0:
        beside.append(cell - columns)
    if row + 1 < rows:
        beside.append(cell + columns)
    if column > 0:
        beside.append(cell - 1)
    if column + 1 < columns:
        beside.append(cell + 1)
    return beside


def _region(cells: list[int], values: NDArray[np.float64]) -> Region:
    rows, columns = values.shape
    weights = values.ravel()[cells].tolist()
    places = [divmod(cell, columns) for cell in cells]
    total = fsum(weights)
    x = fsum(p * (column + 0.5) for p, (_, column) in zip(weights, places, strict=True))
    y = fsum(p * (row + 0.5) for p, (row, _) in zip(weights, places, strict=True))
    return Region(x / total / columns, y / total / rows, total / len(cells), tuple(cells))
