"""Numbers of a step <-> the compact blobs its row holds, little-endian on every machine.

ids      int32                      token ids, version spans
prompt   three bytes an id, in planes, of which the one that most often comes in a row, the image
         placeholder, is written once for every 8 or 128 of them: 50 KB of a five-screenshot
         prompt become 3 KB. What this cannot hold is int32, deflated, as older versions wrote it
floats   float64                    log-probabilities and entropies, bit for bit as they came
maps     length, JSON, deflate      where pointers looked: their shapes and candidates, then their heat
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from operator import eq

from bus.messages import PointerCandidate, PointerMap, VersionSpan
from bus.packed import little_endian

_SHORT = b"R"
"""First byte of a prompt that is written short; never that of zlib."""

_EIGHT = b"\xff\xff\xff\0"
"""Stands for eight of the same id in a row, and _MANY for sixteen of it."""
_MANY = b"\xfe\xff\xff\0"

_HIGHEST = 3 if sys.byteorder == "little" else 0
"""Of the four bytes of a machine's integer."""


def pack_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32. Raises struct.error for one that does not fit."""
    if isinstance(values, array) and values.typecode == "i":
        return little_endian(values)
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ids(blob: bytes) -> list[int]:
    """Inverse of pack_ids."""
    return list(struct.unpack(f"<{len(blob) // 4}i", blob))


def pack_prompt(values: Sequence[int]) -> bytes:
    """The ids [P] of a prompt, in a quarter of the time that deflating them takes."""
    plain = pack_ids(values)
    unit = pack_ids([_in_a_row(values)])
    short = plain.replace(unit * 8, _EIGHT).replace(_EIGHT * 16, _MANY)
    # Where the top bytes are all zero, every id fits and every mark stands where an id would (a
    # mark elsewhere puts its 0xff there); and no bytes but a mark's own look like one.
    if short[3::4].strip(b"\0") or _EIGHT in plain or _MANY in plain:
        return zlib.compress(plain, 1)
    return b"".join((_SHORT, unit, short[0::4], short[1::4], short[2::4]))


def unpack_prompt(blob: bytes) -> list[int]:
    """Inverse of pack_prompt."""
    return unpack_ids(prompt_ids(blob))


def prompt_ids(blob: bytes) -> bytes:
    """The ids of pack_prompt as those of pack_ids: no integer is made."""
    if blob[:1] != _SHORT:
        return zlib.decompress(blob)
    unit, planes = blob[1:5], blob[5:]
    size = len(planes) // 3
    short = bytearray(4 * size)
    for index in range(3):
        short[index::4] = planes[index * size : (index + 1) * size]
    return bytes(short).replace(_MANY, _EIGHT * 16).replace(_EIGHT, unit * 8)


def _in_a_row(values: Sequence[int]) -> int:
    """An id that comes often in a row, found by looking at one in 16; 0 where there is none."""
    some = values[::16]
    at = bytes(map(eq, some, some[1:])).find(b"\1\1")  # three of the same
    return some[at] if at >= 0 else 0


def in_range(values: Sequence[int]) -> bool:
    """Whether every integer is in [0, 2 ** 31), as pack_ids stores it and no id is below zero."""
    try:
        is_packed = isinstance(values, array) and values.typecode == "i"
        plain = bytes(values) if is_packed else bytes(array("I", values))
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
    return [  # they were checked when they came in
        VersionSpan.model_construct(version=version, start=start, end=end)
        for version, start, end in zip(parts, parts, parts, strict=True)
    ]


def span_versions(blob: bytes) -> list[int]:
    """The versions alone of packed spans, in order."""
    return unpack_ids(blob)[::3]


def pack_maps(maps: Sequence[PointerMap]) -> bytes:
    """Where the pointers of a step looked; empty for one without."""
    if not maps:
        return b""
    shapes = [
        [each.position, each.rows, each.columns, [[c.x, c.y, c.score] for c in each.candidates]]
        for each in maps
    ]
    head = json.dumps(shapes, separators=(",", ":")).encode()
    heat = zlib.compress(b"".join(each.heat for each in maps))
    return struct.pack("<I", len(head)) + head + heat


def unpack_maps(blob: bytes) -> list[PointerMap]:
    """Inverse of pack_maps."""
    if not blob:
        return []
    end = 4 + struct.unpack_from("<I", blob)[0]
    heat, at, maps = zlib.decompress(blob[end:]), 0, []
    for position, rows, columns, candidates in json.loads(blob[4:end]):
        maps.append(
            PointerMap.model_construct(
                position=position,
                rows=rows,
                columns=columns,
                heat=heat[at : at + rows * columns],
                candidates=[
                    PointerCandidate.model_construct(x=x, y=y, score=score)
                    for x, y, score in candidates
                ],
            )
        )
        at += rows * columns
    return maps
