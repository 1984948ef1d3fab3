"""Evaluates a guest's state by the evaluator of its task file.

    is_native         returns whether a check is performed here, without OSWorld's package
    foreign           returns whether any check of an evaluator needs OSWorld's package
    fetch_references  fetches the files that an evaluation will need, before the episode begins
    evaluate          returns the verdict; any failure raises EnvError, and the episode is invalid
    refuse_solved     raises EnvError if the task is solved at reset

Checks of plain commands are performed here, all others by OSWorld's own evaluators (evaluator_process.py). If
the guest does not have a result, the check fails, whatever OSWorld's function returns for it: a policy can
delete a file, or remove the program whose output is compared.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.contract.blobs import content_hash
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.guest import Executed, Guest, RefusalError
from envs.suites.osworld.setup import EpisodeContext, prepare
from envs.tools.taskfile import METRICS, Check, Evaluator, Getter, TaskFile, claimed, graded, joined

logger = logging.getLogger(__name__)


def _rule(_: Guest, config: Mapping[str, Any]) -> Any:
    return config["rules"]


def _vm_command_line(guest: Guest, config: Mapping[str, Any]) -> str | None:
    result = _execute(guest, config)
    return None if result is None else result.output


def _vm_command_error(guest: Guest, config: Mapping[str, Any]) -> str | None:
    result = _execute(guest, config)
    return None if result is None else result.error


def _execute(guest: Guest, config: Mapping[str, Any]) -> Executed | None:
    """Run a command and return its result; as in OSWorld, return None if the guest refuses.

    A guest refuses if there is no such program, or the output is too late or not UTF-8.
    """
    try:
        return guest.execute(config["command"], shell=bool(config.get("shell")), deadline_s=150)
    except RefusalError as error:
        logger.info("a command whose output is compared: %s", error)
        return None


def _vm_terminal_output(guest: Guest, _: Mapping[str, Any]) -> str:
    return guest.terminal()


GETTERS: Mapping[str, Callable[[Guest, Mapping[str, Any]], Any]] = {
    "rule": _rule,
    "vm_command_line": _vm_command_line,
    "vm_command_error": _vm_command_error,
    "vm_terminal_output": _vm_terminal_output,
}
"""Getters of OSWorld's desktop_env.evaluators.getters that need only the guest's server."""


def foreign(evaluator: Evaluator) -> bool:
    """Return True if a check of the evaluator needs OSWorld's package."""
    return not evaluator.infeasible and not all(is_native(check) for check in evaluator.checks)


def evaluate(task: TaskFile, last: Action | None, guest: Guest, context: EpisodeContext) -> Verdict:
    """Return the verdict on the state after the episode's `last` action. Raises EnvError on failure.

    As in OSWorld, `postconfig` is performed first, unless the last action alone decides.
    """
    evaluator = task.evaluator
    verdict = claimed(evaluator, last)
    if verdict is not None:
        return verdict
    prepare(evaluator.postconfig, guest, context, lenient=True)
    absent: list[str] = []
    scores = (_score(check, guest, context, absent) for check in evaluator.checks)
    score = joined(scores, evaluator.conj)
    # If the guest does not answer, OSWorld's getters return an empty result: check that it answers.
    guest.screenshot()
    names = ", ".join(check.func for check in evaluator.checks)
    return graded(score, f"{names}: {score:g}" + "".join(f"; {reason}" for reason in absent))


def fetch_references(evaluator: Evaluator, downloads: Downloads, folder: Path) -> None:
    """Fetch the files of all `cloud_file` getters into the episode's folder.

    This is done before the episode, so that a failure of the web cannot make a finished episode invalid.
    """
    for check in evaluator.checks:
        for url, _ in _references(check):
            path = _reference_path(url, folder)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(downloads.fetch(url))


def refuse_solved(task: TaskFile, guest: Guest, context: EpisodeContext) -> None:
    """Raise EnvError if the task is solved at reset.

    This is checked only if it changes nothing and costs little: without `postconfig` or a foreign evaluator.
    """
    evaluator = task.evaluator
    if evaluator.infeasible or evaluator.postconfig or foreign(evaluator):
        return
    if evaluate(task, None, guest, context).outcome == "pass":
        raise EnvError("the task is already done at reset; its set-up must undo it")


def is_native(check: Check) -> bool:
    """Return True if a check is performed here, without OSWorld's package."""
    getters = [getter for getter in (check.result, check.expected) if getter is not None]
    has_getters = len(getters) == 2 and all(getter.type in GETTERS for getter in getters)
    return check.func in METRICS and has_getters and not check.options


def _score(check: Check, guest: Guest, context: EpisodeContext, absent: list[str]) -> float:
    """Return the score of one check. If the guest does not have a result, append the reason to `absent`."""
    if not is_native(check):
        return _foreign_score(check, guest, context, absent)
    try:
        result = _value(check.result, guest)
        if result is None:
            absent.append("the guest refused the command whose output is compared")
            return 0.0
        return METRICS[check.func](result, _value(check.expected, guest))
    except (AttributeError, KeyError, TypeError) as error:
        raise EnvError(f"evaluator {check.func}: {type(error).__name__}: {error}") from error


def _foreign_score(check: Check, guest: Guest, context: EpisodeContext, absent: list[str]) -> float:
    """Return the score of one check by OSWorld's own function; otherwise as `_score`."""
    missing, file_count = _missing_files(check.result, guest, context.folder)
    if missing and len(missing) == file_count:
        absent += missing
        return 0.0
    references = _place_references(check, context)
    try:
        return context.evaluator.score(check, context.scored(guest), references)
    except EnvError:
        if not missing:
            raise
        absent += missing
        return 0.0


def _missing_files(result: Getter | None, guest: Guest, folder: Path) -> tuple[list[str], int]:
    """Return (messages, file_count): a message for each missing file of a result, and how many it has."""
    if result is None or result.type not in ("vm_file", "cache_file"):
        return [], 0
    paths = _texts_of(result, "path")
    if result.type == "cache_file":  # output of a command of `postconfig`
        absent = [path for path in paths if not (folder / path).exists()]
        return [f"no output of a command was saved as {path}" for path in absent], len(paths)
    # OSWorld's metric gets only the files at these places of `paths`.
    numbers = result.parameters.get("gives", [0])
    paths = [path for number, path in enumerate(paths) if number in numbers]
    absent = [path for path in paths if not guest.has_file(path)]
    return [f"the guest has no file {path}" for path in absent], len(paths)


def _references(check: Check) -> Iterator[tuple[str, str]]:
    """Yield (url, name) of each file that OSWorld's get_cloud_file would fetch for a check."""
    for getter in (check.result, check.expected):
        if getter is not None and getter.type == "cloud_file":
            yield from zip(_texts_of(getter, "path"), _texts_of(getter, "dest"), strict=False)


def _place_references(check: Check, context: EpisodeContext) -> Path:
    """Copy the references into the folder where get_cloud_file looks before it fetches; return the folder.

    It is the episode's folder, where a test suite finds the modules that it tests. If a result has the name
    of a reference, a separate folder is used, since otherwise OSWorld's getter would compare the result with
    itself.
    """
    names = [name for _, name in _references(check)]
    result = check.result
    results = [] if result is None or result.type == "cloud_file" else _texts_of(result, "dest")
    folder = context.folder / "references" if set(names) & set(results) else context.folder
    for url, name in _references(check):
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise EnvError(f"evaluator {check.func}: dest {name!r} leaves the episode's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        # A copy, since a metric may write to its files.
        shutil.copyfile(_reference_path(url, context.folder), path)
    return folder


def _reference_path(url: str, folder: Path) -> Path:
    """Return where an episode keeps the file at `url`, beside the files that evaluators read."""
    return folder / ".references" / content_hash(url.encode())


def _texts_of(getter: Getter, key: str) -> list[str]:
    """Return a parameter as a list of texts. It is a list if the getter has `multi`, else one text."""
    value = getter.parameters.get(key, [])
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _value(getter: Getter | None, guest: Guest) -> Any:
    assert getter is not None
    return GETTERS[getter.type](guest, getter.parameters)
