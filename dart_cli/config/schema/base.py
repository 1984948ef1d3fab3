"""The base of all sections, and the types and bounds that their fields share."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

from bus.error_texts import did_you_mean

_AnyPath = TypeVar("_AnyPath", str, Path)


class Section(BaseModel):
    """Base of all sections: frozen and strict, without unknown keys.

    The docstrings of fields are their help texts.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def without_control(path: _AnyPath) -> _AnyPath:
    """Return `path` unchanged.

    Raises PydanticCustomError if it has a null byte, a line break or a control character.
    """
    if "\0" in str(path):
        raise PydanticCustomError("null_byte", "has a null byte, as no path has; choose another")
    if not str(path).isprintable():
        raise PydanticCustomError(
            "control_character", "has a line break or control character; choose another path"
        )
    return path


def iso_date(text: str) -> str:
    """Return `text` unchanged. Raises PydanticCustomError if it is no date YYYY-MM-DD."""
    try:
        if dt.date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise PydanticCustomError("date", "must be a date as YYYY-MM-DD, such as 2026-01-31")


def one_of(names: Collection[str], own: str) -> AfterValidator:
    """Return a check that accepts one of `names`, or the user's own code, which is written like `own`."""

    def check(name: str) -> str:
        if name not in names and ":" not in name:
            raise PydanticCustomError(
                "own_name",
                f"must be {', '.join(names)}, or your own as {own}",
                {"hint": did_you_mean(name, names)},
            )
        return name

    return AfterValidator(check)


TRAIN_SEEDS = 1_000_000
"""Training episodes have task seeds below this number, held-out ones have seeds from it on."""

MANY = 1_000_000
"""Upper bound of counts and seconds that have no smaller bound. A larger number is a typing mistake."""

MOST_THREADS = 1024
MOST_SLOTS = 10_000
"""Environments, requests or sessions of one process; each environment is a thread or a process."""
MOST_TOKENS = 1_000_000
"""Tokens of one completion."""
MOST_PIXELS = 2**31 - 1

Positive = Annotated[int, Field(ge=1, le=MANY)]
Count = Annotated[int, Field(ge=0, le=MANY)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Megabytes = Annotated[int, Field(ge=1, le=16 * MANY)]
Seconds = Annotated[float, Field(ge=0, le=MANY)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MANY)]
Folder = Annotated[Path, Strict(False), AfterValidator(without_control)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
