"""Message <-> wire frames `[kind, header, *blobs]`.

    kind    the message's class name, ASCII
    header  msgpack map {"v": PROTOCOL_VERSION, "body": fields}
    blobs   one raw frame for each `bytes` value of the message, in reading order

A `bytes` value anywhere in a message (field, list element, dict value) becomes a blob; the header
holds `ExtType(1, index)` in its place. So a screenshot is neither copied into the header nor
base64-encoded, and sockets can send it without a copy.

`decode` believes nothing: whatever the bytes are, it returns a validated message or raises
ProtocolError with one line that names the kind and the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
from pydantic import ValidationError

from bus.errors import ProtocolError
from bus.messages import MESSAGES, PROTOCOL_VERSION, Message

MAX_KIND_BYTES = 64
MAX_HEADER_BYTES = 64 * 2**20
"""A batch of 512 samples of 8,192 tokens takes about 40 MB."""
MAX_BLOBS = 16_384
MAX_BLOB_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 2**30
"""Of one message, all frames together."""

_BLOB = 1  # ExtType code of a blob's place in the header
_INDEX_BYTES = 4
_ERROR_CHARS = 300
_SCALARS = frozenset({int, float, str, bool, type(None)})


def encode(message: Message) -> list[bytes]:
    """Frames `[kind, header, *blobs]` of a message.

    Raises ProtocolError if the message is over a limit or holds a value msgpack cannot carry.
    """
    kind = type(message).__name__
    if MESSAGES.get(kind) is not type(message):
        raise ProtocolError(f"{kind}: not a kind that may stand alone on the wire")
    blobs: list[bytes] = []
    try:
        body = _lift_blobs(message, blobs)
        header: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "body": body})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{kind}: cannot be sent: {_one_line(error)}") from None
    frames = [kind.encode("ascii"), header, *blobs]
    _check_sizes(kind, frames)
    return frames


def decode(frames: Sequence[bytes]) -> Message:
    """The message of frames `[kind, header, *blobs]`; never anything but it or ProtocolError."""
    if len(frames) < 2:
        raise ProtocolError(f"message of {len(frames)} frames: a kind and a header are needed")
    kind = _kind_of(frames[0])
    message_type = MESSAGES[kind]
    _check_sizes(kind, frames)
    body = _unpack(kind, frames[1], frames[2:])
    try:
        return message_type.model_validate(body)
    except ValidationError as error:
        raise ProtocolError(_first_fault(kind, error)) from None
    except RecursionError:
        raise ProtocolError(f"{kind}: nested too deeply") from None


def _lift_blobs(value: Any, blobs: list[bytes]) -> Any:
    """The value as plain containers, its `bytes` moved to `blobs` with an ExtType left behind."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        blobs.append(value)
        return msgpack.ExtType(_BLOB, (len(blobs) - 1).to_bytes(_INDEX_BYTES, "big"))
    if isinstance(value, Message):
        fields = dict(value.__dict__)
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
    """The fields that may hold `bytes` or messages, by their annotations.

    The others, token ids and log-probabilities among them, are most of a batch: they pass whole.
    """
    annotations = get_type_hints(message_type)
    return tuple(name for name in message_type.model_fields if not _is_plain(annotations[name]))


def _is_plain(annotation: Any) -> bool:
    """Whether values of the annotation are made of scalars, lists and dicts alone."""
    if get_origin(annotation) is Literal:
        return True
    arguments = get_args(annotation)
    return all(map(_is_plain, arguments)) if arguments else annotation in _SCALARS


def _kind_of(frame: bytes) -> str:
    kind = frame[:MAX_KIND_BYTES].decode("ascii", errors="replace")
    if len(frame) > MAX_KIND_BYTES or kind not in MESSAGES:
        raise ProtocolError(f"unknown message kind {kind!a}")
    return kind


def _check_sizes(kind: str, frames: Sequence[bytes]) -> None:
    header, blobs = frames[1], frames[2:]
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{kind}: header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    if len(blobs) > MAX_BLOBS:
        raise ProtocolError(f"{kind}: {len(blobs)} blobs, limit {MAX_BLOBS}")
    largest = max(map(len, blobs), default=0)
    if largest > MAX_BLOB_BYTES:
        raise ProtocolError(f"{kind}: blob of {largest} bytes, limit {MAX_BLOB_BYTES}")
    total = sum(map(len, frames))
    if total > MAX_TOTAL_BYTES:
        raise ProtocolError(f"{kind}: {total} bytes in all, limit {MAX_TOTAL_BYTES}")


def _unpack(kind: str, header: bytes, blobs: Sequence[bytes]) -> Any:
    """The header's body with every blob in its place, each used exactly once."""
    unused = dict(enumerate(blobs))

    def put_back(code: int, data: bytes) -> bytes:
        if code != _BLOB or len(data) != _INDEX_BYTES:
            raise ValueError(f"unknown extension type {code}")
        index = int.from_bytes(data, "big")
        if index not in unused:
            raise ValueError(f"blob {index} is not there or used twice")
        return unused.pop(index)

    try:
        envelope = msgpack.unpackb(header, ext_hook=put_back, max_bin_len=0)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{kind}: bad header: {_one_line(error)}") from None
    if not isinstance(envelope, dict) or envelope.keys() != {"v", "body"}:
        raise ProtocolError(f"{kind}: bad header: not a map of v and body")
    version = envelope["v"]
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{kind}: protocol version {_one_line(version)}, this side speaks "
            f"{PROTOCOL_VERSION}: run the same dart version on both sides"
        )
    if unused:
        raise ProtocolError(f"{kind}: blob {next(iter(unused))} is used nowhere")
    return envelope["body"]


def _first_fault(kind: str, error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join([kind, *(str(part) for part in faults[0]["loc"])])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{_one_line(where)}: {_one_line(faults[0]['msg'])}{more}"


def _one_line(value: object) -> str:
    """Text fit for a log line, whatever a hostile sender put into it."""
    text = str(value) or type(value).__name__
    text = "".join(char if char.isprintable() else "?" for char in text[: _ERROR_CHARS + 1])
    return text if len(text) <= _ERROR_CHARS else text[:_ERROR_CHARS] + "..."
