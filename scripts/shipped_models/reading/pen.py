"""Draws one screen by Pillow and keeps what it drew: every character's middle, every thing's box.

Theme       the colours of one screen, light or dark; text has a contrast of 3 to 1 at least
Pen         text, boxes, shapes; `scene()` is the result
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from envs.suites.embedded.draw import END, ICONS, chunk
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.faces import Face, Faces, draw_face
from scripts.shipped_models.reading.scene import Box, Glyph, Scene, Thing

Rgb = tuple[int, int, int]
Area = tuple[int, int, int, int]
"""Left, top, right, bottom of what may be drawn in."""

CONTRAST = 3.0
"""Least contrast of text and ground, as WCAG 2.2 defines it."""

COLOURS: dict[str, tuple[Rgb, ...]] = {
    "red": ((226, 29, 42), (255, 0, 0), (205, 40, 40)),
    "blue": ((28, 82, 235), (0, 0, 255), (60, 110, 220)),
    "green": ((18, 158, 62), (0, 128, 0), (40, 160, 60)),
    "yellow": ((255, 221, 20), (255, 255, 0)),
    "orange": ((255, 138, 0), (255, 165, 0)),
    "purple": ((136, 38, 196), (128, 0, 128)),
    "pink": ((255, 118, 188), (255, 192, 203)),
    "cyan": ((0, 204, 218), (0, 255, 255)),
    "aqua": ((0, 255, 255),),
    "magenta": ((255, 0, 255),),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (248, 248, 248)),
    "grey": ((128, 128, 128),),
    "gray": ((128, 128, 128),),
    "brown": ((139, 69, 19), (165, 42, 42)),
    "navy": ((0, 0, 128),),
    "teal": ((0, 128, 128),),
    "olive": ((128, 128, 0),),
    "lime": ((0, 255, 0),),
    "maroon": ((128, 0, 0),),
}
"""Names that instructions use, and what they look like; each is drawn a little lighter or darker."""

SAME_LOOK = {"aqua": "cyan", "cyan": "aqua", "grey": "gray", "gray": "grey"}
"""Two names of one colour, of which a screen uses one."""

SHAPES = ("circle", "square", "triangle", "rectangle", "star", "diamond")

_NOISE_SIDE = 512


def luminance(colour: Rgb) -> float:
    """Return the relative luminance, 0 to 1 (WCAG 2.2)."""
    red, green, blue = (
        v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Rgb, other: Rgb) -> float:
    """Return the contrast ratio, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@dataclass(frozen=True)
class Theme:
    """The colours of a screen's parts."""

    ground: Rgb
    ink: Rgb
    control: Rgb  # buttons
    control_ink: Rgb
    field: Rgb
    field_ink: Rgb
    edge: Rgb
    link: Rgb
    selected: Rgb  # the row or tab that is selected
    chosen_ink: Rgb


def draw_theme(rng: Random) -> Theme:
    """Return a random theme: light in three of four screens, dark in the others."""
    light = rng.random() < 0.75
    ground = _near(rng, rng.choice((255, 250, 240, 225)) if light else rng.choice((10, 30, 50)))
    control = _near(rng, rng.randint(190, 250) if light else rng.randint(20, 90))
    if rng.random() < 0.2:
        control = rng.choice(COLOURS[rng.choice(("blue", "green", "navy", "teal", "red", "grey"))])
    field = (255, 255, 255) if light and rng.random() < 0.7 else _near(rng, 245 if light else 15)
    selected = _near(rng, 200 if light else 100)
    if rng.random() < 0.5:
        selected = rng.choice(((28, 82, 235), (51, 122, 183), (40, 60, 90), (255, 221, 120)))
    edge = _near(rng, rng.randint(60, 190) if light else rng.randint(90, 200))
    link: Rgb = (0, 0, 238) if light else (130, 170, 255)
    if light and rng.random() < 0.4:
        link = rng.choice(((5, 99, 193), (51, 102, 187), (17, 85, 204), (0, 0, 200)))
    return Theme(
        ground=ground,
        ink=ink_on(rng, ground),
        control=control,
        control_ink=ink_on(rng, control),
        field=field,
        field_ink=ink_on(rng, field),
        edge=edge,
        link=link if contrast(link, ground) >= CONTRAST + 1 else ink_on(rng, ground),
        selected=selected,
        chosen_ink=ink_on(rng, selected),
    )


def ink_on(rng: Random, ground: Rgb) -> Rgb:
    """Return a colour of text that can be read on `ground`; most are nearly black or white."""
    extreme: Rgb = max(((0, 0, 0), (255, 255, 255)), key=lambda each: contrast(each, ground))
    if rng.random() < 0.4:
        return extreme
    share = rng.random() * (0.2 if rng.random() < 0.6 else 0.6)
    tint = _near(rng, rng.choice((40, 128, 200)), 60)
    mixed = _mix(extreme, tint, share)
    return mixed if contrast(mixed, ground) >= CONTRAST + 1 else extreme


def _near(rng: Random, grey: int, spread: int = 12) -> Rgb:
    first, second, third = (min(255, max(0, grey + rng.randint(-spread, spread))) for _ in range(3))
    return first, second, third


def _mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    first, second, third = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return first, second, third


class Pen:
    """One screen while it is drawn."""

    def __init__(self, rng: Random, size: tuple[int, int], faces: Faces, held_out: bool) -> None:
        self.rng = rng
        self.size = size
        self.held_out = held_out
        self.plain = faces == "one"
        self.theme = draw_theme(rng)
        self.glyphs: list[Glyph] = []
        self.things: list[Thing] = []
        self._faces = [draw_face(rng, faces) for _ in range(1 if faces == "one" else 3)]
        self._image = _ground(rng, size, self.theme)
        self._draw = ImageDraw.Draw(self._image)

    # --- what to write -------------------------------------------------------------------------

    def face(self) -> Face:
        """Return the screen's first face, or one of its two others."""
        return self._faces[0] if self.rng.random() < 0.7 else self.rng.choice(self._faces)

    def word(self) -> str:
        """Return a word in random case."""
        return words.cased(self.rng, words.word(self.rng, self.held_out))

    def label(self, face: Face, width: float) -> str:
        """Return a label that fits into the width."""
        return self._fitting(face, width, words.label)

    def value(self, face: Face, width: float) -> str:
        """Return what a field of this width holds."""
        return self._fitting(face, width, words.value)

    def _fitting(self, face: Face, width: float, make: Callable[[Random, bool], str]) -> str:
        for _ in range(4):
            text = make(self.rng, self.held_out)
            if face.width(text) <= width:
                return text
        for _ in range(8):
            text = words.word(self.rng, self.held_out)
            if face.width(text) <= width:
                return text
        return ""

    # --- drawing -------------------------------------------------------------------------------

    def text(self, left: float, middle: float, text: str, face: Face, ink: Rgb) -> Box:
        """Draw one line of text from `left`, around `middle`; return its box."""
        x, top = round(left), round(middle - face.height / 2)
        self._draw.text((x, top), text, font=face.font, fill=ink)
        y, before = top + face.height / 2, 0.0
        ends = face.advances(text)
        for character, end in zip(text, ends, strict=True):
            if character != " ":
                self.glyphs.append(Glyph(character, x + (before + end) / 2, y))
            before = end
        return x, top, x + before, top + face.height

    def centred(self, box: Box, text: str, face: Face, ink: Rgb) -> None:
        """Draw one line of text in the middle of a box."""
        left, top, right, bottom = box
        self.text((left + right - face.width(text)) / 2, (top + bottom) / 2, text, face, ink)

    def box(self, box: Area, fill: Rgb | None, edge: Rgb | None = None, radius: int = 0) -> None:
        """Draw a rectangle with pixels left <= x < right."""
        left, top, right, bottom = box
        inside = (left, top, right - 1, bottom - 1)
        if radius:
            self._draw.rounded_rectangle(inside, radius, fill=fill, outline=edge)
        else:
            self._draw.rectangle(inside, fill=fill, outline=edge)

    def line(self, points: list[tuple[float, float]], colour: Rgb, width: int = 1) -> None:
        """Draw a line through points."""
        self._draw.line(points, fill=colour, width=width)

    def ellipse(self, box: Area, fill: Rgb | None, edge: Rgb | None = None) -> None:
        """Draw the ellipse in a rectangle."""
        left, top, right, bottom = box
        self._draw.ellipse((left, top, right - 1, bottom - 1), fill=fill, outline=edge)

    def shape(self, name: str, box: Area, fill: Rgb) -> None:
        """Draw a shape of SHAPES that fills the box, with an outline where the ground is too like it."""
        left, top, right, bottom = box
        if sum(abs(a - b) for a, b in zip(fill, self.theme.ground, strict=True)) < 110:
            edge = ink_on(self.rng, self.theme.ground)
            self._image.paste(edge, (left, top), _mask(name, right - left, bottom - top))
            left, top, right, bottom = left + 1, top + 1, right - 1, bottom - 1
        self._image.paste(fill, (left, top), _mask(name, right - left, bottom - top))

    def colour(self, name: str) -> Rgb:
        """Return a random variant of a colour of COLOURS."""
        first, second, third = (
            min(255, max(0, v + self.rng.randint(-10, 10))) for v in self.rng.choice(COLOURS[name])
        )
        return first, second, third

    def add(self, thing: Thing) -> None:
        """List a thing."""
        self.things.append(thing)

    def scene(self, key: str) -> Scene:
        """Return what has been drawn."""
        sizes = {thing.size for thing in self.things}
        if not sizes >= {"small", "large"}:
            self.things = [replace(thing, size="") for thing in self.things]
        return Scene(key, encode(self._image), tuple(self.glyphs), tuple(self.things))


def encode(image: Image.Image) -> bytes:
    """Return an RGB image as a PNG that is not compressed: a tenth of a millisecond (PNG specification, 11.2)."""
    width, height = image.size
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = np.asarray(image).reshape(height, -1)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows.tobytes(), 0))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + END


def _ground(rng: Random, size: tuple[int, int], theme: Theme) -> Image.Image:
    """Return a ground that is plain in half of the screens, else lightly noisy or a gradient."""
    kind = rng.random()
    if kind < 0.5:
        return Image.new("RGB", size, theme.ground)
    width, height = size
    pixels = np.empty((height, width, 3), np.float32)
    pixels[:] = theme.ground
    if kind >= 0.75:
        # Text on it loses a quarter of its contrast at most, which ink_on has to spare.
        away = rng.choice((18, 9)) if luminance(theme.ground) < 0.2 else rng.choice((-18, -9))
        if rng.random() < 0.5:
            pixels += np.linspace(0, away, width, dtype=np.float32)[None, :, None]
        else:
            pixels += np.linspace(0, away, height, dtype=np.float32)[:, None, None]
    if kind < 0.8:
        x, y = (rng.randrange(_NOISE_SIDE - min(side, _NOISE_SIDE - 1)) for side in size)
        noise = np.resize(_noise(), (max(_NOISE_SIDE, height), max(_NOISE_SIDE, width)))
        pixels += noise[y : y + height, x : x + width, None] * rng.uniform(1, 5)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=1)
def _noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((_NOISE_SIDE, _NOISE_SIDE), np.float32)


@lru_cache(maxsize=2048)
def _mask(name: str, width: int, height: int) -> Image.Image:
    """Return the coverage of a shape, anti-aliased."""
    big = Image.new("L", (width * 4, height * 4), 0)
    draw = ImageDraw.Draw(big)
    if name in ("square", "rectangle"):
        big.paste(255, (0, 0, *big.size))
    elif name == "circle":
        draw.ellipse((0, 0, big.width - 1, big.height - 1), fill=255)
    else:
        ((_, points),) = ICONS[name]
        draw.polygon([(x * big.width, y * big.height) for x, y in points], fill=255)
    return big.reduce(4)
