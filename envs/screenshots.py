"""Screenshots of real screens as observations.

as_encoding   a suite's option `encoding`, checked
observe       an encoded screenshot as an Observation, as JPEG if requested
pixels_of     the whole image
size_of       the size in its header
"""

from __future__ import annotations

import io
from typing import Literal

from PIL import Image, UnidentifiedImageError

from bus.errors import EnvError, TaskError
from envs.base import Observation

ImageEncoding = Literal["png", "jpeg"]
MEDIA_TYPES: dict[ImageEncoding, str] = {"png": "image/png", "jpeg": "image/jpeg"}
SCREEN_JPEG_QUALITY = 85
"""Of photographed screens: desktops, browsers, phones."""

_CURE = "the environment must send encoded images"
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are not a whole image."""


def as_encoding(value: object) -> ImageEncoding:
    """The option `encoding` of a suite. Raises TaskError for any other value."""
    for encoding in MEDIA_TYPES:
        if value == encoding:
            return encoding
    raise TaskError(f"encoding must be png or jpeg, got {value!r}")


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
            f"a screenshot of {len(image)} bytes is no PNG or JPEG image; {_CURE}"
        ) from None
    except BROKEN as error:
        raise EnvError(f"the screenshot cannot be read: {error}; {_CURE}") from None
