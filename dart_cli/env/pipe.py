"""The messages between an environment's process and its slot, over a pair of pipes.

    pack, read, read_from   a JSON header and a blob (a screenshot) as one frame, and back

A frame is two lengths of four bytes, big-endian, then header and blob. Both are bounded, so that a
faulty process cannot make its slot allocate more.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

from bus.errors import EnvError

_LENGTHS = struct.Struct(">II")
MOST_HEADER = 2**24  # bytes
MOST_BLOB = 2**28

PipeMessage = tuple[dict[str, Any], bytes]


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame."""
    encoded = json.dumps(header).encode()
    return _LENGTHS.pack(len(encoded), len(blob)) + encoded + blob


async def read(stream: asyncio.StreamReader) -> PipeMessage:
    """The next frame. Raises asyncio.IncompleteReadError at the end, EnvError for one too large."""
    header, blob = _lengths(await stream.readexactly(_LENGTHS.size))
    return json.loads(await stream.readexactly(header)), await stream.readexactly(blob)


def read_from(file: BinaryIO) -> PipeMessage | None:
    """The same from a blocking file; None at its end."""
    head = file.read(_LENGTHS.size)
    if len(head) < _LENGTHS.size:
        return None
    header, blob = _lengths(head)
    return json.loads(file.read(header)), file.read(blob)


def _lengths(head: bytes) -> tuple[int, int]:
    header, blob = _LENGTHS.unpack(head)
    if header > MOST_HEADER or blob > MOST_BLOB:
        raise EnvError(f"a frame of {header} + {blob} bytes; at most {MOST_HEADER} + {MOST_BLOB}")
    return header, blob
