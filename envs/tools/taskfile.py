"""Task files in OSWorld's JSON schema: read and checked; the errors of all files are collected.

    TaskFile     one file: goal, set-up, evaluator, and our additions (split, solution, near misses)
    Evaluator    checks joined by `and` or `or`, and the steps to perform before them
    load_tasks   the tasks of a folder by id, and an error for each file that is wrong
    read_task    the task of one decoded file
    read_ids     a list of ids from a file such as OSWorld's test_all.json
    METRICS      the functions of checks that need only the standard library, by the name in `func`
    claimed      the verdict that the policy's last action decides by itself
    joined       the score of several checks together
    graded       the verdict of a score

The schema is OSWorld's (desktop_env/desktop_env.py, evaluation_examples/examples). There `func`, `result`,
`expected` and `options` are single values, or lists with one entry for each function; here each function is
one `Check`. The environment defines the types of set-up steps, getters and functions; nothing is run here.
METRICS, joined and graded compute what OSWorld computes (desktop_env.py, evaluators/metrics). Fields that
are not in the schema are stored in `extra`.
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
"""The value of `evaluator` in the file of a task that has none."""

INFEASIBLE = "infeasible"
"""The function of tasks that cannot be done; only the action `fail` passes them."""

DEFAULT_MAX_STEPS = 15  # OSWorld's


_Text = Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True)
class SetupStep:
    """One entry of `config` or `postconfig`, e.g. type `launch` with `command`."""

    type: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Getter:
    """The source of a value: a type, e.g. `vm_file` or `rule`, and its other fields."""

    type: str
    parameters: Mapping[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:
        """Collect the fields that a file has beside the type into `parameters`."""
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
    """The checks of a state, all or any of which must hold once the steps of `postconfig` are performed."""

    checks: tuple[Check, ...]
    conj: Conjunction = "and"
    postconfig: tuple[SetupStep, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:
        """Convert the lists of a file, one entry for each function, into checks.

        "none" is an evaluator without checks.
        """
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
        """Whether the task has no evaluator; a judge then decides (`[env.judge]`)."""
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
    """A task file. The fields from `split` on are our additions to the schema, all optional."""

    id: _Text  # unique in its folder
    instruction: _Text
    evaluator: Evaluator
    snapshot: str = ""
    """The state from which the task starts; in OSWorld mostly the name of an application."""
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
        """Store the fields that are not in the schema in `extra`."""
        if not isinstance(value, dict):
            return value
        field_names = {entry.name for entry in fields(cls)} - {"extra", "path"}
        _refuse_near(value, field_names)
        extra = {key: entry for key, entry in value.items() if key not in field_names}
        return {key: value[key] for key in field_names & value.keys()} | {"extra": extra}

    def reads(self, kind: str) -> bool:
        """Return True if the evaluator reads a value of this type, e.g. `accessibility_tree`."""
        results = (check.result for check in self.evaluator.checks)
        return any(result is not None and result.type == kind for result in results)

    @property
    def digest(self) -> str:
        """A digest of the content of the file, with set-up and evaluator; its path does not count."""
        content = _TASK_FILE.dump_python(replace(self, path=None), mode="json")
        return content_hash(json.dumps(content, sort_keys=True).encode())

    def task(self, suite: str, **params: Any) -> Task:
        """Return the file as a task of `suite`.

        Its `params` have the file's digest, which evaluations compare.
        """
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
    """The tasks of a folder; each error names the file, the field and the fix."""

    tasks: Mapping[str, TaskFile]  # by id, in the order of their paths
    errors: tuple[TaskError, ...]


def load_tasks(folder: Path, *, heldout: Collection[str] = ()) -> LoadedTasks:
    """Return the tasks of all `*.json` below `folder`.

    Tasks whose ids are in `heldout` are held out, whatever their files say. Raises TaskError if the folder
    does not exist or holds no such file, or if an id of `heldout` is not the id of one of its tasks.
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
    """Return the task ids of a JSON file: a list, or lists by domain as in OSWorld's test_all.json.

    Raises TaskError.
    """
    value = _decode(path)
    lists = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(ids, list) for ids in lists):
        raise TaskError(f"{path}: must be a list of ids, or an object of such lists")
    ids = [task_id for ids in lists for task_id in ids]
    if not all(isinstance(task_id, str) for task_id in ids):
        raise TaskError(f"{path}: ids must be strings")
    return ids


def read_task(value: object, path: Path, *, heldout: Collection[str] = ()) -> TaskFile:
    """Return the task that a decoded file describes.

    Raises TaskError, which names the file, the field and the fix.
    """
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
    """Raise ValueError for a field whose name is nearly one of `names`."""
    for key in value:
        near = difflib.get_close_matches(key, names, 1, 0.85)
        if near and key != near[0]:
            raise ValueError(f"{key} is not a field; did you mean {near[0]!r}?")


def _in_step(value: Mapping[str, Any], key: str, func: object) -> list[Any]:
    """Return the list `key` with one entry for each function; an empty value gives empty entries."""
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
    """Return 1 if the result equals what is expected, white space included, else 0."""
    return float(result == rules["expected"])


def match_in_list(result: object, rules: Mapping[str, Any]) -> float:
    """Return 1 if the result is one of the expected values, else 0."""
    return float(result in rules["expected"])


def check_include_exclude(result: str | None, rules: Mapping[str, Any]) -> float:
    """Return 1 if the result contains every text of `include` and none of `exclude`, else 0."""
    if result is None:
        return 0.0
    included = all(text in result for text in rules.get("include", []))
    return float(included and not any(text in result for text in rules.get("exclude", [])))


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (exact_match, match_in_list, check_include_exclude)
}


def claimed(evaluator: Evaluator, last: Action | None) -> Verdict | None:
    """Return the verdict that the policy's `last` action decides; None if the checks must decide.

    The action `fail` passes a task that cannot be done and fails any other. A task without an evaluator is
    invalid.
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
    """Return the score of all checks [C] together; `scores` is read only as far as needed.

    This is OSWorld's rule: with `and` the mean, or 0 as soon as one is 0; with `or` the greatest, or 1 as
    soon as one is 1.
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
    """Return the verdict of a score: its reward is the score cut to [0, 1], and 1 is a pass."""
    return Verdict.scored(min(max(score, 0.0), 1.0), reason)
