"""Suites of tasks by name, and the environments that play them.

    suite_names         the names of the suites that ship with dart
    load_suite          the Suite of a name: its tasks by id
    make_env            a GuiEnv that plays the tasks of a suite
    check_options       raises an error for options that the suite does not have
    check_observe       raises an error for texts that its environments do not give
    check_parts         raises an error if something is missing that the suite needs beside Python
    longest_reset_s     the seconds that the suite's options allow for a reset
    find_task, tasks_of   one task by its id; all tasks of a split
    select_tasks        tasks by pattern, as `env.tasks`, `eval.tasks` and `--task` name them

`explored:FOLDER` is a suite too: the tasks that `dart explore tasks` made from an exploration.

Your own suite needs no entry here: `my_package.my_module:MySuite` and `path/to/file.py:MySuite` are names of
suites on every command line and in every configuration. The module of a suite is imported when the suite is
first used, so that a missing optional part (a browser, a container engine) matters only to its users.

A pattern is a task's id, a glob such as `miniwob/click-*`, or one of these behind a `!`, which excludes the
tasks that it matches. A list with only exclusions selects all other tasks. Tasks come in the order of the
patterns, and within a glob in the order of the suite.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, get_args, runtime_checkable

from bus.error_texts import did_you_mean, one_line
from bus.errors import DartError, TaskError
from envs.contract.base import GuiEnv, Split, Task, task_of
from envs.contract.methods import NEEDED, describe, missing_names
from envs.contract.own_code import load_own

SHIPPED: dict[str, str] = {
    "android": "envs.suites.android.env:AndroidSuite",
    "apps": "envs.suites.embedded.suites:AppsSuite",
    "browsergym": "envs.suites.browsergym.suite:BrowsergymSuite",
    "composed": "envs.suites.embedded.suites:ComposedSuite",
    "desk": "envs.suites.embedded.suites:DeskSuite",
    "desktop": "envs.suites.desktop.suite:DesktopSuite",
    "mini": "envs.suites.embedded.suites:MiniSuite",
    "miniwob": "envs.suites.miniwob.env:MiniwobSuite",
    "osworld": "envs.suites.osworld.suite:OsworldSuite",
    "recall": "envs.suites.embedded.suites:RecallSuite",
}
"""Name -> `module:attribute`; the attribute is a Suite or a class of one."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

EXPLORED = "explored"
"""The prefix of `explored:FOLDER`, the suite of a folder that `dart explore tasks` made."""

MADE_OF: dict[str, tuple[str, str]] = {
    EXPLORED: ("envs.suites.explored.env:ExploredSuite", "FOLDER"),
    "osworld": ("envs.suites.osworld.suite:OsworldFolder", "FOLDER"),
    "gym": ("envs.suites.gym.env:GymSuite", "ENV_ID"),
    "openenv": ("envs.suites.openenv.env:OpenenvSuite", "PROFILE"),
    "served": ("envs.suites.served:ServedSuite", "FILE.toml"),
    "cuagym": ("envs.suites.cuagym.suite:CuagymSuite", "FOLDER"),
    "mobilegym": ("envs.suites.mobilegym.suite:MobilegymSuite", "FOLDER"),
    "web": ("envs.suites.web.env:WebSuite", "FILE.toml"),
}
"""Prefix -> the class of the suites `prefix:ARGUMENT`, and what the argument is."""


@runtime_checkable
class Suite(Protocol):
    """A set of tasks that one kind of environment plays."""

    @property
    def name(self) -> str:
        """The unique name, which every task has in its field `suite`."""
        ...

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by id, in their order of presentation."""
        ...

    def make_env(self) -> GuiEnv:
        """Return a new environment, which starts nothing before its first reset.

        The method may take keyword options, each with a default, and raises TaskError for an invalid value.
        The option `observe` is not set by users; see check_observe.
        """
        ...


def suite_names() -> list[str]:
    """Return the names of the suites that ship with dart."""
    return sorted(SHIPPED)


@lru_cache(maxsize=64)
def load_suite(name: str) -> Suite:
    """Return the suite called `name`: a shipped one, `package.module:Attribute` or `file.py:Attribute`.

    `explored:FOLDER` and names with other prefixes of MADE_OF are suites made from their argument. Raises
    TaskError if there is no such suite, or if the object is not a Suite.
    """
    prefix, _, argument = name.partition(":")
    if prefix in MADE_OF and (argument or prefix not in SHIPPED):
        return _suite_made_of(prefix, argument)
    # A name with a dot is a module or a file whose class is missing: load_own reports that.
    if ":" not in name and "." not in name:
        if name not in SHIPPED:
            also = ", ".join(f"{prefix}:{what}" for prefix, (_, what) in MADE_OF.items())
            raise TaskError(
                f"no suite {name!r}{did_you_mean(name, SHIPPED)}; shipped suites are "
                f"{', '.join(suite_names())}, your own is my_package.my_module:MySuite, suites of what "
                f"they name are {also}"
            )
        return _as_suite(name, SHIPPED[name])
    return _as_suite(name, name)


def make_env(suite: str, *, observe: Sequence[str] = (), **options: object) -> GuiEnv:
    """Return an environment that plays `suite`; `options` are the suite's own (size, encoding, ...).

    `observe` names the texts that its observations have beside the screenshot (ObservedKind).
    Raises TaskError for an unknown suite, option or kind of text.
    """
    check_options(suite, options)
    check_observe(suite, observe)
    if observe:
        options["observe"] = tuple(observe)
    env = load_suite(suite).make_env(**options)
    if lacking := missing_names(env, NEEDED):
        raise TaskError(
            f"suite {suite}: make_env() must return an environment with {', '.join(NEEDED)} (envs.contract.base.GuiEnv), "
            f"{type(env).__name__} has no {' and no '.join(lacking)}"
        )
    return env


def check_observe(suite: str, observe: Iterable[str]) -> None:
    """Raise TaskError for a kind of text that the suite's environments do not give.

    A suite that gives texts has an attribute `observes` with their kinds; its `make_env` has an option
    `observe`, which gets the kinds that are requested.
    """
    offered = tuple(getattr(load_suite(suite), "observes", ()))
    for kind in observe:
        if kind not in offered:
            also = f"screenshots, {', '.join(offered)}" if offered else "screenshots alone"
            raise TaskError(f"suite {suite} gives no {kind!r}; it gives {also}")


def check_options(suite: str, options: Collection[str]) -> None:
    """Raise TaskError for an option that the suite's environments do not take. Starts no environment.

    A suite whose `make_env` has a `**parameter` checks its options itself.
    """
    if "observe" in options:
        raise TaskError("'observe' is no option of a suite; set env.observe")
    parameters = inspect.signature(load_suite(suite).make_env).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name != "observe"
    ]
    for option in options:
        if option not in names:
            raise TaskError(
                f"suite {suite} has no option {option!r}{did_you_mean(option, names)}; "
                f"its options are {', '.join(names) or 'none'}"
            )


def check_parts(
    suite: str,
    options: Mapping[str, Any],
    tasks: Collection[str] | None = None,
    observe: Sequence[str] = (),
) -> None:
    """Raise MissingPartError if a browser, package or program is missing that `suite` needs.

    This calls the suite's `check_parts(**options)`, if it has one. If that has a parameter `tasks`, it gets
    the ids of the tasks to play (None: all). Starts no environment.
    """
    texts = {"observe": tuple(observe)} if observe else {}
    _call_hook(suite, "check_parts", {**options, **texts}, {"tasks": tasks})


def longest_reset_s(suite: str, options: Mapping[str, Any]) -> float:
    """Return the seconds that a reset may take with these options; 0 if the suite has no such limit.

    This calls the suite's `longest_reset_s(**options)`, if it has one, with the options that it takes. The
    deadline of a reset must be longer, or a reset is given up that would have succeeded. Waits in queues
    (envs/contract/queueing.py) do not count. Raises TaskError for a value that is no number of seconds.
    """
    longest_s = _call_hook(suite, "longest_reset_s", options)
    if longest_s is None:
        return 0.0
    is_number = isinstance(longest_s, int | float) and not isinstance(longest_s, bool)
    if not is_number or not 0 <= longest_s < math.inf:
        raise TaskError(
            f"suite {suite}: longest_reset_s must return seconds from 0 on, got {describe(longest_s)}"
        )
    return float(longest_s)


def _call_hook(
    suite: str, method: str, options: Mapping[str, Any], extras: Mapping[str, Any] = _NOTHING
) -> Any:
    """Call an optional method of a suite and return its result; return None if the suite has no such method.

    The method gets the `options` and `extras` that it has parameters for (`options` all if it has
    `**options`). Raises TaskError if it cannot be called or fails; a DartError that it raises is passed on.
    """
    hook = getattr(load_suite(suite), method, None)
    if hook is None:
        return None
    if not callable(hook):
        raise TaskError(
            f"suite {suite}: {method} must be a method that takes the options of make_env, got {describe(hook)}"
        )
    try:
        parameters = inspect.signature(hook).parameters
        takes_all = any(
            parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        arguments = {
            name: value for name, value in options.items() if takes_all or name in parameters
        }
        arguments |= {name: value for name, value in extras.items() if name in parameters}
        return hook(**arguments)
    except DartError:
        raise
    except Exception as error:
        raise TaskError(f"suite {suite}: {method}() failed: {one_line(error)}") from error


def find_task(suite: str, task_id: str) -> Task:
    """Return a task of a suite. Raises TaskError, with the closest id or the reason, if there is none.

    A suite may have two mappings of task ids to reasons: `left_out`, for tasks that are not played at all (an
    evaluation reports them too), and `elsewhere`, for tasks of packages that are not installed here.
    """
    loaded = load_suite(suite)
    reasons = ChainMap(*(getattr(loaded, name, {}) for name in ("left_out", "elsewhere")))
    return task_of({"task": task_id}, loaded.tasks, suite, reasons)


def tasks_of(suite: str, split: Split | None = None) -> list[Task]:
    """Return the tasks of a suite, of one split or of both."""
    return [task for task in load_suite(suite).tasks.values() if split in (None, task.split)]


def _suite_made_of(prefix: str, argument: str) -> Suite:
    """Return the suite `prefix:argument`. Raises TaskError if the argument is empty or wrong."""
    path, what = MADE_OF[prefix]
    if not argument:
        raise TaskError(f"suite {prefix}: name what it is made of, {prefix}:{what}")
    module, _, attribute = path.partition(":")
    suite: Suite = getattr(importlib.import_module(module), attribute)(argument)
    return suite


def _as_suite(name: str, path: str) -> Suite:
    suite = load_own("suite", name, path, method="make_env")
    if ":" in name:  # a suite that ships with dart may read its tasks later
        _check_own(name, suite, path.rpartition(":")[2])
    assert isinstance(suite, Suite)
    return suite


def _check_own(name: str, suite: object, attribute: str) -> None:
    """Raise TaskError for a user's suite that lacks a part, or whose part fails or has the wrong type."""
    try:
        lacking = missing_names(suite, ("name", "tasks", "make_env"))
    except (Exception, SystemExit) as error:
        raise TaskError(f"suite {name}: {attribute} breaks: {one_line(error)}") from error
    if lacking:
        raise TaskError(
            f"suite {name}: {attribute} is no Suite, it has no {' and no '.join(lacking)}; it needs name, tasks and "
            "make_env(), see docs/environments/"
        )
    assert isinstance(suite, Suite)
    own_name, make_env_of = suite.name, suite.make_env
    if not isinstance(own_name, str) or not own_name:
        raise TaskError(f"suite {name}: name must be a text, got {describe(own_name)}")
    if not callable(make_env_of):
        raise TaskError(f"suite {name}: make_env must be a method, got {describe(make_env_of)}")
    _check_tasks(name, suite.tasks)


def _check_tasks(name: str, tasks: object) -> None:
    """Raise TaskError if the `tasks` of a user's suite are not a mapping of ids to valid tasks."""
    if not isinstance(tasks, Mapping):
        raise TaskError(
            f"suite {name}: tasks must be a mapping of ids to tasks, {{task.id: task}}, "
            f"got a {type(tasks).__name__}"
        )
    for task_id, task in tasks.items():
        if not isinstance(task, Task) or task.id != task_id:
            actual = f"one with the id {task.id!r}" if isinstance(task, Task) else describe(task)
            raise TaskError(
                f"suite {name}: tasks[{task_id!r}] must be the Task of that id, got {actual}"
            )
        for field, (is_right, rule) in _FIELDS.items():
            value: object = getattr(task, field)
            if not is_right(value):
                raise TaskError(
                    f"suite {name}: tasks[{task_id!r}].{field} must be {rule}, got {describe(value)}"
                )


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "instruction": (lambda value: isinstance(value, str), "a text"),
    "max_steps": (lambda value: type(value) is int and value > 0, "a whole number from 1 on"),
    "split": (lambda value: value in get_args(Split), " or ".join(get_args(Split))),
    "feasible": (lambda value: isinstance(value, bool), "a bool"),
    "evaluated": (lambda value: isinstance(value, bool), "a bool"),
}
"""Field of a task -> a check of its value, and the rule in words."""


_WILD = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Return True if `text` is a glob or an exclusion, False if it is a task's id."""
    return text.startswith("!") or not _WILD.isdisjoint(text)


def select_tasks(
    suite: str, patterns: Iterable[str], among: Sequence[Task] | None = None
) -> list[Task]:
    """Return the tasks of `suite` that `patterns` name; without patterns all of `among`.

    Globs choose from `among` (default: the whole suite). A full id is looked up in the whole suite, so that
    the caller can report why the task may not be used. Raises TaskError, with the closest id, for a pattern
    that names no task, and if the exclusions leave none.
    """
    all_tasks = list(load_suite(suite).tasks.values())
    selectable = all_tasks if among is None else list(among)
    wanted_patterns = list(patterns)
    selected: dict[str, Task] = {}
    for pattern in wanted_patterns:
        if not pattern.startswith("!"):
            selected |= {
                task.id: task for task in _tasks_matching(suite, pattern, selectable, all_tasks)
            }
    if all(pattern.startswith("!") for pattern in wanted_patterns):
        selected = {task.id: task for task in selectable}
    for pattern in wanted_patterns:
        if pattern.startswith("!"):
            for task in _tasks_matching(suite, pattern[1:], all_tasks, all_tasks):
                selected.pop(task.id, None)
    if wanted_patterns and not selected:
        raise TaskError(f"nothing is left of suite {suite} after {', '.join(wanted_patterns)}")
    return list(selected.values())


def _tasks_matching(
    suite: str, pattern: str, selectable: Sequence[Task], all_tasks: Sequence[Task]
) -> list[Task]:
    if not is_pattern(pattern):
        return [find_task(suite, pattern)]
    matches = [task for task in selectable if fnmatchcase(task.id, pattern)]
    if matches:
        return matches
    others = [task for task in all_tasks if fnmatchcase(task.id, pattern)]
    if others:
        raise TaskError(
            f"{pattern!r} names only tasks of suite {suite} that do not belong here, "
            f"e.g. {others[0].id!r}; they are of the other split"
        )
    ids = [task.id for task in all_tasks]
    rooted = f"{ids[0].partition('/')[0]}/{pattern}" if ids else pattern
    near = [rooted] if any(fnmatchcase(task_id, rooted) for task_id in ids) else []
    hint = did_you_mean(pattern, near or ids) or (f"; did you mean {rooted!r}?" if near else "")
    raise TaskError(f"suite {suite} has no task like {pattern!r}{hint}")
