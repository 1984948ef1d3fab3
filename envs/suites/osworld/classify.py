"""What task files need, from reading them alone: which of them can be played with what.

TaskNeeds    of one task
needs_of     reads a task file
classified   the counts over a suite's task files, in words and numbers

refuse_lacking says whether OSWorld's package has every function that task files name, before any episode.
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
from envs.suites.osworld.evaluator_process import CURE, EvaluatorProcess
from envs.suites.osworld.setup import STEPS
from envs.tools.taskfile import Getter, TaskFile

Judged = Literal["natively", "desktop-env", "infeasible", "by a model"]

_GOOGLE = ("googledrive", "googledrive_file")
_LOGIN = ("login",)
_BROWSER = frozenset(
    {"chrome_open_tabs", "chrome_close_tabs", "update_browse_history", *_LOGIN, "googledrive"}
)
_LOCAL = ("", "localhost", "127.0.0.1")


@dataclass(frozen=True)
class TaskNeeds:
    """What one task needs beside a guest."""

    set_up: tuple[str, ...]  # set-up steps that desktop-env performs; () where the adapter does all
    judged: Judged
    functions: tuple[str, ...]  # of desktop-env's evaluators
    accounts: tuple[str, ...]  # Google Drive, or a log-in with a settings file
    proxy: bool  # asks for one; OSWorld plays it without by default, and so does dart
    fetches: tuple[str, ...]  # hosts of files that are fetched before the episode
    visits: tuple[str, ...]  # hosts of web sites that its set-up opens

    @property
    def kind(self) -> str:
        """The first of these that holds: what stands between the task and an episode."""
        if self.accounts:
            return "needs an account"
        if self.judged == "infeasible":
            return "infeasible"
        if self.judged == "by a model":
            return "judged by a model"
        if self.judged == "desktop-env":
            return "needs desktop-env"
        return "needs desktop-env's set-up" if self.set_up else "the adapter alone"


def needs_of(file: TaskFile) -> TaskNeeds:
    """Return what a task file needs."""
    evaluator = file.evaluator
    steps = [*file.config, *evaluator.postconfig]
    getters = [
        getter
        for check in evaluator.checks
        for getter in (check.result, check.expected)
        if getter is not None
    ]
    judged: Judged = "natively"
    if evaluator.missing:
        judged = "by a model"
    elif evaluator.infeasible:
        judged = "infeasible"
    elif foreign(evaluator):
        judged = "desktop-env"
    kinds = [*(step.type for step in steps), *(getter.type for getter in getters)]
    accounts = {"Google Drive": _GOOGLE, "log-in": _LOGIN}
    return TaskNeeds(
        set_up=_unique(step.type for step in steps if step.type not in STEPS),
        judged=judged,
        functions=()
        if judged != "desktop-env"
        else _unique(check.func for check in evaluator.checks if not is_native(check)),
        accounts=tuple(name for name, of in accounts.items() if set(of) & set(kinds)),
        proxy=bool(file.extra.get("proxy")),
        fetches=_unique(_hosts(_fetched(steps_of=steps, getters=getters))),
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
    """Return the counts, and the needs of each task, as plain values."""
    needs = {task_id: needs_of(file) for task_id, file in files.items()}
    every = list(needs.values())
    return {
        "tasks": len(every),
        "kinds": dict(Counter(each.kind for each in every).most_common()),
        "set_up": {
            "adapter": sum(not each.set_up for each in every),
            "desktop-env": sum(bool(each.set_up) for each in every),
        },
        "judged": dict(Counter(each.judged for each in every).most_common()),
        "accounts": dict(Counter(name for each in every for name in each.accounts)),
        "proxy": sum(each.proxy for each in every),
        "fetches": sum(bool(each.fetches) for each in every),
        "visits": sum(bool(each.visits) for each in every),
        "functions": dict(Counter(name for each in every for name in each.functions).most_common()),
        "by_task": {
            task_id: {"kind": each.kind, **asdict(each)} for task_id, each in needs.items()
        },
    }


def _fetched(*, steps_of: Iterable[Any], getters: Iterable[Getter]) -> Iterable[str]:
    for step in steps_of:
        if step.type == "download":
            yield from (str(each.get("url", "")) for each in step.parameters.get("files", ()))
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
"""Time limit for loading the package, whose libraries may come from a cold disk."""

_SHOWN = 3  # tasks in an error


@lru_cache(maxsize=8)
def installed_parts(python: str, checkout: Path | None) -> Mapping[str, Any]:
    """Return the names that the package has, see evaluator_program.py. Raises MissingPartError."""
    process = EvaluatorProcess(python, IMPORT_S, checkout)
    try:
        parts = process.parts()
    except EnvError as error:
        raise MissingPartError(
            f"{python} cannot load OSWorld's evaluators: {error}; {CURE}"
        ) from None
    finally:
        process.close()
    if parts["unknown"]:
        logger.warning(
            "OSWorld's package in %s reads what dart does not offer (%s): tasks that come to it are "
            "invalid; install an older one, or add it to DesktopEnvView",
            *(parts["folder"], ", ".join(parts["unknown"])),
        )
    return parts


def refuse_lacking(files: Mapping[str, TaskFile], python: str, checkout: Path | None) -> None:
    """Raise MissingPartError if `files`, by task id, name what the package does not have."""
    parts = installed_parts(python, checkout)
    lacking = {task_id: list(_lacking(file, parts, checkout)) for task_id, file in files.items()}
    lacking = {task_id: needs for task_id, needs in lacking.items() if needs}
    if not lacking:
        return
    shown = [f"{task_id} ({', '.join(lacking[task_id])})" for task_id in list(lacking)[:_SHOWN]]
    more = [f"{len(lacking) - _SHOWN} more"] if len(lacking) > _SHOWN else []
    raise MissingPartError(
        f"OSWorld's package in {parts['folder']} lacks what {len(lacking)} of {len(files)} tasks need: "
        f"{', '.join([*shown, *more])}; take tasks and evaluators from one checkout of OSWorld "
        '(env.options.checkout) that has these, or leave the tasks out with "!ID" in env.tasks'
    )


def _lacking(file: TaskFile, parts: Mapping[str, Any], checkout: Path | None) -> Iterator[str]:
    evaluator = file.evaluator
    getters = []
    for check in evaluator.checks:
        if evaluator.infeasible or is_native(check):
            continue
        if check.func not in parts["metrics"]:
            yield f"function {check.func}"
        getters += [each for each in (check.result, check.expected) if each is not None]
    for getter in getters:
        if getter.type not in parts["getters"]:
            yield f"getter {getter.type}"
    steps = [step for step in (*file.config, *evaluator.postconfig) if step.type not in STEPS]
    for step in steps:
        if step.type not in parts["steps"]:
            why = f": {parts['no_steps']}" if "no_steps" in parts else ""
            yield f"set-up step {step.type}{why}"
    parameters = [*(step.parameters for step in steps), *(each.parameters for each in getters)]
    named = {str(each["settings_file"]) for each in parameters if "settings_file" in each}
    for path in sorted(named):
        if not ((checkout or Path("/")) / path).exists():
            yield f"file {path}"
