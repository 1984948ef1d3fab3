"""Screenshots as SVG with marks over them. The SVG refers to the image by its address or anchor.

image_size     the width and height of an encoded image
reduced        the same image with fewer pixels
screenshot     a screenshot with marks over it
action_marks   the marks of actions
heat_marks     the marks of where pointers looked
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
"""Levels of opacity of a pointer's cells; cells of level 0 are not drawn."""
_SMALL = 400  # pixels across; the pixels of a smaller image stay sharp when it is enlarged


def image_size(image: bytes) -> tuple[int, int] | None:
    """Return the width and height of an image, from its header; None if it cannot be shown."""
    if image_type(image) is None:
        return None
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return seen_size(opened)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def reduced(image: bytes, across: int) -> bytes:
    """Return the image as WebP, at most `across` pixels wide; the same bytes if it is no wider.

    Raises UserError if it is not an image.
    """
    try:
        with Image.open(io.BytesIO(image)) as opened:
            width, height = seen_size(opened)
            if width <= across:
                return image
            size = across, max(1, round(height * across / width))
            smaller = as_seen(opened).resize(size, Image.Resampling.LANCZOS)
    except BROKEN as error:
        raise UserError(f"a screenshot is not an image: {error}") from None
    file = io.BytesIO()
    smaller.save(file, "WEBP", quality=80)
    return file.getvalue()


def screenshot(
    picture: Markup, width: int, height: int, over: Markup | str = "", alt: str = "screenshot"
) -> Markup:
    """Return a picture of `width` x `height` pixels, scaled to the page, with the marks `over` it."""
    small = " small" if width < _SMALL else ""
    return Markup(
        '<svg class="screen{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>'
    ).format(small, width, height, alt, picture, over)


def action_marks(actions: Sequence[Mapping[str, Any]], width: int) -> Markup:
    """Return the marks of actions over a screenshot that is `width` pixels wide."""
    return Markup("").join(map(_mark_svg, marks_of(actions, width)))


def _mark_svg(mark: Line | Ring) -> Markup:
    """Return a mark with a light edge, so that it is visible on any screenshot."""
    if isinstance(mark, Line):
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in mark.points)
        return Markup('<path class="halo" d="{0}"/><path class="mark" d="{0}"/>').format(path)
    return Markup(
        '<circle class="halo" cx="{0}" cy="{1}" r="{2}"/><circle class="mark" cx="{0}" cy="{1}" '
        'r="{2}"/><circle class="dot" cx="{0}" cy="{1}" r="{3}"/>'
    ).format(mark.x, mark.y, f"{mark.radius:g}", f"{mark.radius / 5:g}")


def heat_marks(pointed: Sequence[PointerMap], width: int, height: int) -> Markup:
    """Return the cells, regions and candidates of a step's pointers over a screenshot of that size."""
    return Markup("").join(_heat_svg(pointer_map, width, height) for pointer_map in pointed)


def _heat_svg(pointer_map: PointerMap, width: int, height: int) -> Markup:
    """Return the cells, regions and candidates of one pointer."""
    heat = heat_of(pointer_map)
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
        f"{width / pointer_map.columns:g}", f"{height / pointer_map.rows:g}", Markup("").join(parts)
    )
    size = f"{max(9.0, width / 22):g}"
    numbers = [
        Markup('<text class="candidate" x="{}" y="{}" font-size="{}">{}</text>').format(
            f"{candidate.x * width:g}", f"{candidate.y * height:g}", size, nth
        )
        for nth, candidate in enumerate(pointer_map.candidates, start=1)
    ]
    return scaled + Markup("").join(numbers)


def _cells(mask: NDArray[np.bool_]) -> str:
    """Return a path around the cells of a mask [rows, columns]; neighbours in a row are one rectangle."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return "".join(
        f"M{first} {row}h{after - first}v1h{first - after}z"
        for (row, first), (_, after) in zip(starts.tolist(), ends.tolist(), strict=True)
    )
