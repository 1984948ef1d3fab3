"""How task files in OSWorld's schema are judged, wherever they are played: pure.

    METRICS   functions that need only the standard library, by the name that `func` gives; each
              takes a result and the task's rules and returns 1.0 where they hold, else 0.0
    claimed   the verdict that the policy's last action decides by itself
    joined    the score of several checks together
    graded    the verdict of that score

All as in OSWorld's desktop_env (desktop_env.py, evaluators/metrics).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from envs.actions import Action, Fail
from envs.base import Verdict
from envs.taskfile import Conjunction, Evaluator

Metric = Callable[[Any, Mapping[str, Any]], float]


def exact_match(result: object, rules: Mapping[str, Any]) -> float:
    """The result is what is expected, to the last blank and line end."""
    return float(result == rules["expected"])


def match_in_list(result: object, rules: Mapping[str, Any]) -> float:
    """The result is one of those expected."""
    return float(result in rules["expected"])


def check_include_exclude(result: str | None, rules: Mapping[str, Any]) -> float:
    """The result holds every text of `include` and none of `exclude`."""
    if result is None:
        return 0.0
    included = all(text in result for text in rules.get("include", []))
    return float(included and not any(text in result for text in rules.get("exclude", [])))


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (exact_match, match_in_list, check_include_exclude)
}


def claimed(evaluator: Evaluator, last: Action | None) -> Verdict | None:
    """The verdict where `last` decides: `fail` passes what cannot be done, and fails all else.

    Also that of a task without an evaluator, which has none.
    """
    if evaluator.missing:
        return Verdict("invalid", "the task has no evaluator; a judge can decide: set [env.judge]")
    if evaluator.infeasible:
        if isinstance(last, Fail):
            return Verdict("pass", "the task cannot be done, and the policy said so")
        return Verdict("fail", "the task cannot be done, and the policy did not say so")
    if isinstance(last, Fail):
        return Verdict("fail", "the policy said that the task cannot be done")
    return None


def joined(scores: Iterable[float], conj: Conjunction) -> float:
    """The score of checks [C] together, evaluated in turn only as far as needed.

    As OSWorld joins them: with `and` the mean, or 0 as soon as one is 0; with `or` the greatest.
    """
    seen = []
    for score in scores:
        if conj == "and" and score == 0.0:
            return 0.0
        if conj == "or" and score == 1.0:
            return 1.0
        seen.append(score)
    return sum(seen) / len(seen) if conj == "and" else max(seen)


def graded(score: float, reason: str) -> Verdict:
    """The score is the reward, held within [0, 1], and passes where it is 1."""
    return Verdict.scored(min(max(score, 0.0), 1.0), reason)
