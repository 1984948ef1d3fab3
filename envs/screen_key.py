"""A key that is the same for screens that count as one state, though their pixels differ a little.

    screen_key   digest of the pixels without carets and without the parts that are ignored
    coarse_key   digest of light and dark in a coarse picture: for an explorer without a tree

A caret blinks, so that a screen has two pictures. It is a vertical line of at most two pixels' width, from
`CARET` pixels' height on, darker or lighter than what is on both sides of it. Strokes of letters are
shorter in the fonts of forms, and stay. All else counts to the pixel: a key of a coarse picture
that forgives a clock's digits forgives a typed letter as often (benchmarks/results/screen_keys.json). That is wrong
where steps are compared, and wanted where screens are counted.

A module of its own because it imports numpy, which environments do without unless keys are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CARET = (13, 64)
"""Pixels that a caret is high, least and most."""

CONTRAST = 24
"""Least difference in grey of a caret from both sides, of 255."""

COARSE = 24
"""Cells of a coarse picture, across and down."""

STEP = 6
"""Least difference in grey of two neighbouring cells that counts, of 255."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of a screen, as fractions of its width and height."""


def screen_key(screen: Image.Image, ignore: Sequence[Box] = ()) -> str:
    """32 hex digits: the same for two screens of one size that differ in carets and `ignore` alone."""
    shown = screen.convert("RGB")
    pixels = np.array(shown)
    height, width = pixels.shape[:2]
    paint_over_carets(pixels, np.asarray(shown.convert("L")))
    for left, top, right, bottom in ignore:
        pixels[
            round(top * height) : round(bottom * height), round(left * width) : round(right * width)
        ] = 0
    digest = hashlib.blake2b(f"{width}x{height}".encode(), digest_size=16)
    digest.update(pixels.data)
    return digest.hexdigest()


def coarse_key(screen: Image.Image) -> str:
    """32 hex digits: the same for two screens whose neighbouring cells are lighter or darker alike.

    A difference hash: of each cell and the next on its right, whether it is darker, lighter or neither.
    """
    small = screen.convert("L").resize((COARSE + 1, COARSE), Image.Resampling.BOX)
    cells = np.asarray(small, dtype=np.int16)
    steps = cells[:, 1:] - cells[:, :-1]
    signs = (np.sign(steps) * (np.abs(steps) >= STEP)).astype(np.int8)
    return hashlib.blake2b(signs.tobytes(), digest_size=16).hexdigest()


def paint_over_carets(pixels: NDArray[np.uint8], grey: NDArray[np.uint8]) -> None:
    """Paint over each caret of an image [height, width, 3] what is on its left."""
    for tone in (grey, 255 - grey):  # darker than its sides, lighter
        for wide in (1, 2):
            for top, bottom, left in _lines(tone, wide):
                pixels[top:bottom, left : left + wide] = pixels[top:bottom, left - 1 : left]


def _lines(tone: NDArray[np.uint8], wide: int) -> list[tuple[int, int, int]]:
    """Top, bottom and left of lines `wide` pixels wide whose tone [height, width] is below both sides'."""
    least, most = CARET
    if tone.shape[0] < least or tone.shape[1] < wide + 2:
        return []
    inside = tone[:, 1:-1] if wide == 1 else np.maximum(tone[:, 1:-2], tone[:, 2:-1])
    sides = np.minimum(tone[:, : -wide - 1], tone[:, wide + 1 :])
    is_line = np.maximum(sides, CONTRAST) - CONTRAST >= np.maximum(inside, 1)
    probes = is_line[:: least // 2]  # a caret is on two of them, one after the other
    columns = np.flatnonzero((probes[:-1] & probes[1:]).any(axis=0))
    found: list[tuple[int, int, int]] = []
    for column in columns:
        edges: Any = np.flatnonzero(np.diff(is_line[:, column], prepend=False, append=False))
        found += [
            (int(top), int(bottom), int(column) + 1)
            for top, bottom in zip(edges[::2], edges[1::2], strict=True)
            if least <= bottom - top <= most
        ]
    return found
