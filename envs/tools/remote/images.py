"""Screenshots in JSON as observations.

from_text      an observation from base64 or a data URL
from_pixels    an observation from an array of pixels, encoded as PNG
from_numbers   an observation from a list of numbers, nested or flat
cut_numbers    a list of numbers read from the bytes of a reply, without a Python object for each number
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bus.errors import EnvError
from envs.contract.base import Observation
from envs.contract.blobs import image_type
from envs.contract.screenshots import size_of

MOST_PIXELS = 64_000_000  # of a screenshot: 8k is 33 million
_PNG_LEVEL = 1  # zlib's: 1280x720 in a tenth of the time of 9

_DIGIT, _COMMA, _OPEN = np.uint8(ord("0")), np.uint8(ord(",")), np.uint8(ord("["))
_VALUE = re.compile(rb"\s*:\s*(?=\[)")
_SPACES = b" \t\r\n"

Pixels = NDArray[np.uint8]


def from_text(text: object, where: str) -> Observation:
    """Return the observation of an encoded image in base64 or as a data URL. Raises EnvError."""
    if not isinstance(text, str):
        raise EnvError(f"{where} is {type(text).__name__}, want an image in base64")
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise EnvError(f"{where} is a data URL without base64: {head[:60]!r}")
    try:
        image = base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise EnvError(f"{where} is no base64: {error}") from None
    media_type = image_type(image)
    if media_type is None:
        raise EnvError(f"{where}: {len(image)} bytes that are no PNG, JPEG or WebP image")
    width, height = size_of(image)
    _check_size(width, height, where)
    return Observation(image, media_type, width, height)


def from_pixels(pixels: Pixels, where: str) -> Observation:
    """Return pixels [height, width] or [height, width, 1, 3 or 4] as a PNG observation. Raises EnvError."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim == 3 and pixels.shape[2] == 4:
        pixels = pixels[:, :, :3]
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)) or not pixels.size:
        raise EnvError(
            f"{where} has the shape {list(pixels.shape)}, want [height, width] or [height, width, 3]"
        )
    height, width = pixels.shape[:2]
    _check_size(width, height, where)
    into = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(into, "PNG", compress_level=_PNG_LEVEL)
    return Observation(into.getvalue(), "image/png", width, height)


def from_numbers(numbers: object, shape: object, where: str) -> Observation:
    """Return the observation of a list of numbers 0 to 255, nested by rows, or flat with its `shape`.

    Raises EnvError.
    """
    try:
        array = np.asarray(numbers)
    except ValueError:
        raise EnvError(f"{where} is a list whose rows have different lengths") from None
    if array.dtype.kind not in "iu":
        raise EnvError(f"{where} is no list of whole numbers")
    if array.size and not (array.min() >= 0 and array.max() <= 255):
        raise EnvError(f"{where} has numbers outside 0 to 255")
    return from_pixels(_shaped(array.astype(np.uint8), shape, where), where)


@dataclass(frozen=True)
class CutNumbers:
    """A reply without its list of numbers, and the numbers as an array."""

    rest: bytes  # with null where the list was
    pixels: Pixels

    def observation(self, shape: object, where: str) -> Observation:
        """Return the numbers as an observation. Raises EnvError."""
        return from_pixels(_shaped(self.pixels, shape, where), where)


def cut_numbers(reply: bytes, name: str) -> CutNumbers | None:
    """Return the reply with the list of numbers that is the value of `name` cut out.

    Returns None, so that the reply is read as any JSON, unless there is exactly one such list and it has
    whole numbers 0 to 255 in rows of equal length. Within a JSON text a quotation mark has a backslash
    before it, so that `"name":` is always a key.
    """
    start = _only_list_of(reply, name)
    if start is None:
        return None
    compact = reply[start : start + 8].translate(None, _SPACES)
    depth = len(compact) - len(compact.lstrip(b"["))
    if not 1 <= depth <= 3:
        return None
    end = reply.find(b"]" * depth, start) + depth
    text = reply[start:end]
    if end >= start + depth and any(space in text for space in _SPACES):
        text = text.translate(None, _SPACES)
    pixels = _read_numbers(text, depth) if end >= start + depth else None
    return None if pixels is None else CutNumbers(reply[:start] + b"null" + reply[end:], pixels)


def _only_list_of(reply: bytes, name: str) -> int | None:
    """Return the position of the list under the key `name`; None unless there is exactly one."""
    key, starts, at = b'"%s"' % name.encode(), list[int](), -1
    while (at := reply.find(key, at + 1)) >= 0:
        if (match := _VALUE.match(reply, at + len(key))) is not None:
            starts.append(match.end())
    return starts[0] if len(starts) == 1 else None


def _read_numbers(text: bytes, depth: int) -> Pixels | None:
    """Return a nested list of `depth` levels as an array; None unless it has bytes in equal rows."""
    shape = _shape_of(np.frombuffer(text, np.uint8), depth)
    digits = np.frombuffer(text.translate(None, b"[]"), np.uint8)
    ends = np.append(np.flatnonzero(digits == _COMMA), digits.size)
    lengths = np.diff(ends, prepend=-1) - 1
    if shape is None or lengths.min() < 1 or lengths.max() > 3:
        return None
    values = np.zeros(ends.size, np.uint16)
    for place, unit in enumerate((1, 10, 100), start=1):
        long = np.flatnonzero(lengths >= place)
        digit = digits[ends[long] - place] - _DIGIT
        if digit.size and digit.max() > 9:
            return None
        values[long] += digit * np.uint16(unit)
    if values.max() > 255:
        return None
    pixels: Pixels = values.astype(np.uint8).reshape(shape)
    return pixels


def _shape_of(text: Pixels, depth: int) -> tuple[int, ...] | None:
    """Return the shape of a nested list, from the commas between its lists; None if their lengths differ."""
    commas = np.flatnonzero(text == _COMMA)
    count = commas.size + 1
    lengths = [count]  # numbers in a list of each level, the whole first
    for level in range(depth - 1, 0, -1):
        begins = text[commas + level] == _OPEN  # the next list of this level or a higher one
        first = int(np.argmax(begins)) + 1 if begins.any() else count
        if count % first or not np.array_equal(begins, np.arange(1, count) % first == 0):
            return None
        lengths.append(first)
    if any(outer % inner for outer, inner in itertools.pairwise(lengths)):
        return None
    return tuple(outer // inner for outer, inner in itertools.pairwise([*lengths, 1]))


def _shaped(array: Pixels, shape: object, where: str) -> Pixels:
    if shape is None:
        return array
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise EnvError(f"{where}: its shape must be a list of numbers, got {shape!r}")
    try:
        return array.reshape(shape)
    except ValueError:
        raise EnvError(f"{where} has {array.size} numbers, which make no {shape}") from None


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MOST_PIXELS:
        raise EnvError(f"{where} has {width}x{height} pixels, more than {MOST_PIXELS:,}")
