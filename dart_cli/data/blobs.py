"""Lists of a step <-> the compact blobs its row holds, little-endian on every machine.

ids      int32                      token ids, version spans
packed   int32 in four byte planes, deflated: prompt token ids. Image placeholders repeat, and the
         upper bytes of all ids are alike, so that 50 KB of a five-screenshot prompt become 2 KB
floats   float64                    log-probabilities and entropies, bit for bit as they came
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence

from bus.messages import VersionSpan

_PLANES = b"P"
"""First byte of packed ids; zlib's own first byte, with which older blobs begin, is never this."""

_HIGHEST = 3 if sys.byteorder == "little" else 0
"""Of the four bytes of a machine's integer."""


def pack_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32. Raises struct.error for one that does not fit."""
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ids(blob: bytes | bytearray) -> list[int]:
    """Inverse of pack_ids."""
    return list(struct.unpack(f"<{len(blob) // 4}i", blob))


def deflate_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32, by byte planes, deflated as fast as runs alone need it."""
    plain = pack_ids(values)
    deflate = zlib.compressobj(1, zlib.DEFLATED, 13, 6, zlib.Z_RLE)  # small: its set-up counts
    planes = (plain[0::4], plain[1::4], plain[2::4], plain[3::4])
    return _PLANES + deflate.compress(b"".join(planes)) + deflate.flush()


def inflate_ids(blob: bytes) -> list[int]:
    """Inverse of deflate_ids. Raises zlib.error for a damaged blob."""
    if blob[:1] != _PLANES:  # of an older dart: int32, deflated
        return unpack_ids(zlib.decompress(blob))
    planes = zlib.decompress(blob[1:])
    size = len(planes) // 4
    plain = bytearray(len(planes))
    for index in range(4):
        plain[index::4] = planes[index * size : (index + 1) * size]
    return unpack_ids(plain)


def in_range(values: Sequence[int]) -> bool:
    """Whether every integer is in [0, 2 ** 31), as pack_ids stores it and no id is below zero."""
    try:
        plain = array("I", values).tobytes()
    except OverflowError:
        return False
    return plain[_HIGHEST::4].isascii()  # its top bit is clear


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats [N] in float64."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes) -> list[float]:
    """Inverse of pack_floats."""
    return list(struct.unpack(f"<{len(blob) // 8}d", blob))


def pack_spans(spans: Sequence[VersionSpan]) -> bytes:
    """Version spans as triples (version, start, end)."""
    return pack_ids([part for span in spans for part in (span.version, span.start, span.end)])


def unpack_spans(blob: bytes) -> list[VersionSpan]:
    """Inverse of pack_spans."""
    parts = iter(unpack_ids(blob))
    return [
        VersionSpan(version=version, start=start, end=end)
        for version, start, end in zip(parts, parts, parts, strict=True)
    ]
