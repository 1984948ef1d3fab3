"""The options of suites, checked by their type annotations before anything starts.

checked         a decorator for `make_env`: options that its annotations do not allow raise TaskError
first_problem   the first error that pydantic reports, in one line
Seconds, Pause, Count, Megabytes, Size, ImageEncoding   types that several suites use
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Annotated, Literal, ParamSpec, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, validate_call

from bus.errors import TaskError

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T", bound=Hashable)

Seconds = Annotated[float, Field(gt=0, strict=True)]
Pause = Annotated[float, Field(ge=0, strict=True)]
"""Seconds, 0 for none."""
Count = Annotated[int, Field(ge=0, strict=True)]
Megabytes = Annotated[float, Field(gt=0, strict=True)]
ImageEncoding = Literal["png", "jpeg"]


def read_size(size: Sequence[int] | str) -> tuple[int, int]:
    """Return (width, height) from a pair or from a text such as "448x336". Raises TaskError."""
    try:
        parts = size.lower().split("x") if isinstance(size, str) else list(size)
        width, height = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise TaskError(f"size must be WIDTHxHEIGHT such as 448x336, got {size!r}") from None
    return width, height


Size = Annotated[tuple[int, int], BeforeValidator(read_size)]
"""Width and height in pixels, from a pair or from text like "448x336"."""


def checked(make: Callable[P, R]) -> Callable[P, R]:
    """Return `make` so that it raises TaskError for an option that its annotation does not allow."""
    call = validate_call(make)

    @wraps(make)
    def checked_make(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except ValidationError as error:
            raise TaskError(first_problem(error, depth=1)) from None

    return checked_make


def first_problem(error: ValidationError, depth: int | None = None) -> str:
    """Return the first error that pydantic reports in one line: its place, to `depth` parts, and its text."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"][:depth])) or "it"
    message = first["msg"].removeprefix("Value error, ").replace("Field required", "is missing")
    message = message.replace("Input should", "must", 1)
    message = f" {message}" if message.startswith(("must", "is ")) else f": {message}"
    value = "" if first["type"] in ("missing", "value_error") else repr(first["input"])[:80]
    return f"{where}{message}" + (f", got {value}" if value else "")
