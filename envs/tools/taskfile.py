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
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from bus.errors import TaskError
from envs.contract.actions import Action, Fail
from envs.contract.base import Split, Task, Verdict
from envs.contract.blobs import content_hash
from envs.contract.options import first_problem
from envs.tools.textfiles import read_text, why

Conjunction = Literal["and", "or"]

NO_EVALUATOR = "none"
"""What `evaluator` is in the file of a task that has none."""

INFEASIBLE = "infeasible"
"""The function of tasks that cannot be done: only the action `fail` passes them."""

DEFAULT_MAX_STEPS = 15  # OSWorld's


_Text = Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True)
class SetupStep:
    """One entry of `config` or `postconfig`, e.g. type `launch` with `command`."""

    type: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Getter:
    """Where a value comes from: a type, e.g. `vm_file` or `rule`, and its other fields."""

    type: str
    parameters: Mapping[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:
        """In a file its other fields stand beside the type."""
        if not isinstance(value, dict) or "type" not in value:
            return value
        rest = {key: entry for key, entry in value.items() if key != "type"}
        return {"type": value["type"], "parameters": rest}


@dataclass(frozen=True)
class Check:
    """One function of an evaluator: func(result, expected, **options) -> 0.0 to 1.0."""

    func: _Text
    result: Getter | None = None
    expected: Getter | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """Judges the state: its checks, all or any of which must hold once `postconfig` is done."""

    checks: tuple[Check, ...]
    conj: Conjunction = "and"
    postconfig: tuple[SetupStep, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:
        """In a file the functions and their values are columns in step; "none" is an evaluator without any."""
        if value == NO_EVALUATOR:
            return {"checks": ()}
        if not isinstance(value, dict):
            return value
        columns = ("func", "result", "expected", "options")
        _refuse_near(value, (*columns, "conj", "postconfig"))
        func = value.get("func")
        funcs = func if isinstance(func, list) else [func]
        if not funcs or (len(funcs) > 1 and INFEASIBLE in funcs):
            raise ValueError(f"func must be functions, among which {INFEASIBLE!r} must stand alone")
        rows = zip(funcs, *(_in_step(value, key, func) for key in columns[1:]), strict=True)
        rest = {key: value[key] for key in ("conj", "postconfig") if key in value}
        return {"checks": [dict(zip(columns, row, strict=True)) for row in rows], **rest}

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

    id: _Text  # unique in its folder
    instruction: _Text
    evaluator: Evaluator
    snapshot: str = ""  # the state it starts from; in OSWorld mostly the name of an application
    config: tuple[SetupStep, ...] = ()
    split: Split = "train"
    max_steps: Annotated[int, Field(ge=1, strict=True)] = DEFAULT_MAX_STEPS
    solution: tuple[Action, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    draw: Mapping[str, Any] = field(default_factory=dict)  # values drawn from the seed, by name
    extra: Mapping[str, Any] = field(default_factory=dict)  # e.g. related_apps, proxy
    path: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:
        """Fields that are unknown here are kept."""
        if not isinstance(value, dict):
            return value
        field_names = {entry.name for entry in fields(cls)} - {"extra", "path"}
        _refuse_near(value, field_names)
        extra = {key: entry for key, entry in value.items() if key not in field_names}
        return {key: value[key] for key in field_names & value.keys()} | {"extra": extra}

    def reads(self, kind: str) -> bool:
        """Whether its evaluator reads a value of this kind, e.g. `accessibility_tree`."""
        results = (check.result for check in self.evaluator.checks)
        return any(result is not None and result.type == kind for result in results)

    @property
    def digest(self) -> str:
        """Return a digest of all that the file says, set-up and evaluator included, wherever it lies."""
        content = _TASK_FILE.dump_python(replace(self, path=None), mode="json")
        return content_hash(json.dumps(content, sort_keys=True).encode())

    def task(self, suite: str, **params: Any) -> Task:
        """Return it as a task of `suite`, whose `params` have the file's digest: evaluations compare them."""
        return Task(
            f"{suite}/{self.id}",
            suite,
            self.instruction,
            max_steps=self.max_steps,
            tier=max(1, len(self.solution)),
            split=self.split,
            params={**params, "file": self.digest},
            feasible=not self.evaluator.infeasible,
            evaluated=not self.evaluator.missing,
        )


class LoadedTasks(NamedTuple):
    """What a folder holds; each error names file, field and cure."""

    tasks: Mapping[str, TaskFile]  # by id, in the order of their paths
    errors: tuple[TaskError, ...]


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
                raise TaskError(f"{path}: id is {task.id!r} in {other} too; give each task its own")
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
    ids = [task_id for ids in lists for task_id in ids]
    if not all(isinstance(task_id, str) for task_id in ids):
        raise TaskError(f"{path}: ids must be strings")
    return ids


def read_task(value: object, path: Path, *, heldout: Collection[str] = ()) -> TaskFile:
    """Return the task that a decoded file describes. Raises TaskError naming file, field and cure."""
    try:
        task = _TASK_FILE.validate_python(value)
    except ValidationError as error:
        raise TaskError(f"{path}: {first_problem(error)}") from None
    return replace(task, path=path, split="heldout" if task.id in heldout else task.split)


_TASK_FILE = TypeAdapter(TaskFile)


def _decode(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: {why(error, 'mend the file')}") from error


def _refuse_near(value: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError for a field whose name is nearly a known one."""
    for key in value:
        near = difflib.get_close_matches(key, names, 1, 0.85)
        if near and key != near[0]:
            raise ValueError(f"{key} is not a field; did you mean {near[0]!r}?")


def _in_step(value: Mapping[str, Any], key: str, func: object) -> list[Any]:
    """Return a column as a list with one entry for each function; an empty value gives Nones."""
    column: Any = value.get(key)
    empty: Any = {} if key == "options" else None
    count = len(func) if isinstance(func, list) else 1
    if column in (None, [], {}):
        return [empty] * count
    entries = column if isinstance(func, list) else [column]
    if isinstance(column, list) != isinstance(func, list) or len(entries) != count:
        raise ValueError(f"{key} must be in step with func: {count} entries (null where none)")
    return [empty if entry in (None, {}) else entry for entry in entries]


Metric = Callable[[Any, Mapping[str, Any]], float]


def exact_match(result: object, rules: Mapping[str, Any]) -> float:
    """Return 1 where the result is what is expected, to the last blank and line end, else 0."""
    return float(result == rules["expected"])


def match_in_list(result: object, rules: Mapping[str, Any]) -> float:
    """Return 1 where the result is one of those expected, else 0."""
    return float(result in rules["expected"])


def check_include_exclude(result: str | None, rules: Mapping[str, Any]) -> float:
    """Return 1 where the result holds every text of `include` and none of `exclude`, else 0."""
    if result is None:
        return 0.0
    included = all(text in result for text in rules.get("include", []))
    return float(included and not any(text in result for text in rules.get("exclude", [])))


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (exact_match, match_in_list, check_include_exclude)
}


def claimed(evaluator: Evaluator, last: Action | None) -> Verdict | None:
    """Return the verdict where `last` decides: `fail` passes what cannot be done, and fails all else.

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
    """Return the score of checks [C] together, evaluated in turn only as far as needed.

    As OSWorld joins them: with `and` the mean, or 0 as soon as one is 0; with `or` the greatest.
    """
    evaluated = []
    for score in scores:
        if conj == "and" and score == 0.0:
            return 0.0
        if conj == "or" and score == 1.0:
            return 1.0
        evaluated.append(score)
    return sum(evaluated) / len(evaluated) if conj == "and" else max(evaluated)


def graded(score: float, reason: str) -> Verdict:
    """Return the verdict of a score, which is the reward, held within [0, 1], and passes where it is 1."""
    return Verdict.scored(min(max(score, 0.0), 1.0), reason)
