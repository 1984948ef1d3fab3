"""The canvas: flat fills, cached anti-aliased shapes and text; and its bytes, as PNG or JPEG.

The PNG is lossless, with palette indices: one byte a pixel, no filter, deflate level 1. At 448x336 this
takes a third of the time of JPEG (benchmarks/speed/embedded.py measures both). This module writes the PNG
itself, since with Pillow's writer (mode P, level 1, the same pixels) suite `mini` makes 0.60 of the steps/s
at 168x168, and suite `desk` 0.93 to 0.99 at 448x336.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from envs.contract.options import ImageEncoding
from envs.suites.embedded.theme import Colour, Palette

Point = tuple[float, float]
SUPERSAMPLE = 4


class Rect(NamedTuple):
    """Pixels x0 <= x < x1, y0 <= y < y1."""

    x0: int
    y0: int
    x1: int
    y1: int

    @property
    def width(self) -> int:
        """Pixels from left to right."""
        return self.x1 - self.x0

    @property
    def height(self) -> int:
        """Pixels from top to bottom."""
        return self.y1 - self.y0

    @property
    def centre(self) -> tuple[int, int]:
        """The pixel in the middle."""
        return (self.x0 + self.x1) // 2, (self.y0 + self.y1) // 2

    def contains(self, x: int, y: int) -> bool:
        """Return True if the pixel is inside."""
        return self.x0 <= x < self.x1 and self.y0 <= y < self.y1

    def inset(self, dx: int, dy: int | None = None) -> Rect:
        """Return this rectangle, smaller by dx on the left and right, by dy (default dx) above and below."""
        dy = dx if dy is None else dy
        return Rect(self.x0 + dx, self.y0 + dy, self.x1 - dx, self.y1 - dy)

    def cut(self, other: Rect) -> Rect:
        """Return the intersection; empty (x1 <= x0) if they do not overlap."""
        x0, y0, x1, y1 = other
        if x0 <= self.x0 and y0 <= self.y0 and x1 >= self.x1 and y1 >= self.y1:
            return self
        return Rect(
            max(self.x0, other.x0),
            max(self.y0, other.y0),
            min(self.x1, other.x1),
            min(self.y1, other.y1),
        )

    def overlaps(self, other: Rect) -> bool:
        """Return True if the rectangles share a pixel."""
        part = self.cut(other)
        return part.x0 < part.x1 and part.y0 < part.y1

    def centred(self, width: int, height: int) -> Rect:
        """Return a rectangle of that size in the middle of this one."""
        x0 = self.x0 + (self.width - width) // 2
        y0 = self.y0 + (self.height - height) // 2
        return Rect(x0, y0, x0 + width, y0 + height)


class Canvas:
    """A screen being drawn: palette indices in a Pillow image of mode L."""

    def __init__(
        self,
        image: Image.Image,
        palette: Palette,
        ground: Colour,
        origin: tuple[int, int] = (0, 0),
    ) -> None:
        self.image = image
        self.palette = palette
        self.ground = ground  # the present background
        self.origin = origin

    @classmethod
    def blank(cls, width: int, height: int, palette: Palette, colour: Colour) -> Canvas:
        """Return a canvas of one colour."""
        return cls(Image.new("L", (width, height), palette.index(colour)), palette, colour)

    def fill(self, box: Rect, colour: Colour) -> None:
        """Paint a rectangle."""
        if box.width > 0 and box.height > 0:
            ox, oy = self.origin
            shifted = (box.x0 - ox, box.y0 - oy, box.x1 - ox, box.y1 - oy)
            self.image.paste(self.palette.index(colour), shifted)

    def frame(self, box: Rect, colour: Colour, thickness: int = 1) -> None:
        """Paint the outline of a rectangle, on its inside."""
        x0, y0, x1, y1 = box
        self.fill(Rect(x0, y0, x1, y0 + thickness), colour)
        self.fill(Rect(x0, y1 - thickness, x1, y1), colour)
        self.fill(Rect(x0, y0, x0 + thickness, y1), colour)
        self.fill(Rect(x1 - thickness, y0, x1, y1), colour)

    def rounded(
        self, box: Rect, radius: int, colour: Colour, *, edge: Colour | None = None
    ) -> None:
        """Paint a rectangle with round corners, with an outline of one pixel if `edge` is given."""
        if box.width <= 0 or box.height <= 0:
            return
        radius = min(radius, box.width // 2, box.height // 2)
        size, ground = (box.width, box.height), self.ground
        self._paste(_rounded_tile(self.palette, size, radius, colour, edge, ground), box.x0, box.y0)

    def icon(self, name: str, box: Rect, colour: Colour, on: Colour | None = None) -> None:
        """Paint an icon of ICONS, scaled to the square in the middle of `box`."""
        side = min(box.width, box.height)
        if side > 0:
            square = box.centred(side, side)
            tile = _tile(self.palette, "icon", name, side, 0, colour, on or self.ground)
            self._paste(tile, square.x0, square.y0)

    def ellipse(self, box: Rect, colour: Colour, on: Colour | None = None) -> None:
        """Paint the ellipse that fills `box`."""
        ground = on or self.ground
        tile = _tile(self.palette, "ellipse", "", box.width, box.height, colour, ground)
        self._paste(tile, box.x0, box.y0)

    def text(
        self, x: int, y: int, text: str, size: int, colour: Colour, on: Colour | None = None
    ) -> None:
        """Write one line whose box begins at (x, y) and is `line_height(size)` high."""
        if text:
            tile = _tile(self.palette, "text", text, size, 0, colour, on or self.ground)
            self._paste(tile, x, y)

    @contextmanager
    def on(self, ground: Colour) -> Iterator[None]:
        """Use `ground` as the background while inside."""
        before, self.ground = self.ground, ground
        yield
        self.ground = before

    def dim(self) -> None:
        """Darken everything that has been drawn so far."""
        self.image = self.image.point(self.palette.dim_table)

    @contextmanager
    def clip(self, box: Rect) -> Iterator[Canvas]:
        """Yield a canvas that draws inside `box` only, in the same coordinates."""
        ox, oy = self.origin
        part = self.image.crop((box.x0 - ox, box.y0 - oy, box.x1 - ox, box.y1 - oy))
        inner = Canvas(part, self.palette, self.ground, (box.x0, box.y0))
        yield inner
        self.image.paste(inner.image, (box.x0 - ox, box.y0 - oy))

    def _paste(self, tile: Image.Image, x: int, y: int) -> None:
        self.image.paste(tile, (x - self.origin[0], y - self.origin[1]))


@lru_cache(maxsize=64)
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font: it needs no font file, and every machine draws the same."""
    loaded = ImageFont.load_default(size)
    assert isinstance(loaded, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return loaded


@lru_cache(maxsize=64)
def line_height(size: int) -> int:
    """Return the height of a line of text, pixels."""
    ascent, descent = font(size).getmetrics()
    return ascent + descent


@lru_cache(maxsize=16384)
def text_width(text: str, size: int) -> int:
    """Return the width of a line of text, pixels."""
    return math.ceil(font(size).getlength(text))


@lru_cache(maxsize=16384)
def fit_text(text: str, size: int, width: int) -> str:
    """Return the text, or as much of its beginning as fits into `width`, followed by dots."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep and text_width(text[:keep] + "...", size) > width:
        keep -= 1
    return text[:keep] + "..." if keep else ""


@lru_cache(maxsize=8192)
def _tile(
    palette: Palette, kind: str, what: str, width: int, height: int, colour: Colour, on: Colour
) -> Image.Image:
    """Return an image of a shape: its coverage, mapped to palette entries between `on` and `colour`."""
    return _mask(kind, what, width, height).point(palette.ramp(colour, on))


@lru_cache(maxsize=4096)
def _rounded_tile(
    palette: Palette,
    size: tuple[int, int],
    radius: int,
    colour: Colour,
    edge: Colour | None,
    ground: Colour,
) -> Image.Image:
    """Return an image of a rectangle with round corners on `ground`."""
    canvas = Canvas.blank(*size, palette, ground)
    box = Rect(0, 0, *size)
    _draw_rounded(canvas, box, radius, edge or colour, ground)
    if edge is not None:
        _draw_rounded(canvas, box.inset(1), max(0, radius - 1), colour, edge)
    return canvas.image


def _draw_rounded(canvas: Canvas, box: Rect, radius: int, colour: Colour, on: Colour) -> None:
    canvas.fill(box, colour)
    if not radius:
        return
    far_x, far_y = box.x1 - radius, box.y1 - radius
    places = ((box.x0, box.y0), (far_x, box.y0), (box.x0, far_y), (far_x, far_y))
    for corner, place in zip(("nw", "ne", "sw", "se"), places, strict=True):
        tile = _tile(canvas.palette, "corner", corner, radius, 0, colour, on)
        canvas.image.paste(tile, place)


@lru_cache(maxsize=4096)
def _mask(kind: str, what: str, width: int, height: int) -> Image.Image:
    if kind == "text":
        return _text_mask(what, width)
    height = height or width
    big = Image.new("L", (width * SUPERSAMPLE, height * SUPERSAMPLE), 0)
    pen = ImageDraw.Draw(big)
    if kind == "icon":
        _draw_icon(pen, what, width * SUPERSAMPLE)
    elif kind == "ellipse":
        pen.ellipse((0, 0, big.width - 1, big.height - 1), fill=255)
    else:
        side = big.width
        x = 0 if "w" in what else -side
        y = 0 if "n" in what else -side
        pen.ellipse((x, y, x + 2 * side - 1, y + 2 * side - 1), fill=255)
    return big.reduce(SUPERSAMPLE)


def _text_mask(text: str, size: int) -> Image.Image:
    mask = Image.new("L", (max(1, text_width(text, size)), line_height(size)), 0)
    ImageDraw.Draw(mask).text((0, 0), text, font=font(size), fill=255)
    return mask


def _star() -> list[Point]:
    points = []
    for i in range(10):
        radius = 0.48 if i % 2 == 0 else 0.2
        angle = math.pi * i / 5 - math.pi / 2
        points.append((0.5 + radius * math.cos(angle), 0.53 + radius * math.sin(angle)))
    return points


# Each icon is a list of strokes and areas in a unit square. A stroke is (width, points), an area
# (0, points), a hole (-1, points).
_Part = tuple[float, list[Point]]


def _box(x0: float, y0: float, x1: float, y1: float) -> list[Point]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _disc(radius: float) -> list[Point]:
    turn = 2 * math.pi / 48
    return [
        (0.5 + radius * math.cos(turn * i), 0.5 + radius * math.sin(turn * i)) for i in range(48)
    ]


ICONS: dict[str, list[_Part]] = {
    "close": [(0.15, [(0.22, 0.22), (0.78, 0.78)]), (0.15, [(0.78, 0.22), (0.22, 0.78)])],
    "check": [(0.16, [(0.16, 0.54), (0.4, 0.76), (0.84, 0.26)])],
    "right": [(0.15, [(0.14, 0.5), (0.82, 0.5)]), (0.15, [(0.52, 0.2), (0.84, 0.5), (0.52, 0.8)])],
    "left": [(0.15, [(0.86, 0.5), (0.18, 0.5)]), (0.15, [(0.48, 0.2), (0.16, 0.5), (0.48, 0.8)])],
    "up": [(0, [(0.5, 0.2), (0.88, 0.76), (0.12, 0.76)])],
    "down": [(0, [(0.12, 0.24), (0.88, 0.24), (0.5, 0.8)])],
    "chevron": [(0.13, [(0.2, 0.36), (0.5, 0.66), (0.8, 0.36)])],
    "chevron_right": [(0.13, [(0.36, 0.2), (0.66, 0.5), (0.36, 0.8)])],
    "menu": [(0.14, [(0.12, y), (0.88, y)]) for y in (0.22, 0.5, 0.78)],
    "minus": [(0.15, [(0.18, 0.5), (0.82, 0.5)])],
    "plus": [(0.15, [(0.18, 0.5), (0.82, 0.5)]), (0.15, [(0.5, 0.18), (0.5, 0.82)])],
    "trash": [
        (0, _box(0.1, 0.16, 0.9, 0.27)),
        (0, _box(0.36, 0.05, 0.64, 0.17)),
        (0, [(0.19, 0.34), (0.81, 0.34), (0.74, 0.96), (0.26, 0.96)]),
        (-1, _box(0.36, 0.44, 0.43, 0.86)),
        (-1, _box(0.57, 0.44, 0.64, 0.86)),
    ],
    "folder": [
        (0, [(0.04, 0.16), (0.4, 0.16), (0.5, 0.28), (0.96, 0.28), (0.96, 0.86), (0.04, 0.86)]),
        (-1, _box(0.04, 0.38, 0.96, 0.43)),
    ],
    "file": [
        (0, [(0.16, 0.03), (0.6, 0.03), (0.86, 0.29), (0.86, 0.97), (0.16, 0.97)]),
        (-1, [(0.6, 0.1), (0.79, 0.29), (0.6, 0.29)]),
        (-1, _box(0.3, 0.48, 0.72, 0.54)),
        (-1, _box(0.3, 0.64, 0.72, 0.7)),
    ],
    "search": [
        (0, [(x * 0.7, y * 0.7 + 0.02) for x, y in _disc(0.5)]),
        (-1, [(x * 0.7, y * 0.7 + 0.02) for x, y in _disc(0.34)]),
        (0.15, [(0.6, 0.62), (0.9, 0.92)]),
    ],
    "info": [
        (0, _disc(0.48)),
        (-1, _box(0.44, 0.42, 0.56, 0.76)),
        (-1, _box(0.44, 0.22, 0.56, 0.34)),
    ],
    "warning": [
        (0, [(0.5, 0.06), (0.98, 0.92), (0.02, 0.92)]),
        (-1, _box(0.45, 0.36, 0.55, 0.66)),
        (-1, _box(0.45, 0.72, 0.55, 0.82)),
    ],
    "circle": [(0, _disc(0.46))],
    "square": [(0, _box(0.1, 0.1, 0.9, 0.9))],
    "triangle": [(0, [(0.5, 0.06), (0.97, 0.9), (0.03, 0.9)])],
    "diamond": [(0, [(0.5, 0.02), (0.98, 0.5), (0.5, 0.98), (0.02, 0.5)])],
    "star": [(0, _star())],
    "ring": [(0, _disc(0.49)), (-1, _disc(0.41))],
    "dot": [(0, _disc(0.22))],
}
"""Icon name -> its parts."""


def _draw_icon(pen: ImageDraw.ImageDraw, name: str, side: int) -> None:
    for width, points in ICONS[name]:
        pixels = [(x * side, y * side) for x, y in points]
        if width <= 0:
            pen.polygon(pixels, fill=0 if width else 255)
            continue
        thick = width * side
        pen.line(pixels, fill=255, width=round(thick), joint="curve")
        for x, y in (pixels[0], pixels[-1]):
            pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=255)


DRAWN_JPEG_QUALITY = 90
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NO_FILTER = 0


def encode(canvas: Canvas, encoding: ImageEncoding = "png") -> bytes:
    """Return the canvas as an image file."""
    if encoding == "png":
        return encode_png(canvas)
    out = io.BytesIO()
    to_image(canvas).save(out, format="JPEG", quality=DRAWN_JPEG_QUALITY)
    return out.getvalue()


def encode_png(canvas: Canvas) -> bytes:
    """Return the canvas as a lossless PNG. The layout is in the PNG specification, 5.2 and 11.2."""
    width, height = canvas.image.size
    # Each row of a PNG begins with the number of its filter, which is drawn here as one more column.
    rows = Image.new("L", (width + 1, height), _NO_FILTER)
    rows.paste(canvas.image, (1, 0))
    pixels = zlib.compress(rows.tobytes(), 1)
    return head(width, height, canvas.palette.plte) + chunk(b"IDAT", pixels) + END


def head(width: int, height: int, palette: bytes) -> bytes:
    """Return a PNG of palette indices up to its pixels; `palette` is RGB triples, 256 at most."""
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return _SIGNATURE + chunk(b"IHDR", header) + chunk(b"PLTE", palette)


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG with its length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


END = chunk(b"IEND", b"")


def to_image(canvas: Canvas) -> Image.Image:
    """Return the canvas as a Pillow image of mode RGB."""
    indexed = Image.frombytes("P", canvas.image.size, canvas.image.tobytes())
    indexed.putpalette(canvas.palette.plte)
    return indexed.convert("RGB")
