"""Values that a task draws from its seed, and texts that refer to them.

    draw     the values of a task's `draw` for one seed
    fill     put them into any JSON value

A placeholder is `{name}`, or `{name[0]}` for an item of a list. A text that is one placeholder
becomes the value itself, e.g. a number. Later entries may name earlier ones:

    {"choice": ["Ann", "Bo"]}              one of them
    {"sample": [["a", "b", "c"], 2]}       two of them, in random order
    {"integer": [1, 9]}                    a whole number, both ends included
    {"integers": [1, 99, 5]}               five different ones
    {"sum": [...]}, {"product": [...]}, {"max": [...]}, {"min": [...]}, {"sorted": [...]}
    {"number": "{d[0]}{d[1]}"}             a text of digits as a whole number
    {"text": "{s}"}                        a value as a text
    {"repeat": ["word ", 40]}              a text that many times
    {"value": "{a}-{b}"}                   as it is
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from bus.errors import TaskError

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)(?:\[(\d+)\])?\}")

_DRAWN: Mapping[str, Callable[[Random, Any], Any]] = {
    "choice": lambda rng, told: rng.choice(told),
    "sample": lambda rng, told: rng.sample(*told),
    "integer": lambda rng, told: rng.randint(*told),
    "integers": lambda rng, told: rng.sample(range(told[0], told[1] + 1), told[2]),
}
_MADE: Mapping[str, Callable[[Any], Any]] = {
    "sum": sum,
    "product": math.prod,
    "max": max,
    "min": min,
    "sorted": sorted,
    "number": int,
    "text": str,
    "repeat": lambda told: str(told[0]) * told[1],
    "value": lambda told: told,
}
KINDS = (*_DRAWN, *_MADE)


def draw(spec: Mapping[str, Any], task_id: str, seed: int) -> dict[str, Any]:
    """Return the values by name. Raises TaskError naming the entry that is wrong."""
    rng = Random(f"{task_id}/{seed}")  # noqa: S311 - draws tasks, no secrets
    values: dict[str, Any] = {}
    for name, entry in spec.items():
        if not isinstance(entry, Mapping) or len(entry) != 1 or next(iter(entry)) not in KINDS:
            raise TaskError(f"{task_id}: draw.{name} must be one of {', '.join(KINDS)}")
        ((kind, told),) = entry.items()
        later = [each for each in _named(told) if each in spec and each not in values]
        if later:
            raise TaskError(f"{task_id}: draw.{name} names {later[0]}, which must come before it")
        try:
            made = fill(told, values)
            values[name] = _DRAWN[kind](rng, made) if kind in _DRAWN else _MADE[kind](made)
        except (TypeError, ValueError, IndexError) as error:
            raise TaskError(f"{task_id}: draw.{name}: {kind} of {told}: {error}") from error
    return values


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """`value` with its placeholders filled in; an unknown name stays as it is."""
    if isinstance(value, str):
        whole = _PLACEHOLDER.fullmatch(value)
        if whole:
            return _look_up(whole, values)
        return _PLACEHOLDER.sub(lambda found: str(_look_up(found, values)), value)
    if isinstance(value, Mapping):
        return {fill(key, values): fill(each, values) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [fill(each, values) for each in value]
    return value


def _named(value: Any) -> set[str]:
    """Names that the placeholders of a value use."""
    return {found.group(1) for found in _PLACEHOLDER.finditer(json.dumps(value))}


def _look_up(found: re.Match[str], values: Mapping[str, Any]) -> Any:
    name, index = found.groups()
    if name not in values:
        return found.group()
    return values[name] if index is None else values[name][int(index)]
