"""Screenshots of real screens as observations.

observe       an encoded screenshot as an Observation, as JPEG if requested
stored_as     what an environment's screenshots become before anything sees or stores them
pixels_of     the whole image
size_of       the size in its header
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from bus.errors import EnvError
from envs.base import Observation
from envs.options import ImageEncoding

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
    """An encoded screenshot unchanged, or as JPEG if requested. Raises EnvError."""
    try:
        screen = Image.open(io.BytesIO(image))
        if encoding == "jpeg":
            into = io.BytesIO()
            screen.convert("RGB").save(into, "JPEG", quality=SCREEN_JPEG_QUALITY)
            return Observation(into.getvalue(), MEDIA_TYPES["jpeg"], screen.width, screen.height)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise EnvError(f"the screenshot cannot be read: {error}") from error
    media_type = Image.MIME.get(screen.format or "", MEDIA_TYPES["png"])
    return Observation(image, media_type, screen.width, screen.height)


def stored_as(seen: Observation, encoding: StoredEncoding) -> Observation:
    """The observation as it is kept: encoded once, where the environment runs. Raises EnvError.

    The policy samples from these bytes, the store keeps them, and the trainer computes from them: what
    a lossy encoding changes, it changes for all three alike.
    """
    if encoding == "png" or seen.media_type == f"image/{encoding}":
        return seen
    into = io.BytesIO()
    try:
        pixels_of(seen.screenshot).save(into, encoding.upper(), **_HOW[encoding])
    except (OSError, ValueError) as error:
        raise EnvError(f"the screenshot cannot be written as {encoding}: {error}") from None
    return replace(seen, screenshot=into.getvalue(), media_type=f"image/{encoding}")


def pixels_of(image: bytes) -> Image.Image:
    """An encoded image, whole, as RGB. Raises EnvError."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return opened.convert("RGB")
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be decoded: {error}; {_CURE}") from None


def size_of(image: bytes) -> tuple[int, int]:
    """Width and height of an encoded image, pixels, from its header alone. Raises EnvError."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return opened.size
    except UnidentifiedImageError:
        raise EnvError(
            f"a screenshot of {len(image)} bytes is no PNG, JPEG or WebP image; {_CURE}"
        ) from None
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be read: {error}; {_CURE}") from None
