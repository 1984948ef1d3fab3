"""Files as bytes: their name by content, and the format of an encoded screenshot.

content_hash   the name under which a blob is stored
image_type     the media type of an encoded screenshot, by its first bytes
image_suffix   the suffix of a file that holds it

This module does not import Pillow, so that what only names files starts without it.
"""

from __future__ import annotations

import hashlib


def content_hash(blob: bytes) -> str:
    """Return the name of a blob by its content: 32 hex digits of BLAKE2b."""
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def image_type(image: bytes) -> str | None:
    """Return the media type of an encoded screenshot, by its first bytes; None for any other format."""
    if image.startswith(b"\x89PNG"):
        return "image/png"
    if image.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if image[:4] == b"RIFF" and image[8:12] == b"WEBP" else None


def image_suffix(image: bytes) -> str:
    """Return the suffix of the name of a file with this screenshot, e.g. `png`."""
    return {"image/png": "png", "image/webp": "webp"}.get(image_type(image) or "", "jpg")
