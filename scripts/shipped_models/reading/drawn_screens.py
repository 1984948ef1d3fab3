"""Screens drawn by Pillow in a millisecond or two: text, buttons, forms, lists, tables, shapes.

Each screen is one or several of `layouts.py`, one below the other, with random words. Nothing is kept
between screens but fonts and masks, so that training draws as many as it wants.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from scripts.shipped_models.reading.faces import Faces
from scripts.shipped_models.reading.layouts import LAYOUTS, paragraph
from scripts.shipped_models.reading.pen import Pen
from scripts.shipped_models.reading.scene import Scene

BAND = 62
"""Least height of a band of a screen, in pixels."""


def drawn_scene(
    seed: int,
    *,
    size: tuple[int, int],
    faces: Faces,
    held_out_words: bool,
    dense: bool = False,
) -> Scene:
    """Return the screen of this seed; `dense` is text alone, with all printable characters."""
    words = "unseen" if held_out_words else "seen"
    kind = "dense" if dense else "mixed"
    key = f"drawn/{seed}/{size[0]}x{size[1]}/{faces}/{words}/{kind}"
    rng = Random(key)
    pen = Pen(rng, size, faces, held_out_words)
    width, height = size
    margin = rng.randint(1, 6)
    if dense:
        paragraph(pen, (margin, margin, width - margin, height - 1), dense=True)
        return pen.scene(key)
    most = max(1, height // BAND)
    bands = max(rng.randint(1, most), rng.randint(1, most))
    cuts = [margin, *_cuts(rng, bands, margin, height - margin), height - margin]
    for top, bottom in pairwise(cuts):
        fitting = [entry for entry in LAYOUTS.values() if entry[1] <= bottom - top]
        _, _, layout = rng.choices(fitting, [weight for weight, _, _ in fitting])[0]
        layout(pen, (margin, top + 2, width - margin, bottom - 2))
    return pen.scene(key)


def _cuts(rng: Random, bands: int, top: int, bottom: int) -> list[int]:
    """Return where one band ends and the next begins; each is at least three quarters of BAND high."""
    high = (bottom - top) / bands
    slack = max(0, int((high - BAND * 0.75) / 2))
    return [round(top + high * at) + rng.randint(-slack, slack) for at in range(1, bands)]
