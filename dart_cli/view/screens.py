"""Screenshots as SVG, with what is drawn over them; no image of its own, which pages may not embed.

image_size     pixels of an encoded image; reduced, the same picture in fewer of them
screenshot     the picture of a screenshot with what is over it
action_marks   the marks of an action
heat_marks     where pointers looked
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from bus.errors import UserError
from bus.messages import PointerMap
from dart_cli.evaluation.marks import MOST_OPAQUE, Line, Ring, heat_of, marks_of, outline
from envs.contract.blobs import image_type
from envs.contract.screenshots import BROKEN, as_seen, seen_size

LEVELS = 8
"""Opacities of a pointer's cells; the lowest are not drawn."""
_SMALL = 400  # pixels across, below which pixels stay sharp when they are enlarged


def image_size(image: bytes) -> tuple[int, int] | None:
    """Pixels of an image that can be shown; its header alone is read."""
    if image_type(image) is None:
        return None
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return seen_size(opened)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def reduced(image: bytes, across: int) -> bytes:
    """Return the picture in at most so many pixels across, as WebP; itself where it has no more.

    Raises UserError for what is no picture.
    """
    try:
        with Image.open(io.BytesIO(image)) as opened:
            width, height = seen_size(opened)
            if width <= across:
                return image
            size = across, max(1, round(height * across / width))
            smaller = as_seen(opened).resize(size, Image.Resampling.LANCZOS)
    except BROKEN as error:
        raise UserError(f"a screenshot is no picture: {error}") from None
    file = io.BytesIO()
    smaller.save(file, "WEBP", quality=80)
    return file.getvalue()


def screenshot(
    picture: Markup, width: int, height: int, over: Markup | str = "", alt: str = "screenshot"
) -> Markup:
    """Return a picture of `width` x `height` pixels as it fits the page, with what is drawn over it."""
    small = " small" if width < _SMALL else ""
    return Markup(
        '<svg class="screen{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>'
    ).format(small, width, height, alt, picture, over)


def action_marks(action: Mapping[str, Any] | None, width: int) -> Markup:
    """Return the marks of an action, over its screenshot of that width."""
    return Markup("").join(map(_drawn, marks_of(action, width)))


def _drawn(mark: Line | Ring) -> Markup:
    if isinstance(mark, Line):
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in mark.points)
        return Markup('<path class="halo" d="{0}"/><path class="mark" d="{0}"/>').format(path)
    return Markup(
        '<circle class="halo" cx="{0}" cy="{1}" r="{2}"/><circle class="mark" cx="{0}" cy="{1}" '
        'r="{2}"/><circle class="dot" cx="{0}" cy="{1}" r="{3}"/>'
    ).format(mark.x, mark.y, f"{mark.radius:g}", f"{mark.radius / 5:g}")


def heat_marks(pointed: Sequence[PointerMap], width: int, height: int) -> Markup:
    """Cells, regions and candidates of a step's pointers, over its screenshot of these pixels."""
    return Markup("").join(_looked(each, width, height) for each in pointed)


def _looked(pointed: PointerMap, width: int, height: int) -> Markup:
    heat = heat_of(pointed)
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
    size = f"{max(9.0, width / 22):g}"
    named = [
        Markup('<text class="candidate" x="{}" y="{}" font-size="{}">{}</text>').format(
            f"{each.x * width:g}", f"{each.y * height:g}", size, nth
        )
        for nth, each in enumerate(pointed.candidates, start=1)
    ]
    return scaled + Markup("").join(named)


def _cells(kept: NDArray[np.bool_]) -> str:
    """Return a path of the cells [rows, columns], those beside one another in a row at once."""
    edges = np.diff(np.pad(kept.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return "".join(
        f"M{first} {row}h{after - first}v1h{first - after}z"
        for (row, first), (_, after) in zip(starts.tolist(), ends.tolist(), strict=True)
    )
