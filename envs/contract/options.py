"""Options of suites, checked by their types before anything starts.

checked    a `make_env` whose options are checked by its annotations
read_toml  a TOML file as a model, checked
first_problem  what is wrong with values from outside, in a line
Seconds, Pause, Count, Megabytes, Size, ImageEncoding   types that several suites have
SharedPools, ResourcePool   guests or devices that an option names, shared out to slots
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
    """(width, height) from a pair or from text like "448x336". Raises TaskError."""
    try:
        parts = size.lower().split("x") if isinstance(size, str) else list(size)
        width, height = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise TaskError(f"size must be WIDTHxHEIGHT such as 448x336, got {size!r}") from None
    return width, height


Size = Annotated[tuple[int, int], BeforeValidator(read_size)]
"""Width and height in pixels, from a pair or from text like "448x336"."""


def checked(make: Callable[P, R]) -> Callable[P, R]:
    """`make_env` that raises TaskError for an option which its annotation does not allow."""
    call = validate_call(make)

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except ValidationError as error:
            raise TaskError(first_problem(error, depth=1)) from None

    return made


def first_problem(error: ValidationError, depth: int | None = None) -> str:
    """Return what pydantic found first: the place, to `depth` parts, and what is wrong there, in a line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"][:depth])) or "it"
    said = first["msg"].removeprefix("Value error, ").replace("Field required", "is missing")
    said = said.replace("Input should", "must", 1)
    said = f" {said}" if said.startswith(("must", "is ")) else f": {said}"
    given = "" if first["type"] in ("missing", "value_error") else repr(first["input"])[:80]
    return f"{where}{said}" + (f", got {given}" if given else "")
