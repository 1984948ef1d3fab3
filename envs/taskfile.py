"""Task files in OSWorld's JSON schema: read, checked, and all their errors collected.

    TaskFile       one file: goal, set-up, evaluator, and what we add (split, solution, near misses)
    Evaluator      checks joined by `and` or `or`, with what to do before them
    load_tasks     a folder of files -> the good ones by id, and an error for each other one
    read_task      one decoded file
    read_ids       a list of ids from a file, such as OSWorld's test_all.json
    METRICS        functions of checks that need only the standard library, by the name that `func` gives
    claimed        the verdict that the policy's last action decides by itself
    joined, graded the score of several checks together, and its verdict

The schema is OSWorld's (desktop_env/desktop_env.py, evaluation_examples/examples). Its `func`,
`result`, `expected` and `options` are each one value or lists in step; here they are one `Check` for
each function. The environment defines the types of set-up steps, getters and functions; nothing is
run here. METRICS, joined and graded do as OSWorld (desktop_env.py, evaluators/metrics). Unknown fields are kept in `extra`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from bus.errors import ActionError, TaskError
from envs.actions import Action, Fail, action_from_dict
from envs.base import Split, Verdict

Conjunction = Literal["and", "or"]

NO_EVALUATOR = "none"
"""What `evaluator` is in the file of a task that has none."""

INFEASIBLE = "infeasible"
"""The function of tasks that cannot be done: only the action `fail` passes them."""

DEFAULT_MAX_STEPS = 15  # OSWorld's


@dataclass(frozen=True)
class SetupStep:
    """One entry of `config` or `postconfig`, e.g. type `launch` with `command`."""

    type: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Getter:
    """Where a value comes from: a type, e.g. `vm_file` or `rule`, and its other fields."""

    type: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One function of an evaluator: func(result, expected, **options) -> 0.0 to 1.0."""

    func: str
    result: Getter | None = None
    expected: Getter | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """Judges the state: its checks, all or any of which must hold once `postconfig` is done."""

    checks: tuple[Check, ...]
    conj: Conjunction = "and"
    postconfig: tuple[SetupStep, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether the task file says that there is none; a judge then decides (`[env.judge]`)."""
        return not self.checks

    @property
    def infeasible(self) -> bool:
        """Whether the task cannot be done."""
        return any(check.func == INFEASIBLE for check in self.checks)


@dataclass(frozen=True)
class NearMiss:
    """Actions that nearly solve the task and must fail."""

    why: str  # why they are wrong
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class TaskFile:
    """One task. The fields from `split` on are our additions to the schema, all optional."""

    id: str  # unique in its folder
    snapshot: str  # the state it starts from; in OSWorld mostly the name of an application
    instruction: str
    config: tuple[SetupStep, ...]
    evaluator: Evaluator
    split: Split = "train"
    max_steps: int = DEFAULT_MAX_STEPS
    solution: tuple[Action, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    draw: Mapping[str, Any] = field(default_factory=dict)  # values drawn from the seed, by name
    extra: Mapping[str, Any] = field(default_factory=dict)  # e.g. related_apps, proxy
    path: Path | None = None


@dataclass(frozen=True)
class LoadedTasks:
    """What a folder holds; each error names file, field and cure."""

    tasks: Mapping[str, TaskFile]  # by id, in the order of their paths
    errors: tuple[TaskError, ...]


_OURS = ("split", "max_steps", "solution", "near_misses", "draw")
_FIELDS = ("id", "snapshot", "instruction", "config", "evaluator", *_OURS)
_EVALUATOR_FIELDS = ("func", "result", "expected", "options", "conj", "postconfig")


def load_tasks(folder: Path, *, heldout: Collection[str] = ()) -> LoadedTasks:
    """All `*.json` below `folder`; the ids in `heldout` are never trained on, whatever their files say.

    Raises TaskError where the folder does not exist or holds no such file, or where an id of
    `heldout` names no task of it.
    """
    if not folder.is_dir():
        raise TaskError(f"no folder of tasks at {folder}; name one that holds *.json files")
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise TaskError(f"{folder} holds no task file; a task is one *.json file")
    tasks: dict[str, TaskFile] = {}
    errors: list[TaskError] = []
    for path in paths:
        try:
            task = read_task(_decode(path), path, heldout=heldout)
            if task.id in tasks:
                other = tasks[task.id].path
                _refuse(path, "id", f"is {task.id!r} in {other} too; give each task its own")
            tasks[task.id] = task
        except TaskError as error:
            errors.append(error)
    if not errors and (strange := sorted(set(heldout) - set(tasks))):
        raise TaskError(f"{folder} has no task {strange[0]!r}, which is to be held out")
    return LoadedTasks(tasks, tuple(errors))


def read_ids(path: Path) -> list[str]:
    """Task ids of a JSON file: a list, or lists by domain as in OSWorld's test_all.json."""
    value = _decode(path)
    lists = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(ids, list) for ids in lists):
        raise TaskError(f"{path}: must be a list of ids, or an object of such lists")
    ids = [each for ids in lists for each in ids]
    if not all(isinstance(each, str) for each in ids):
        raise TaskError(f"{path}: ids must be strings")
    return ids


def read_task(value: object, path: Path, *, heldout: Collection[str] = ()) -> TaskFile:
    """The task that a decoded file describes. Raises TaskError naming file, field and cure."""
    if not isinstance(value, dict):
        _refuse(path, "the file", "must hold one JSON object, with id, instruction, evaluator")
    for key in value:
        near = difflib.get_close_matches(key, _FIELDS, 1, 0.85)
        if near and key != near[0]:
            _refuse(path, key, f"is not a field of a task; did you mean {near[0]!r}?")
    task_id = _text(path, value, "id")
    return TaskFile(
        id=task_id,
        snapshot=_text(path, value, "snapshot", default=""),
        instruction=_text(path, value, "instruction"),
        config=_setup(path, "config", value.get("config", [])),
        evaluator=_evaluator(path, value.get("evaluator")),
        split="heldout" if task_id in heldout else _split(path, value.get("split", "train")),
        max_steps=_max_steps(path, value.get("max_steps", DEFAULT_MAX_STEPS)),
        solution=_actions(path, "solution", value.get("solution", [])),
        near_misses=_near_misses(path, value.get("near_misses", [])),
        draw=_object(path, "draw", value.get("draw", {})),
        extra={key: each for key, each in value.items() if key not in _FIELDS},
        path=path,
    )


def _decode(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise TaskError(f"{path}: is not JSON: {error.msg} at {where}") from error


def _evaluator(path: Path, value: object) -> Evaluator:
    if value == NO_EVALUATOR:
        return Evaluator(())
    if not isinstance(value, dict):
        cure = 'must be an object with func, e.g. {"func": "exact_match", ...}, or "none" for a task without'
        _refuse(path, "evaluator", cure)
    for key in value:
        near = difflib.get_close_matches(key, _EVALUATOR_FIELDS, 1, 0.85)
        if near and key != near[0]:
            _refuse(path, f"evaluator.{key}", f"is not a field; did you mean {near[0]!r}?")
    conj = value.get("conj", "and")
    if conj not in ("and", "or"):
        _refuse(path, "evaluator.conj", f'must be "and" or "or", got {conj!r}')
    checks = _checks(path, value)
    if len(checks) > 1 and any(check.func == INFEASIBLE for check in checks):
        _refuse(path, "evaluator.func", f"{INFEASIBLE!r} must stand alone")
    postconfig = _setup(path, "evaluator.postconfig", value.get("postconfig", []))
    return Evaluator(checks, cast("Conjunction", conj), postconfig)


def _checks(path: Path, value: Mapping[str, Any]) -> tuple[Check, ...]:
    func = value.get("func")
    funcs = func if isinstance(func, list) else [func]
    if not funcs or not all(isinstance(each, str) and each for each in funcs):
        cure = 'must be the name of a function, e.g. "exact_match", or a list of names'
        _refuse(path, "evaluator.func", f"{cure}, got {func!r}")
    columns = {
        key: _in_step(path, key, value.get(key), func) for key in ("result", "expected", "options")
    }
    return tuple(
        Check(
            name,
            _getter(path, "evaluator.result", result),
            _getter(path, "evaluator.expected", expected),
            _object(path, "evaluator.options", options or {}),
        )
        for name, result, expected, options in zip(funcs, *columns.values(), strict=True)
    )


def _in_step(path: Path, key: str, value: object, func: object) -> list[object]:
    """`value` as a list with one entry for each function; an empty value gives Nones."""
    count = len(func) if isinstance(func, list) else 1
    if value is None or value in ([], {}):
        return [None] * count
    if not isinstance(func, list):
        if isinstance(value, list):
            _refuse(path, f"evaluator.{key}", "is a list: evaluator.func must be one too")
        return [value]
    if not isinstance(value, list) or len(value) != count:
        cure = f"must be a list of {count}, one for each of evaluator.func (null where none)"
        _refuse(path, f"evaluator.{key}", cure)
    return value


def _getter(path: Path, where: str, value: object) -> Getter | None:
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        _refuse(
            path, where, f'must be an object with a type, e.g. {{"type": "rule"}}, got {value!r}'
        )
    return Getter(value["type"], {key: each for key, each in value.items() if key != "type"})


def _setup(path: Path, where: str, value: object) -> tuple[SetupStep, ...]:
    if not isinstance(value, list):
        _refuse(path, where, 'must be a list of {"type": ..., "parameters": {...}}')
    steps = []
    for number, entry in enumerate(value):
        here = f"{where}[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            _refuse(path, here, 'must be an object with a type, e.g. {"type": "launch"}')
        parameters = _object(path, f"{here}.parameters", entry.get("parameters", {}))
        steps.append(SetupStep(entry["type"], parameters))
    return tuple(steps)


def _near_misses(path: Path, value: object) -> tuple[NearMiss, ...]:
    if not isinstance(value, list):
        _refuse(path, "near_misses", 'must be a list of {"why": ..., "actions": [...]}')
    found = []
    for number, entry in enumerate(value):
        here = f"near_misses[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("why"), str):
            _refuse(path, here, 'must say what is wrong: {"why": "...", "actions": [...]}')
        found.append(
            NearMiss(entry["why"], _actions(path, f"{here}.actions", entry.get("actions")))
        )
    return tuple(found)


def _actions(path: Path, where: str, value: object) -> tuple[Action, ...]:
    if not isinstance(value, list):
        _refuse(path, where, 'must be a list of actions, e.g. [{"kind": "done"}]')
    found = []
    for number, entry in enumerate(value):
        try:
            found.append(action_from_dict(entry))
        except ActionError as error:
            _refuse(path, f"{where}[{number}]", f"is not an action of envs/actions.py: {error}")
    return tuple(found)


def _split(path: Path, value: object) -> Split:
    if value not in ("train", "heldout"):
        _refuse(path, "split", f'must be "train" or "heldout", got {value!r}')
    return value


def _max_steps(path: Path, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(path, "max_steps", f"must be a whole number of at least 1, got {value!r}")
    return value


def _text(path: Path, value: Mapping[str, Any], key: str, default: str | None = None) -> str:
    found = value.get(key, default)
    if not isinstance(found, str) or (default is None and not found.strip()):
        told = "is missing" if found is None else f"is {found!r}"
        _refuse(path, key, f"{told}; it must be a text")
    return found


def _object(path: Path, where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, where, f"must be an object, got {value!r}")
    return value


def _refuse(path: Path, where: str, cure: str) -> NoReturn:
    raise TaskError(f"{path}: {where} {cure}")


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
