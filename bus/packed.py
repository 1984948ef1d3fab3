"""Fields of numbers that are sent as raw frames; a batch has millions of numbers.

    Packed             marks a field of numbers as one raw frame
    Int32s, Float64s   types of packed fields that are arrays on both ends, never lists of Python numbers
    PromptIds          like Int32s; a list is also accepted and becomes an array
    int32s, float64s   make such an array from numbers or from little-endian bytes

A field that is only `Packed` is a list in memory, which is ten times as large as its frame.
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
"""int32 or float64, as in the modules struct and array; little-endian in a frame."""


@dataclass(frozen=True)
class Packed:
    """The mark of a list or an array of numbers that is sent as one raw frame."""

    code: Code


def _is_array_of(code: Code) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, array) or value.typecode != code:
            raise ValueError("must be a packed array")
        return value

    return check


def _as_prompt_ids(value: object) -> object:
    """Return an int32 array, made from a list if necessary. Raises ValueError for other values."""
    if not isinstance(value, list):
        return _is_array_of("i")(value)
    if any(type(item) is not int for item in value):
        raise ValueError("must be integers")
    try:
        return array("i", value)
    except OverflowError:
        raise ValueError("must be integers of 32 bits") from None


Int32s = Annotated[IntArray, Packed("i"), PlainValidator(_is_array_of("i"))]
Float64s = Annotated[FloatArray, Packed("d"), PlainValidator(_is_array_of("d"))]
PromptIds = Annotated[IntArray, Packed("i"), PlainValidator(_as_prompt_ids)]


def int32s(values: Iterable[int] | bytes) -> IntArray:
    """Return an int32 array, made from integers or from their little-endian bytes.

    Raises OverflowError for an integer that does not fit.
    """
    return _array("i", values)


def float64s(values: Iterable[float] | bytes) -> FloatArray:
    """Return a float64 array, made from numbers or from their little-endian bytes."""
    return _array("d", values)


def little_endian(values: array[int] | array[float]) -> bytes:
    """Return the bytes of an array as they stand in a frame: little-endian on every machine."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _array(code: Code, values: Iterable[float] | bytes) -> array:  # type: ignore[type-arg]
    if not isinstance(values, bytes):
        return array(code, values)
    numbers = array(code)
    numbers.frombytes(values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
