"""Convert messages to wire frames `[kind, header, *blobs]` and back.

    kind    the message's class name, ASCII
    header  msgpack map {"v": PROTOCOL_VERSION, "body": fields}
    blobs   one raw frame for each `bytes` value and for the packed numbers of a field

A `bytes` value anywhere in a message (a field, a list element, a dict value) becomes a blob, and the header
has `ExtType(1, index)` in its place. So a screenshot is neither copied into the header nor base64-encoded,
and sockets can send it without a copy. Numbers of a `Packed` field (packed.py) become a blob of
little-endian numbers: `ExtType(2, index)` for a list of int32, `ExtType(3, index)` for a list of float64,
`ExtType(4, index)` and `ExtType(5, index)` for arrays of these.

`decode` trusts no input: for any bytes it returns a validated message or raises ProtocolError, with kind
and field in one line.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
from pydantic import ValidationError

from bus import messages, ranks, weights
from bus.errors import OversizeError, ProtocolError
from bus.messages import PROTOCOL_VERSION, BatchReply, Heartbeat, Message, Reply, Request, RunState
from bus.packed import Packed, float64s, int32s, little_endian
from bus.ranks import Scored, Share, StepStates

# The types, with their subclasses, that may be sent on their own; all others are parts of these.
_ALONE = (Request, Reply, Heartbeat, RunState, Share, Scored, StepStates)
MESSAGES: dict[str, type[Message]] = {
    name: kind
    for module in (messages, weights, ranks)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, _ALONE) and kind not in (Request, Reply)
}
"""Name -> kind, for every kind that may be sent on its own."""

MAX_KIND_BYTES = 64
MAX_FRAME_BYTES = 64 * 2**20
"""Largest header, and largest blob."""


@dataclass(frozen=True)
class MessageLimits:
    """The limits of one message's size."""

    blobs: int
    packed_bytes: int  # of all packed numbers; lists of them take ten times as much memory
    total_bytes: int  # of all frames


LIMITS = MessageLimits(blobs=16_384, packed_bytes=64 * 2**20, total_bytes=2**30)
BATCH_LIMITS = MessageLimits(blobs=65_536, packed_bytes=512 * 2**20, total_bytes=8 * 2**30)
"""A batch of 48 trajectories of 36 steps, with prompts of 9,000 tokens and full-HD screens, is 5,184 blobs,
73 MB of numbers and 1.4 GB in all. Only a client that has requested a batch, and a rank, accept so much."""

_BLOB = 1  # ExtType code of a `bytes` value
_LISTS = {2: "i", 3: "d"}  # ExtType code of a packed list -> code of its numbers
_ARRAYS = {4: "i", 5: "d"}  # likewise, of an array
_LIST_KINDS = {code: number for number, code in _LISTS.items()}
_ARRAY_KINDS = {code: number for number, code in _ARRAYS.items()}
_INDEX_BYTES = 4
_LENGTH_BYTES = 8
_ERROR_CHARS = 300
_SCALARS = frozenset({int, float, str, bool, type(None)})


def encode(message: Message) -> list[bytes]:
    """Return the frames `[kind, header, *blobs]` of a message.

    Raises OversizeError if the message is over a limit, ProtocolError if it has a value that msgpack, or a
    packed field, cannot represent.
    """
    kind = type(message).__name__
    if MESSAGES.get(kind) is not type(message):
        raise ProtocolError(f"{kind}: not a kind that may stand alone on the wire")
    blobs = _Blobs()
    try:
        body = _lift_blobs(message, blobs)
        header: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "body": body})
    except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise ProtocolError(f"{kind}: cannot be sent: {_one_line(error)}") from None
    frames = [kind.encode("ascii"), header, *blobs.frames]
    limits = limits_of(type(message))
    _check_sizes(kind, frames, limits)
    _check_packed(kind, blobs.packed_bytes, limits)
    return frames


def limits_of(expected: type[Message]) -> MessageLimits:
    """Return the size limits of a message of this type; they are larger for messages of a whole batch."""
    return BATCH_LIMITS if expected in (BatchReply, Share, Scored, StepStates) else LIMITS


def decode(frames: Sequence[bytes], limits: MessageLimits = LIMITS) -> Message:
    """Return the message of frames `[kind, header, *blobs]`. Raises ProtocolError for any other frames."""
    if len(frames) < 2:
        raise ProtocolError(f"message of {len(frames)} frames: a kind and a header are needed")
    kind = _kind_of(frames[0])
    message_type = MESSAGES[kind]
    _check_sizes(kind, frames, limits)
    body = _unpack(kind, frames[1], frames[2:], limits)
    try:
        return message_type.model_validate(body)
    except ValidationError as error:
        raise ProtocolError(_first_fault(kind, error)) from None
    except RecursionError:
        raise ProtocolError(f"{kind}: nested too deeply") from None


def joined(message: Message) -> bytes:
    """Return the frames of a message as one bytes object, each frame after its length (8 bytes).

    Raises as `encode` does.
    """
    frames = encode(message)
    return b"".join(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame for frame in frames)


def parted(piece: bytes, limits: MessageLimits) -> Message:
    """Return the message whose bytes `joined` returned. Raises ProtocolError for any other bytes."""
    frames, at = [], 0
    while at < len(piece):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(piece[at:begin], "big")
        if at > len(piece):
            raise ProtocolError(f"a message of {len(piece)} bytes is cut off")
        frames.append(piece[begin:at])
    return decode(frames, limits)


class _Blobs:
    """The blobs of one message, in order."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.packed_bytes = 0

    def add(self, blob: bytes, kind: int = _BLOB) -> msgpack.ExtType:
        """Add a blob, and return its placeholder in the header."""
        self.frames.append(blob)
        return msgpack.ExtType(kind, (len(self.frames) - 1).to_bytes(_INDEX_BYTES, "big"))

    def pack(self, values: Sequence[float] | array[int], code: str) -> msgpack.ExtType:
        """Pack numbers into a blob, and return its placeholder in the header.

        Raises struct.error for a number that does not fit.
        """
        if isinstance(values, array):
            blob, kind = little_endian(values), _ARRAY_KINDS[values.typecode]
        else:
            blob, kind = struct.pack(f"<{len(values)}{code}", *values), _LIST_KINDS[code]
        self.packed_bytes += len(blob)
        return self.add(blob, kind)


def _lift_blobs(value: Any, blobs: _Blobs) -> Any:
    """Return the value as plain containers; each `bytes` value moves to `blobs` and leaves an ExtType."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        return blobs.add(value) if value else value  # empty bytes need no frame
    if isinstance(value, Message):
        fields = dict(value.__dict__)
        for name, code in _packed_fields(type(value)):
            if fields[name] or isinstance(fields[name], array):  # an empty list needs no frame
                fields[name] = blobs.pack(fields[name], code)
        for name in _fields_to_walk(type(value)):
            if name in fields:
                fields[name] = _lift_blobs(fields[name], blobs)
        return fields
    if isinstance(value, dict):
        return {name: _lift_blobs(item, blobs) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lift_blobs(item, blobs) for item in value]
    return value


@cache
def _fields_to_walk(message_type: type[Message]) -> tuple[str, ...]:
    """Return the fields that may contain `bytes` or messages, by their annotations."""
    annotations = get_type_hints(message_type)
    packed = {name for name, _ in _packed_fields(message_type)}
    return tuple(
        name
        for name in message_type.model_fields
        if name not in packed and not _is_plain(annotations[name])
    )


@cache
def _packed_fields(message_type: type[Message]) -> tuple[tuple[str, str], ...]:
    """Return the packed fields, each with the code of its numbers."""
    return tuple(
        (name, mark.code)
        for name, field in message_type.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Packed)
    )


def _is_plain(annotation: Any) -> bool:
    """Return True if values of the annotation consist of scalars, lists and dicts only."""
    if get_origin(annotation) is Literal:
        return True
    arguments = get_args(annotation)
    return all(map(_is_plain, arguments)) if arguments else annotation in _SCALARS


def _kind_of(frame: bytes) -> str:
    """Return the kind in the first frame. Raises ProtocolError for an unknown one."""
    kind = frame[:MAX_KIND_BYTES].decode("ascii", errors="replace")
    if len(frame) > MAX_KIND_BYTES or kind not in MESSAGES:
        raise ProtocolError(f"unknown message kind {kind!a}")
    return kind


def _check_sizes(kind: str, frames: Sequence[bytes], limits: MessageLimits) -> None:
    """Raise OversizeError if the header, the blobs or all frames together are over a limit."""
    header, blobs = frames[1], frames[2:]
    if len(header) > MAX_FRAME_BYTES:
        raise OversizeError(f"{kind}: header of {len(header)} bytes, limit {MAX_FRAME_BYTES}")
    if len(blobs) > limits.blobs:
        raise OversizeError(f"{kind}: {len(blobs)} blobs, limit {limits.blobs}")
    largest = max(map(len, blobs), default=0)
    if largest > MAX_FRAME_BYTES:
        raise OversizeError(f"{kind}: blob of {largest} bytes, limit {MAX_FRAME_BYTES}")
    total = sum(map(len, frames))
    if total > limits.total_bytes:
        raise OversizeError(f"{kind}: {total} bytes in all, limit {limits.total_bytes}")


def _check_packed(kind: str, packed_bytes: int, limits: MessageLimits) -> None:
    if packed_bytes > limits.packed_bytes:
        raise OversizeError(
            f"{kind}: packed numbers of {packed_bytes} bytes, limit {limits.packed_bytes}"
        )


def _unpack(kind: str, header: bytes, blobs: Sequence[bytes], limits: MessageLimits) -> Any:
    """Return the header's body with every blob in its place.

    Raises ProtocolError for an invalid header, for another protocol version, and unless each blob is used
    exactly once; OversizeError for too many packed numbers.
    """
    unused = dict(enumerate(blobs))
    packed_bytes = 0

    def put_back(code: int, data: bytes) -> bytes | list[float] | array[int] | array[float]:
        """Return the blob, list or array that a placeholder stands for. Raises ValueError."""
        nonlocal packed_bytes
        if code not in (_BLOB, *_LISTS, *_ARRAYS) or len(data) != _INDEX_BYTES:
            raise ValueError(f"unknown extension type {code}")
        index = int.from_bytes(data, "big")
        if index not in unused:
            raise ValueError(f"blob {index} is not there or used twice")
        blob = unused.pop(index)
        if code == _BLOB:
            return blob
        packed_bytes += len(blob)
        _check_packed(kind, packed_bytes, limits)
        item_code = _LISTS.get(code) or _ARRAYS[code]
        length, rest = divmod(len(blob), struct.calcsize(f"<{item_code}"))
        if rest:
            raise ValueError(f"blob {index} of {len(blob)} bytes holds no packed numbers")
        if code in _ARRAYS:
            return int32s(bytes(blob)) if item_code == "i" else float64s(bytes(blob))
        return list(struct.unpack(f"<{length}{item_code}", blob))

    try:
        envelope = msgpack.unpackb(header, ext_hook=put_back, max_bin_len=0)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{kind}: bad header: {_one_line(error)}") from None
    if not isinstance(envelope, dict) or envelope.keys() != {"v", "body"}:
        raise ProtocolError(f"{kind}: bad header: not a map of v and body")
    version = envelope["v"]
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{kind}: protocol version {_one_line(version)}, this side has "
            f"{PROTOCOL_VERSION}: run the same dart version on both sides"
        )
    if unused:
        raise ProtocolError(f"{kind}: blob {next(iter(unused))} is used nowhere")
    return envelope["body"]


def _first_fault(kind: str, error: ValidationError) -> str:
    """Return the first fault of a message that was not valid, with its field, in one line."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join([kind, *(str(part) for part in faults[0]["loc"])])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{_one_line(where)}: {_one_line(faults[0]['msg'])}{more}"


def _one_line(value: object) -> str:
    """Return the value's text, printable and at most _ERROR_CHARS long, since its sender may be hostile."""
    text = str(value) or type(value).__name__
    text = "".join(char if char.isprintable() else "?" for char in text[: _ERROR_CHARS + 1])
    return text if len(text) <= _ERROR_CHARS else text[:_ERROR_CHARS] + "..."
