"""Numbers that travel as a raw frame of their own: a batch has millions.

    Packed             marks a field as such
    Int32s, Float64s   fields that are arrays on both ends, never lists of Python numbers
    PromptIds          the same of int32; who makes a message may give a list, which becomes an array
    int32s, float64s   such an array, of any numbers or of little-endian bytes

A field that is only `Packed` is a list in memory, ten times as large as its frame.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import PlainValidator

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:
    IntArray = FloatArray = array

Code = Literal["i", "d"]
"""int32 or float64, little-endian in a frame, as struct and array name them."""


@dataclass(frozen=True)
class Packed:
    """Marks a list or an array of numbers that is a frame of its own."""

    code: Code


def _is_array_of(code: Code) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, array) or value.typecode != code:
            raise ValueError("must be a packed array")
        return value

    return check


def _as_prompt_ids(value: object) -> object:
    if not isinstance(value, list):
        return _is_array_of("i")(value)
    if any(type(each) is not int for each in value):
        raise ValueError("must be integers")
    try:
        return array("i", value)
    except OverflowError:
        raise ValueError("must be integers of 32 bits") from None


Int32s = Annotated[IntArray, Packed("i"), PlainValidator(_is_array_of("i"))]
Float64s = Annotated[FloatArray, Packed("d"), PlainValidator(_is_array_of("d"))]
PromptIds = Annotated[IntArray, Packed("i"), PlainValidator(_as_prompt_ids)]


def int32s(values: Iterable[int] | bytes) -> IntArray:
    """Return the integers, or the little-endian bytes of such. Raises OverflowError for one that does not fit."""
    return _array("i", values)


def float64s(values: Iterable[float] | bytes) -> FloatArray:
    """Return the numbers, or the little-endian bytes of such."""
    return _array("d", values)


def little_endian(values: array[int] | array[float]) -> bytes:
    """Return the bytes of an array, as they travel."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _array(code: Code, values: Iterable[float] | bytes) -> array:  # type: ignore[type-arg]
    if not isinstance(values, bytes):
        return array(code, values)
    made = array(code)
    made.frombytes(values)
    if sys.byteorder == "big":
        made.byteswap()
    return made
