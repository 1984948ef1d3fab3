"""An evaluator's functions, and the verdict of its checks together.

    METRICS    name -> function(result, expected, **options) -> bool
    judge      all checks of a task -> a verdict

The names are OSWorld's where it has such a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bus.errors import TaskError
from envs.base import Verdict
from envs.desktop.getters import GetterContext, get
from envs.taskfile import Check, Evaluator


def exact_match(result: Any, expected: Any) -> bool:
    """Equal; 1 and 1.0 are, "1" and 1 are not."""
    return bool(result == expected)


def same_text(result: Any, expected: Any) -> bool:
    """Equal texts, ignoring space at line ends and around the whole."""
    return result is not None and _lines(result) == _lines(expected)


def near(result: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Numbers, or lists of them, that differ by no more than `tolerance`."""
    if isinstance(expected, list):
        return (
            isinstance(result, list)
            and len(result) == len(expected)
            and all(map(lambda a, b: near(a, b, tolerance), result, expected))
        )
    try:
        number = float(result)
    except (TypeError, ValueError):
        return False
    return math.isclose(number, float(expected), abs_tol=tolerance, rel_tol=0.0)


def includes(result: Any, expected: Any) -> bool:
    """A text, or a list, that holds all of a list."""
    return result is not None and all(each in result for each in expected)


def lacks(result: Any, expected: Any) -> bool:
    """A text, or a list, that holds nothing of a list."""
    return result is not None and not any(each in result for each in expected)


def has_items(result: Any, expected: Mapping[str, Any]) -> bool:
    """A list whose items, by their number, have at least these fields: {"0": {"bold": true}}."""
    return result is not None and all(
        int(number) < len(result)
        and all(result[int(number)].get(key) == value for key, value in fields.items())
        for number, fields in expected.items()
    )


def includes_items(result: Any, expected: Sequence[Mapping[str, Any]]) -> bool:
    """A list that holds, for each of `expected`, an item with at least these fields."""
    return result is not None and all(
        any(fields.items() <= item.items() for item in result) for fields in expected
    )


METRICS: Mapping[str, Callable[..., bool]] = {
    each.__name__: each
    for each in (exact_match, same_text, near, includes, lacks, has_items, includes_items)
}


def judge(evaluator: Evaluator, scene: GetterContext) -> Verdict:
    """Pass or fail by the checks. Raises TaskError for a check that cannot be made."""
    failed = []
    for number, check in enumerate(evaluator.checks):
        holds, seen = _holds(check, scene)
        if holds and evaluator.conj == "or":
            return Verdict("pass", f"check {number} ({check.func}) holds")
        if not holds:
            failed.append(f"check {number} ({check.func}): got {seen}")
    if failed:
        return Verdict("fail", "; ".join(failed)[:500])
    return Verdict("pass", "all checks hold")


def _holds(check: Check, scene: GetterContext) -> tuple[bool, str]:
    """Whether a check holds, and the value it saw."""
    if check.func not in METRICS:
        raise TaskError(f"no function {check.func!r}; there are {', '.join(sorted(METRICS))}")
    result, expected = (
        None if getter is None else get(scene, getter.type, getter.parameters)
        for getter in (check.result, check.expected)
    )
    return METRICS[check.func](result, expected, **check.options), repr(result)[:200]


def _lines(text: Any) -> list[str]:
    return [line.rstrip() for line in str(text).strip().splitlines()]
