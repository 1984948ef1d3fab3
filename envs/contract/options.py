"""Options of suites, checked by their types before anything starts.

checked    a `make_env` whose options are checked by its annotations
read_toml  a TOML file as a model, checked
first_problem  what is wrong with values from outside, in a line
Seconds, Pause, Count, Megabytes, Size, ImageEncoding   types that several suites have
SharedPools, ResourcePool   guests or devices that an option names, shared out to slots
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Generic, Literal, ParamSpec, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, validate_call

from bus.errors import EnvError, TaskError
from envs.contract.textfiles import read_text

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


def read_toml(path: Path, model: type[M]) -> M:
    """Return what a TOML file says, checked. Raises TaskError that names the place."""
    try:
        return model.model_validate(tomllib.loads(read_text(path)))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: no TOML: {error}") from None
    except ValidationError as error:
        raise TaskError(f"{path}: {first_problem(error)}") from None


class ResourcePool(Generic[T]):
    """`items` of option `option`, each used by one slot at a time. Raises TaskError for a duplicate."""

    def __init__(self, items: Sequence[T], option: str) -> None:
        if len(set(items)) < len(items):
            raise TaskError(f"{option} names one twice; each slot needs its own")
        self._count = len(items)
        self._free = list(items)
        self._option = option
        self._lock = threading.Lock()

    def take(self) -> T:
        """Take a free one. Raises EnvError."""
        with self._lock:
            if not self._free:
                raise EnvError(
                    f"all {self._count} of env.options.{self._option} are in use; env.slots must not be greater "
                    "than their number, and an environment that hangs keeps its own"
                )
            return self._free.pop(0)

    def give_back(self, item: T) -> None:
        """Put it back."""
        with self._lock:
            self._free.insert(0, item)


class SharedPools(Generic[T]):
    """One pool for all environments of a process that name the same resources by option `option`."""

    def __init__(self, option: str, read: Callable[[str], T]) -> None:
        self._option = option
        self._read = read
        self._pools: dict[tuple[str, ...], ResourcePool[T]] = {}
        self._lock = threading.Lock()

    def of(self, named: str | Sequence[str]) -> ResourcePool[T]:
        """Return the pool of one or several names. Raises TaskError for one that cannot be read."""
        names = (named,) if isinstance(named, str) else tuple(named)
        with self._lock:
            if names not in self._pools:
                self._pools[names] = ResourcePool(
                    [self._read(each) for each in names], self._option
                )
            return self._pools[names]
