"""The screen of the tests' environment: a square on a plain ground, without any package but Python's."""

from __future__ import annotations

import itertools
import struct
import zlib
from random import Random

SIZE = (64, 48)

Pixels = list[list[list[int]]]


def square_of(seed: int, size: tuple[int, int] = SIZE) -> tuple[int, int]:
    """The square's top left corner."""
    rng = Random(seed)
    return rng.randrange(4, size[0] - 16), rng.randrange(4, size[1] - 16)


def pixels_of(at: tuple[int, int], *, clicked: bool, size: tuple[int, int] = SIZE) -> Pixels:
    """[height, width, 3]; rows that are alike are one list."""
    ground, fill = [240, 240, 240], [0, 160, 0] if clicked else [200, 0, 0]
    plain = [ground] * size[0]
    crossed = [*plain[: at[0]], *[fill] * 12, *plain[at[0] + 12 :]]
    return [crossed if 0 <= y - at[1] < 12 else plain for y in range(size[1])]


def png_of(pixels: Pixels) -> bytes:
    """The same as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packed = {
        id(row): b"\0" + bytes(itertools.chain(*row))
        for row in {id(row): row for row in pixels}.values()
    }
    rows = b"".join(packed[id(row)] for row in pixels)
    head = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )
