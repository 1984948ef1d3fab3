"""Random values that a task takes from its seed, and texts that refer to them.

    draw     returns the values of a task's `draw` for one seed
    fill     puts them into any JSON value

A placeholder is `{name}`, or `{name[0]}` for an item of a list. A text that is one placeholder
becomes the value itself, e.g. a number. Later entries may refer to earlier ones:

    {"choice": ["Ann", "Bo"]}              one of them; the list alone is short for it
    {"sample": [["a", "b", "c"], 2]}       two of them, in random order
    {"integer": [1, 9]}                    a whole number, both ends included
    {"integers": [1, 99, 5]}               five different whole numbers
    {"sum": [...]}, {"product": [...]}, {"max": [...]}, {"min": [...]}, {"sorted": [...]}
    {"number": "{d[0]}{d[1]}"}             a text of digits as a whole number
    {"text": "{s}"}                        a value as a text
    {"repeat": ["word ", 40]}              a text that many times
    {"value": "{a}-{b}"}                   the value itself
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

_RANDOM: Mapping[str, Callable[[Random, Any], Any]] = {
    "choice": lambda rng, items: rng.choice(items),
    "sample": lambda rng, arguments: rng.sample(*arguments),
    "integer": lambda rng, ends: rng.randint(*ends),
    "integers": lambda rng, bounds: rng.sample(range(bounds[0], bounds[1] + 1), bounds[2]),
}
_COMPUTED: Mapping[str, Callable[[Any], Any]] = {
    "sum": sum,
    "product": math.prod,
    "max": max,
    "min": min,
    "sorted": sorted,
    "number": int,
    "text": str,
    "repeat": lambda arguments: str(arguments[0]) * arguments[1],
    "value": lambda value: value,
}
KINDS = (*_RANDOM, *_COMPUTED)


def draw(spec: Mapping[str, Any], task_id: str, seed: int) -> dict[str, Any]:
    """Return the values by name. Raises TaskError that names the wrong entry."""
    rng = Random(f"{task_id}/{seed}")  # noqa: S311 - draws tasks, no secrets
    values: dict[str, Any] = {}
    for name, value in spec.items():
        entry = {"choice": value} if isinstance(value, list | tuple) else value
        if not isinstance(entry, Mapping) or len(entry) != 1 or next(iter(entry)) not in KINDS:
            raise TaskError(f"{task_id}: draw.{name} must be one of {', '.join(KINDS)}")
        ((kind, argument),) = entry.items()
        later = [word for word in _placeholders(argument) if word in spec and word not in values]
        if later:
            raise TaskError(f"{task_id}: draw.{name} names {later[0]}, which must come before it")
        try:
            filled = fill(argument, values)
            is_random = kind in _RANDOM
            values[name] = _RANDOM[kind](rng, filled) if is_random else _COMPUTED[kind](filled)
        except (TypeError, ValueError, IndexError) as error:
            raise TaskError(f"{task_id}: draw.{name}: {kind} of {argument}: {error}") from error
    return values


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Return `value` with its placeholders replaced; an unknown placeholder stays unchanged."""
    if isinstance(value, str):
        whole = _PLACEHOLDER.fullmatch(value)
        if whole:
            return _look_up(whole, values)
        return _PLACEHOLDER.sub(lambda match: str(_look_up(match, values)), value)
    if isinstance(value, Mapping):
        return {fill(key, values): fill(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill(item, values) for item in value]
    return value


def _placeholders(value: Any) -> set[str]:
    """Return the names in the placeholders of a value."""
    return {match.group(1) for match in _PLACEHOLDER.finditer(json.dumps(value))}


def _look_up(match: re.Match[str], values: Mapping[str, Any]) -> Any:
    name, index = match.groups()
    if name not in values:
        return match.group()
    return values[name] if index is None else values[name][int(index)]
