"""Lists of a step <-> the compact blobs its row holds, little-endian on every machine.

ids      int32                      token ids, version spans
packed   int32, deflated            prompt token ids: image placeholders repeat, so 50 KB of a
                                    five-screenshot prompt become a few hundred bytes
floats   float64                    log-probabilities and entropies, bit for bit as they came
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from bus.messages import VersionSpan


def pack_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32. Raises struct.error for one that does not fit."""
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ids(blob: bytes) -> list[int]:
    """Inverse of pack_ids."""
    return list(struct.unpack(f"<{len(blob) // 4}i", blob))


def deflate_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32, deflated at the fastest level."""
    return zlib.compress(pack_ids(values), 1)


def inflate_ids(blob: bytes) -> list[int]:
    """Inverse of deflate_ids. Raises zlib.error for a damaged blob."""
    return unpack_ids(zlib.decompress(blob))


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
