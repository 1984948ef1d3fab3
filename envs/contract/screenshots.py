"""Encoded screenshots: as observations, decoded, and converted for the store.

observe     an encoded screenshot as an Observation, as JPEG if requested
stored_as   an observation with its screenshot in the encoding of the store
pixels_of   an encoded image, decoded
size_of     the size of an encoded image, from its header
as_seen     an open image as a viewer shows it; all code that reads pictures uses this
seen_size   the size of what `as_seen` returns
"""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import Any, Literal

from PIL import ExifTags, Image, UnidentifiedImageError

from bus.errors import EnvError
from envs.contract.base import Observation
from envs.contract.options import ImageEncoding

MEDIA_TYPES: dict[ImageEncoding, str] = {"png": "image/png", "jpeg": "image/jpeg"}
SCREEN_JPEG_QUALITY = 85
"""JPEG quality of captured screens: desktops, browsers, phones."""

StoredEncoding = Literal["png", "webp", "jpeg"]
"""Encoding of stored screenshots; `png` keeps the encoding that the suite gives."""

_HOW: dict[StoredEncoding, dict[str, Any]] = {
    "webp": {"lossless": True, "quality": 0, "method": 1},
    "jpeg": {"quality": 90},
}
"""WebP is lossless: a third of PNG's bytes in half the time of lossy WebP, for screens of flat colours."""

_FIX = "the environment must send encoded images"
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Exceptions that Pillow raises for bytes that are not a whole image."""


def observe(image: bytes, encoding: ImageEncoding) -> Observation:
    """Return an encoded screenshot as an observation: unchanged, or as JPEG if requested. Raises EnvError."""
    try:
        screen = Image.open(io.BytesIO(image))
        if encoding == "jpeg":
            into = io.BytesIO()
            converted = as_seen(screen)
            converted.save(into, "JPEG", quality=SCREEN_JPEG_QUALITY)
            return Observation(into.getvalue(), MEDIA_TYPES["jpeg"], *converted.size)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise EnvError(f"the screenshot cannot be read: {error}") from error
    media_type = Image.MIME.get(screen.format or "", MEDIA_TYPES["png"])
    return Observation(image, media_type, *seen_size(screen))


def stored_as(observation: Observation, encoding: StoredEncoding) -> Observation:
    """Return the observation with its screenshot in the encoding of the store. Raises EnvError.

    The environment process calls this once for each screenshot. The policy samples from these bytes, the
    store keeps them and the trainer computes from them, so that a lossy encoding changes the same for all
    three.
    """
    if encoding == "png" or observation.media_type == f"image/{encoding}":
        return observation
    into = io.BytesIO()
    try:
        pixels_of(observation.screenshot).save(into, encoding.upper(), **_HOW[encoding])
    except (OSError, ValueError) as error:
        raise EnvError(f"the screenshot cannot be written as {encoding}: {error}") from None
    return replace(observation, screenshot=into.getvalue(), media_type=f"image/{encoding}")


def pixels_of(image: bytes) -> Image.Image:
    """Return an encoded image, decoded, as RGB. Raises EnvError if it is not a whole image."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return as_seen(opened)
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be decoded: {error}; {_FIX}") from None


def size_of(image: bytes) -> tuple[int, int]:
    """Return width and height of an encoded image in pixels, from its header alone. Raises EnvError."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return seen_size(opened)
    except UnidentifiedImageError:
        raise EnvError(
            f"a screenshot of {len(image)} bytes is no PNG, JPEG or WebP image; {_FIX}"
        ) from None
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be read: {error}; {_FIX}") from None


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the operation that undoes it. The last four exchange width and height."""
_SIDES_EXCHANGED = 5
_HOLD_EXIF = frozenset({"exif", "Raw profile type exif", "XML:com.adobe.xmp"})


def as_seen(image: Image.Image) -> Image.Image:
    """Return an open image as a viewer shows it, as RGB.

    It is turned according to its EXIF, and transparent parts become white. Of 16 bits the upper eight are
    used.
    """
    turn = _TURNS.get(_orientation(image))
    if image.mode.startswith("I"):
        # Pillow converts such a picture by cutting its values off at 255.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = _on_white(image.convert("RGBA"))
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def seen_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of the image that `as_seen` would return, from the header alone."""
    width, height = image.size
    return (height, width) if _orientation(image) >= _SIDES_EXCHANGED else (width, height)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none or it cannot be read."""
    if image.format == "PNG" and _HOLD_EXIF.isdisjoint(image.info):
        return 1  # there is no EXIF before the pixels; to look behind them, Pillow would decode them all
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (*BROKEN, struct.error, KeyError, TypeError, IndexError):
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TURNS else 1


def _on_white(image: Image.Image) -> Image.Image:
    if image.getchannel("A").getextrema() == (255, 255):
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
