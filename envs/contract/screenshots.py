"""What an environment shows beside its widgets: screenshots, and texts.

    observe       an encoded screenshot as an Observation, as JPEG if requested
    stored_as     what an environment's screenshots become before anything sees or stores them
    pixels_of     the whole image
    size_of       its size, from the header alone
    as_seen, seen_size   the same of an image that is open: every reader of pictures goes through these
    KINDS         every kind of text, in the order of a prompt
    Widget        one line of an accessibility tree; outline makes the text `accessibility` of them
    bounded       a text cut to a length, which says so
    prompt_text   all texts of one screen as one text

A position in a text is `@(x,y)` in pixels of the screenshot. A policy has its own numbers for places, so
`prompt_text` writes positions in those.
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
"""Of photographed screens: desktops, browsers, phones."""

StoredEncoding = Literal["png", "webp", "jpeg"]
"""png: whatever the suite gives."""

_HOW: dict[StoredEncoding, dict[str, Any]] = {
    "webp": {"lossless": True, "quality": 0, "method": 1},
    "jpeg": {"quality": 90},
}
"""WebP is lossless: a third of PNG's bytes in half the time of lossy WebP, for screens of flat colours."""

_CURE = "the environment must send encoded images"
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are not a whole image."""


def observe(image: bytes, encoding: ImageEncoding) -> Observation:
    """Return an encoded screenshot unchanged, or as JPEG if requested. Raises EnvError."""
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
    """Return the observation as it is kept: encoded once, where the environment runs. Raises EnvError.

    The policy samples from these bytes, the store keeps them, and the trainer computes from them: what
    a lossy encoding changes, it changes for all three alike.
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
    """Return an encoded image, whole, as RGB. Raises EnvError."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return as_seen(opened)
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be decoded: {error}; {_CURE}") from None


def size_of(image: bytes) -> tuple[int, int]:
    """Width and height of an encoded image, pixels, from its header alone. Raises EnvError."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return seen_size(opened)
    except UnidentifiedImageError:
        raise EnvError(
            f"a screenshot of {len(image)} bytes is no PNG, JPEG or WebP image; {_CURE}"
        ) from None
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be read: {error}; {_CURE}") from None


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What an orientation of EXIF does to a picture. The last four exchange its sides."""
_SIDES_EXCHANGED = 5
_HOLD_EXIF = frozenset({"exif", "Raw profile type exif", "XML:com.adobe.xmp"})


def as_seen(image: Image.Image) -> Image.Image:
    """Return an open image as a viewer shows it, RGB: turned as its EXIF says, on white where it is transparent.

    Of 16 bits the upper eight are kept.
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
    """Return width and height of what `as_seen` gives, from the header alone."""
    width, height = image.size
    return (height, width) if _orientation(image) >= _SIDES_EXCHANGED else (width, height)


def _orientation(image: Image.Image) -> int:
    """Return the orientation that EXIF names, 1 to 8; 1 where there is none that can be read."""
    if image.format == "PNG" and _HOLD_EXIF.isdisjoint(image.info):
        return 1  # Pillow would decode the whole picture to look behind it
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (*BROKEN, struct.error, KeyError, TypeError, IndexError):
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TURNS else 1


def _on_white(image: Image.Image) -> Image.Image:
    if image.getchannel("A").getextrema() == (255, 255):
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
