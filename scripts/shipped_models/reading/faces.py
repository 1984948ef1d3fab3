"""The fonts of drawn screens, and which of them training never sees.

    "one"               DejaVu Sans at 11 px
    "many"              eight and more faces at 9 to 16 px, without the two below
    "held_out_font"     URW Gothic, as in rendered pages, or DejaVu Serif Bold where it is missing
    "held_out_size"     the faces of "many" at 12 px

The Debian package fonts-dejavu-core has the faces that are always there; those of fonts-urw-base35
come to them where they are installed. Text is laid out letter by letter (no ligatures), so that the
middle of each character is movements without asking the font again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal

from PIL import ImageFont

from bus.errors import UserError

Faces = Literal["one", "many", "held_out_font", "held_out_size"]

DEJAVU = Path("/usr/share/fonts/truetype/dejavu")
URW = Path("/usr/share/fonts/opentype/urw-base35")

PLAIN = "DejaVuSans"
HELD_OUT_FONTS = ("URWGothic-Book", "DejaVuSerif-Bold")
"""Never drawn in training; tests draw the first that is installed."""

HELD_OUT_SIZE = 12

SIZES = (9, 10, 11, 13, 14, 15, 16)
_SIZE_WEIGHTS = (3, 4, 5, 5, 4, 2, 3)

_ALWAYS = {
    "DejaVuSans": 6,
    "DejaVuSans-Bold": 3,
    "DejaVuSerif": 3,
    "DejaVuSansMono": 3,
    "DejaVuSansMono-Bold": 1,
}
_WHERE_INSTALLED = {
    "NimbusSans-Regular": 5,
    "NimbusSans-Bold": 3,
    "NimbusRoman-Regular": 4,
    "NimbusMonoPS-Regular": 1,
    "NimbusSansNarrow-Regular": 1,
    "C059-Roman": 1,
    "P052-Roman": 1,
    "URWBookman-Light": 1,
}
"""Name of a face -> how often it is drawn, in shares of all."""


_ADVANCES: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
"""Face -> a character, or two in a row -> how far the pen moves for the last; filled as they come."""


@dataclass(frozen=True)
class Face:
    """One font at one size; `name` and `size` are its identity."""

    name: str
    size: int  # pixels

    @property
    def font(self) -> ImageFont.FreeTypeFont:
        """Pillow's font."""
        return _font(self.name, self.size)

    @property
    def height(self) -> int:
        """Pixels from the top of the highest letter to the bottom of the lowest."""
        return _height(self.name, self.size)

    def width(self, text: str) -> float:
        """Return the pixels that the text takes in a line."""
        return self.advances(text)[-1] if text else 0.0

    def advances(self, text: str) -> list[float]:
        """Return where each character ends [characters], in pixels from the text's left."""
        movements = _ADVANCES[self.name, self.size]
        at, before, ends = 0.0, "", []
        for character in text:
            pair = before + character
            if pair not in movements:
                movements[pair] = self._advance(before, character)
            at += movements[pair]
            ends.append(at)
            before = character
        return ends

    def _advance(self, before: str, character: str) -> float:
        """Return how far the pen moves for `character` after `before`, kerning included."""
        if not before:
            return float(self.font.getlength(character))
        return float(self.font.getlength(before + character) - self.font.getlength(before))


def draw_face(rng: Random, faces: Faces) -> Face:
    """Return a face of the set, at random."""
    if faces == "one":
        return Face(PLAIN, 11)
    name = rng.choices(*_installed())[0]
    if faces == "held_out_font":
        name = next(font for font in HELD_OUT_FONTS if _path(font).exists())
    if faces == "held_out_size":
        return Face(name, HELD_OUT_SIZE)
    return Face(name, rng.choices(SIZES, _SIZE_WEIGHTS)[0])


@lru_cache(maxsize=1)
def _installed() -> tuple[list[str], list[int]]:
    shares = _ALWAYS | {name: n for name, n in _WHERE_INSTALLED.items() if _path(name).exists()}
    return list(shares), list(shares.values())


def _path(name: str) -> Path:
    return DEJAVU / f"{name}.ttf" if name.startswith("DejaVu") else URW / f"{name}.otf"


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(str(_path(name)), size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise UserError(f"{_path(name)}: {error}; install fonts-dejavu-core") from error


@lru_cache(maxsize=256)
def _height(name: str, size: int) -> int:
    ascent, descent = _font(name, size).getmetrics()
    return ascent + descent
