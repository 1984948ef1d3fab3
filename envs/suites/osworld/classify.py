"""Reads task files and lists what each task needs, without playing it.

TaskNeeds        the needs of one task
needs_of         reads a task file and returns its needs
classified       returns the needs of all tasks of a suite, with counts
refuse_lacking   raises an error if OSWorld's package lacks a function that task files name, before any
                 episode
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from bus.errors import EnvError, MissingPartError
from envs.suites.osworld.evaluate import foreign, is_native
from envs.suites.osworld.evaluator_process import FIX, EvaluatorProcess
from envs.suites.osworld.setup import STEPS
from envs.tools.taskfile import Getter, TaskFile

EvaluatedBy = Literal["dart", "desktop-env", "infeasible", "a judge"]

_GOOGLE = ("googledrive", "googledrive_file")
_LOGIN = ("login",)
_BROWSER = frozenset(
    {"chrome_open_tabs", "chrome_close_tabs", "update_browse_history", *_LOGIN, "googledrive"}
)
_LOCAL = ("", "localhost", "127.0.0.1")


@dataclass(frozen=True)
class TaskNeeds:
    """The needs of one task beside a guest."""

    set_up: tuple[str, ...]  # set-up steps that desktop-env performs; () if dart performs all
    evaluated_by: EvaluatedBy
    functions: tuple[str, ...]  # of desktop-env's evaluators
    accounts: tuple[str, ...]  # Google Drive, or a log-in with a settings file
    proxy: bool  # whether it asks for a proxy; by default OSWorld and dart play it without one
    fetches: tuple[str, ...]  # hosts of files that are fetched before the episode
    visits: tuple[str, ...]  # hosts of web sites that its set-up opens

    @property
    def kind(self) -> str:
        """The group of the task in reports: the first of the cases below that holds."""
        if self.accounts:
            return "needs an account"
        if self.evaluated_by == "infeasible":
            return "infeasible"
        if self.evaluated_by == "a judge":
            return "judged by a model"
        if self.evaluated_by == "desktop-env":
            return "needs desktop-env"
        return "needs desktop-env's set-up" if self.set_up else "the adapter alone"


def needs_of(file: TaskFile) -> TaskNeeds:
    """Return the needs of the task in a file."""
    evaluator = file.evaluator
    steps = [*file.config, *evaluator.postconfig]
    getters = [
        getter
        for check in evaluator.checks
        for getter in (check.result, check.expected)
        if getter is not None
    ]
    evaluated_by: EvaluatedBy = "dart"
    if evaluator.missing:
        evaluated_by = "a judge"
    elif evaluator.infeasible:
        evaluated_by = "infeasible"
    elif foreign(evaluator):
        evaluated_by = "desktop-env"
    kinds = [*(step.type for step in steps), *(getter.type for getter in getters)]
    accounts = {"Google Drive": _GOOGLE, "log-in": _LOGIN}
    return TaskNeeds(
        set_up=_unique(step.type for step in steps if step.type not in STEPS),
        evaluated_by=evaluated_by,
        functions=()
        if evaluated_by != "desktop-env"
        else _unique(check.func for check in evaluator.checks if not is_native(check)),
        accounts=tuple(name for name, types in accounts.items() if set(types) & set(kinds)),
        proxy=bool(file.extra.get("proxy")),
        fetches=_unique(_hosts(_urls_to_fetch(steps, getters))),
        visits=_unique(
            _hosts(
                url
                for step in steps
                if step.type in _BROWSER
                for url in step.parameters.get("urls_to_open", ())
            )
        ),
    )


def classified(files: Mapping[str, TaskFile]) -> dict[str, Any]:
    """Return counts over all tasks, and the needs of each task, as plain values."""
    by_task = {task_id: needs_of(file) for task_id, file in files.items()}
    rows = list(by_task.values())
    functions = Counter(name for needs in rows for name in needs.functions)
    return {
        "tasks": len(rows),
        "kinds": dict(Counter(needs.kind for needs in rows).most_common()),
        "set_up": {
            "adapter": sum(not needs.set_up for needs in rows),
            "desktop-env": sum(bool(needs.set_up) for needs in rows),
        },
        "evaluated_by": dict(Counter(needs.evaluated_by for needs in rows).most_common()),
        "accounts": dict(Counter(name for needs in rows for name in needs.accounts)),
        "proxy": sum(needs.proxy for needs in rows),
        "fetches": sum(bool(needs.fetches) for needs in rows),
        "visits": sum(bool(needs.visits) for needs in rows),
        "functions": dict(functions.most_common()),
        "by_task": {
            task_id: {"kind": needs.kind, **asdict(needs)} for task_id, needs in by_task.items()
        },
    }


def _urls_to_fetch(steps: Iterable[Any], getters: Iterable[Getter]) -> Iterable[str]:
    for step in steps:
        if step.type == "download":
            yield from (str(file.get("url", "")) for file in step.parameters.get("files", ()))
    for getter in getters:
        if getter.type == "cloud_file":
            path = getter.parameters.get("path", "")
            yield from map(str, path if isinstance(path, list) else [path])


def _hosts(urls: Iterable[str]) -> Iterable[str]:
    for url in urls:
        try:
            host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
        except ValueError:
            host = ""
        if host not in _LOCAL:
            yield host


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


logger = logging.getLogger(__name__)

IMPORT_S = 300.0
"""Seconds that loading the package may take, since its libraries may be read from a slow disk."""

_MOST_SHOWN = 3  # tasks in an error


@lru_cache(maxsize=8)
def installed_parts(python: str, checkout: Path | None) -> Mapping[str, Any]:
    """Return the names that the package has (`parts` of evaluator_program.py). Raises MissingPartError."""
    process = EvaluatorProcess(python, IMPORT_S, checkout)
    try:
        parts = process.parts()
    except EnvError as error:
        raise MissingPartError(
            f"{python} cannot load OSWorld's evaluators: {error}; {FIX}"
        ) from None
    finally:
        process.close()
    if parts["unknown"]:
        logger.warning(
            "OSWorld's package in %s reads attributes that dart does not offer (%s): tasks whose evaluators "
            "read them are invalid; install an older package, or add them to DesktopEnvView",
            parts["folder"],
            ", ".join(parts["unknown"]),
        )
    return parts


def refuse_lacking(files: Mapping[str, TaskFile], python: str, checkout: Path | None) -> None:
    """Raise MissingPartError if OSWorld's package or checkout lacks what `files` (by task id) name.

    These are functions, getters, set-up steps and files.
    """
    parts = installed_parts(python, checkout)
    lacking = {task_id: list(_lacking(file, parts, checkout)) for task_id, file in files.items()}
    lacking = {task_id: needs for task_id, needs in lacking.items() if needs}
    if not lacking:
        return
    tasks = [
        f"{task_id} ({', '.join(lacking[task_id])})" for task_id in list(lacking)[:_MOST_SHOWN]
    ]
    if len(lacking) > _MOST_SHOWN:
        tasks.append(f"{len(lacking) - _MOST_SHOWN} more")
    raise MissingPartError(
        f"OSWorld's package in {parts['folder']} lacks what {len(lacking)} of {len(files)} tasks need: "
        f"{', '.join(tasks)}; take tasks and evaluators from one checkout of OSWorld "
        '(env.options.checkout) that has these, or leave the tasks out with "!ID" in env.tasks'
    )


def _lacking(file: TaskFile, parts: Mapping[str, Any], checkout: Path | None) -> Iterator[str]:
    """Yield, in words, each part that the task needs and the package or the checkout does not have."""
    evaluator = file.evaluator
    getters = []
    for check in evaluator.checks:
        if evaluator.infeasible or is_native(check):
            continue
        if check.func not in parts["metrics"]:
            yield f"function {check.func}"
        getters += [getter for getter in (check.result, check.expected) if getter is not None]
    for getter in getters:
        if getter.type not in parts["getters"]:
            yield f"getter {getter.type}"
    steps = [step for step in (*file.config, *evaluator.postconfig) if step.type not in STEPS]
    for step in steps:
        if step.type not in parts["steps"]:
            why = f": {parts['no_steps']}" if "no_steps" in parts else ""
            yield f"set-up step {step.type}{why}"
    tables = [step.parameters for step in steps] + [getter.parameters for getter in getters]
    paths = {str(table["settings_file"]) for table in tables if "settings_file" in table}
    for path in sorted(paths):
        if not ((checkout or Path("/")) / path).exists():
            yield f"file {path}"
