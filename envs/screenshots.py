"""Screenshots of real screens as observations.

observe   an encoded screenshot as an Observation, as JPEG where that is asked for
pixels_of the whole image
size_of   what its header says of its size
"""

from __future__ import annotations

import io
from typing import Literal

from PIL import Image, UnidentifiedImageError

from bus.errors import EnvError
from envs.base import Observation

Encoding = Literal["png", "jpeg"]

JPEG_QUALITY = 85

_CURE = "the environment must send encoded images"
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are no image, or only a part of one."""


def observe(image: bytes, encoding: Encoding) -> Observation:
    """An encoded screenshot as it came, or as JPEG where that is asked for. Raises EnvError."""
    try:
        screen = Image.open(io.BytesIO(image))
        if encoding == "jpeg":
            into = io.BytesIO()
            screen.convert("RGB").save(into, "JPEG", quality=JPEG_QUALITY)
            return Observation(into.getvalue(), "image/jpeg", screen.width, screen.height)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise EnvError(f"the screenshot cannot be read: {error}") from error
    media_type = Image.MIME.get(screen.format or "", "image/png")
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
