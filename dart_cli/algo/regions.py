"""Regions of a pointer's distribution over the cells of a screen: its candidates from one forward pass.

Cells above THRESHOLD of the largest probability, joined to 4-connected regions (arXiv 2506.03143, 3.3). They
are what a greedy answer points at and what is shown; never a sampled action, whose likelihood would change
with the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import ArrayLike, NDArray

THRESHOLD = 0.3
"""A cell belongs to a region where its probability is above this share of the largest."""

OTHER_CELLS = 0.2
"""Cells above this share of the largest probability are candidates behind the regions."""


@dataclass(frozen=True)
class Region:
    """Adjacent cells, and where they point."""

    x: float  # centre weighted by probability, in fractions of the screen's width
    y: float  # and of its height
    score: float  # mean probability of its cells
    cells: tuple[int, ...]  # row-major indices, ascending


def regions(probabilities: ArrayLike, top: int = 0, threshold: float = THRESHOLD) -> list[Region]:
    """Return the regions of `probabilities` [rows, columns], best first: the first `top`, or all for 0.

    Ranked by mean probability; of equal ones the first is that with the first cell in reading order. Sums are
    exact, so the order of the cells changes nothing. Where all probabilities are 0 there is none.
    """
    values = np.asarray(probabilities, dtype=np.float64)
    kept = values > threshold * values.max(initial=0.0)
    found = [_region(cells, values) for cells in _connected(kept)]
    found.sort(key=lambda region: -region.score)  # stable: in reading order where scores are equal
    return found[: top or None]


def ranked_places(probabilities: ArrayLike, most: int) -> list[tuple[float, float, float]]:
    """(x, y, probability) of at most `most` candidates for a verifier, best first; x, y in fractions of the screen.

    First the centres of the regions of `probabilities` [rows, columns], then the centres of single cells, as
    GUI-Actor's verifier has them (arXiv 2506.03143, 3.4, and its released code).
    """
    values = np.asarray(probabilities, dtype=np.float64)
    rows, columns = values.shape
    found = [(region.x, region.y, region.score) for region in regions(values)]
    flat = values.ravel()
    cells = np.flatnonzero(flat > OTHER_CELLS * flat.max(initial=0.0))
    for cell in cells[np.argsort(-flat[cells], kind="stable")].tolist():
        row, column = divmod(cell, columns)
        place = (column + 0.5) / columns, (row + 0.5) / rows
        if all(place != (x, y) for x, y, _ in found):
            found.append((*place, float(flat[cell])))
    return found[:most]


def _connected(kept: NDArray[np.bool_]) -> list[list[int]]:
    """4-connected cells of `kept`, each list ascending, the lists by their first cells."""
    rows, columns = kept.shape
    waiting = dict.fromkeys(np.flatnonzero(kept).tolist())
    found = []
    while waiting:
        first = next(iter(waiting))
        del waiting[first]
        cells = [first]
        for cell in cells:  # grows
            for near in _beside(cell, rows, columns):
                if near in waiting:
                    del waiting[near]
                    cells.append(near)
        found.append(sorted(cells))
    return found


def _beside(cell: int, rows: int, columns: int) -> Sequence[int]:
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
