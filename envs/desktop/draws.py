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
from collections.abc import Mapping
from random import Random
from typing import Any

from bus.errors import TaskError

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)(?:\[(\d+)\])?\}")

KINDS = (
    *("choice", "sample", "integer", "integers"),
    *("sum", "product", "max", "min", "sorted", "number", "text", "repeat", "value"),
)


def draw(spec: Mapping[str, Any], task_id: str, seed: int) -> dict[str, Any]:
    """The values by name. Raises TaskError naming the entry that is wrong."""
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
            values[name] = _value(kind, fill(told, values), rng)
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


def _value(kind: str, told: Any, rng: Random) -> Any:
    match kind:
        case "choice":
            return rng.choice(told)
        case "sample":
            return rng.sample(told[0], told[1])
        case "integer":
            return rng.randint(*told)
        case "integers":
            low, high, count = told
            return rng.sample(range(low, high + 1), count)
        case "sum":
            return sum(told)
        case "product":
            return math.prod(told)
        case "max":
            return max(told)
        case "min":
            return min(told)
        case "sorted":
            return sorted(told)
        case "number":
            return int(told)
        case "text":
            return str(told)
        case "repeat":
            text, count = told
            return str(text) * count
        case _:
            return told
