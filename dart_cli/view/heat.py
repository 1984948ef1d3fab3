"""Where pointers looked, as SVG over their screenshot; no image of its own, which pages may not embed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from bus.messages import PointerMap
from dart_cli.evaluation.heat_map import MOST_OPAQUE, heat_of, outline

LEVELS = 8
"""Opacities of cells; the lowest are not drawn."""


def heat_marks(pointed: Sequence[PointerMap], width: int, height: int) -> Markup:
    """Cells, regions and candidates of a step's pointers, on a screenshot of `width` x `height` pixels."""
    return Markup("").join(_marks(each, width, height) for each in pointed)


def _marks(pointed: PointerMap, width: int, height: int) -> Markup:
    heat = heat_of(pointed.heat, pointed.rows, pointed.columns)
    levels = np.rint(heat / 255 * LEVELS).astype(int)
    parts = [
        Markup('<path class="heat" fill-opacity="{}" d="{}"/>').format(
            f"{MOST_OPAQUE * level / LEVELS:.3g}", _cells(levels == level)
        )
        for level in range(1, LEVELS + 1)
        if (levels == level).any()
    ]
    edges = "".join(f"M{x0} {y0}L{x1} {y1}" for x0, y0, x1, y1 in outline(heat))
    parts.append(Markup('<path class="region" d="{}"/>').format(edges))
    scaled = Markup('<g transform="scale({} {})">{}</g>').format(
        f"{width / pointed.columns:g}", f"{height / pointed.rows:g}", Markup("").join(parts)
    )
    size = max(9.0, width / 22)
    named = [
        Markup('<text class="candidate" x="{}" y="{}" font-size="{}">{}</text>').format(
            f"{each.x * width:g}", f"{each.y * height:g}", f"{size:g}", nth
        )
        for nth, each in enumerate(pointed.candidates, start=1)
    ]
    return scaled + Markup("").join(named)


def _cells(kept: NDArray[np.bool_]) -> str:
    """A path of the cells [rows, columns], those beside one another in a row at once."""
    edges = np.diff(np.pad(kept.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return "".join(
        f"M{first} {row}h{after - first}v1h{first - after}z"
        for (row, first), (_, after) in zip(starts.tolist(), ends.tolist(), strict=True)
    )
