"""Random messages for benchmarks/faults/fuzz.py.

random_message   well-formed, with random values
mutated          a message with bytes or frames changed
strangers        frames that are no messages
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
import typing
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from bus.codec import MESSAGES, decode, encode
from bus.errors import ProtocolError
from bus.messages import Message
from bus.packed import Code, float64s, int32s

FRESH = 10_000
"""Mutated messages between two sets of well-formed ones that they are made of."""
GAUGES = (
    "slots",
    "in_flight",
    "waiting",
    "tokens",
    "updates",
    "seconds.playing",
    "seconds.starting",
)
"""Gauges that data computes with; others it only passes on."""
_EDGES = (0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63))
"""All can be sent: one integer that msgpack cannot carry would cost the whole message."""


def random_value(kind: Any, chance: random.Random) -> Any:
    """Return a value that a field annotated `kind` takes, edge cases among them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return chance.choice(arguments)
    if origin is typing.Annotated:
        if arguments[0] is array:
            return _random_array(arguments[1].code, chance)
        return random_value(arguments[0], chance)
    if origin in (typing.Union, types.UnionType):
        return random_value(chance.choice(arguments), chance)
    if origin is list:
        return [random_value(arguments[0], chance) for _ in range(chance.randrange(4))]
    if origin is dict:
        keys = [random_value(str, chance) for _ in range(chance.randrange(4))]
        return {key: random_value(arguments[1], chance) for key in keys}
    if kind is Any:
        return random_value(chance.choice([int, float, str, bool]), chance)
    if isinstance(kind, type) and issubclass(kind, Message):
        return random_message(kind, chance)
    simple: dict[Any, Callable[[], Any]] = {
        int: lambda: chance.choice([*_EDGES, chance.randrange(1000)]),
        float: lambda: chance.choice(
            [0.0, -1.0, 1e15, 1e308, float("nan"), float("inf"), chance.random()]
        ),
        str: lambda: chance.choice(
            ["", "env-0", "g000001-00", "../../x", "\x00\n[red]", "é" * 300]
        ),
        bool: lambda: chance.random() < 0.5,
        bytes: lambda: chance.randbytes(chance.randrange(50)),
        type(None): lambda: None,
    }
    return simple[kind]()


def _random_array(code: Code, chance: random.Random) -> Any:
    if code == "i":
        return int32s(chance.randrange(-(2**31), 2**31) for _ in range(chance.randrange(4)))
    return float64s(random_value(float, chance) for _ in range(chance.randrange(4)))


def random_message(kind: type[Message], chance: random.Random) -> Message:
    """Return a well-formed message of random values. Fields that are out of bounds are drawn again."""
    hints = _hints(kind)
    values: dict[str, Any] = {}
    refused: Iterable[str] = kind.model_fields
    while True:
        values |= {name: random_value(hints[name], chance) for name in refused}
        if "gauges" in refused:
            names = chance.sample(GAUGES, chance.randrange(len(GAUGES) + 1))
            values["gauges"] |= {name: random_value(float, chance) for name in names}
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            places = [each["loc"] for each in error.errors(include_url=False)]
            # An error without a place says that the fields do not go together. In order: seeds repeat.
            refused = (
                dict.fromkeys(str(place[0]) for place in places)
                if all(places)
                else kind.model_fields
            )


@functools.cache
def _hints(kind: type[Message]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def corpus(chance: random.Random, each: int = 5) -> list[list[bytes]]:
    """Return the frames of well-formed messages of every kind."""
    messages: list[list[bytes]] = []
    while len(messages) < each * len(MESSAGES):
        with contextlib.suppress(ProtocolError):  # an int that msgpack cannot carry
            kind = list(MESSAGES.values())[len(messages) // each]
            messages.append(encode(random_message(kind, chance)))
    return messages


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Return the frames with something wrong: noise, or bytes and frames flipped, cut, doubled, moved."""
    if chance.random() < 0.1:
        return [chance.randbytes(chance.randrange(80)) for _ in range(chance.randrange(5))]
    frames = list(frames)
    for _ in range(chance.randrange(1, 4)):
        index = chance.randrange(len(frames)) if frames else 0
        frame = bytearray(frames[index]) if frames else bytearray()
        what = chance.randrange(6)
        if what == 0 and frame:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        elif what == 1:
            del frame[chance.randrange(len(frame) + 1) :]
        elif what == 2:
            at = chance.randrange(len(frame) + 1)
            frame[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif what == 3 and frames:
            frames.insert(chance.randrange(len(frames)), frames[index])
            continue
        elif what == 4 and frames:
            del frames[index]
            continue
        elif what == 5:
            chance.shuffle(frames)
            continue
        if frames:
            frames[index] = bytes(frame)
    return frames


def is_message(frames: list[bytes]) -> bool:
    """Return True if the bus decodes the frames as a message."""
    try:
        decode(frames)
    except ProtocolError:
        return False
    return True


def strangers(count: int, chance: random.Random) -> Iterator[list[bytes]]:
    """Return `count` mutated messages that are not valid."""
    messages: list[list[bytes]] = []
    while count:
        if count % FRESH == 0 or not messages:
            messages = corpus(chance)
        frames = mutated(chance.choice(messages), chance)
        if not is_message(frames):
            count -= 1
            yield frames
