"""The verdict on a guest's state, by the evaluator of its task file.

    is_native         whether a check needs no package of OSWorld's
    foreign           whether any of an evaluator's checks needs it
    fetch_references  the files that a verdict will need, before the episode begins
    evaluate          the verdict; any failure raises EnvError, and the episode is invalid
    refuse_solved     refuses an episode whose task is done at reset

Checks of plain commands are done here, all others by OSWorld's own evaluators
(evaluator_process.py). A result that the guest does not have is a failure, whatever OSWorld's function
makes of it: a policy can delete a file, or remove the program whose output is compared.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.base import Verdict, content_hash
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.guest import Executed, Guest, RefusalError
from envs.suites.osworld.setup import EpisodeContext, prepare
from envs.tools.taskfile import METRICS, Check, Evaluator, Getter, TaskFile, claimed, graded, joined

logger = logging.getLogger(__name__)


def _rule(_: Guest, config: Mapping[str, Any]) -> Any:
    return config["rules"]


def _vm_command_line(guest: Guest, config: Mapping[str, Any]) -> str | None:
    done = _executed(guest, config)
    return None if done is None else done.output


def _vm_command_error(guest: Guest, config: Mapping[str, Any]) -> str | None:
    done = _executed(guest, config)
    return None if done is None else done.error


def _executed(guest: Guest, config: Mapping[str, Any]) -> Executed | None:
    """As in OSWorld, None where the guest refuses: no such program, too slow, not UTF-8."""
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
    """Whether a check of it needs OSWorld's package."""
    return not evaluator.infeasible and not all(is_native(check) for check in evaluator.checks)


def evaluate(task: TaskFile, last: Action | None, guest: Guest, context: EpisodeContext) -> Verdict:
    """Return the verdict on the state after the episode's `last` action. Raises EnvError on failure.

    As in OSWorld `postconfig` comes first, and is skipped if the last action decides.
    """
    evaluator = task.evaluator
    verdict = claimed(evaluator, last)
    if verdict is not None:
        return verdict
    prepare(evaluator.postconfig, guest, context, lenient=True)
    absent: list[str] = []
    scores = (_score(check, guest, context, absent) for check in evaluator.checks)
    score = joined(scores, evaluator.conj)
    # For OSWorld's getters a guest that does not answer gives an empty result: check that it does.
    guest.screenshot()
    names = ", ".join(check.func for check in evaluator.checks)
    return graded(score, f"{names}: {score:g}" + "".join(f"; {each}" for each in absent))


def fetch_references(evaluator: Evaluator, downloads: Downloads, folder: Path) -> None:
    """Fetch the files of all `cloud_file` getters into the episode's folder.

    Before the episode, so that the web cannot make a finished one invalid.
    """
    for check in evaluator.checks:
        for url, _ in _references(check):
            kept = _kept(url, folder)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(downloads.fetch(url))


def refuse_solved(task: TaskFile, guest: Guest, context: EpisodeContext) -> None:
    """Raise EnvError if the task is done at reset.

    Checked only if that changes nothing and costs little: no `postconfig`, no foreign evaluator.
    """
    evaluator = task.evaluator
    if evaluator.infeasible or evaluator.postconfig or foreign(evaluator):
        return
    if evaluate(task, None, guest, context).outcome == "pass":
        raise EnvError("the task is already done at reset; its set-up must undo it")


def is_native(check: Check) -> bool:
    """Whether a check is done here, without OSWorld's package."""
    getters = [getter for getter in (check.result, check.expected) if getter is not None]
    known = all(getter.type in GETTERS for getter in getters)
    return check.func in METRICS and len(getters) == 2 and known and not check.options


def _score(check: Check, guest: Guest, context: EpisodeContext, absent: list[str]) -> float:
    """Return the score of one check; a result that the guest does not have is noted in `absent`."""
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
    missing, needed = _missing(check.result, guest, context.folder)
    if missing and len(missing) == needed:
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


def _missing(result: Getter | None, guest: Guest, folder: Path) -> tuple[list[str], int]:
    """Return what the policy's result lacks, in words, and how many files it consists of."""
    if result is None or result.type not in ("vm_file", "cache_file"):
        return [], 0
    paths = _listed(result, "path")
    if result.type == "cache_file":  # output of a command of `postconfig`
        lost = [path for path in paths if not (folder / path).exists()]
        return [f"no output of a command was saved as {path}" for path in lost], len(paths)
    given = result.parameters.get("gives", [0])  # OSWorld's metric gets these of `paths`
    paths = [path for number, path in enumerate(paths) if number in given]
    lost = [path for path in paths if not guest.has_file(path)]
    return [f"the guest has no file {path}" for path in lost], len(paths)


def _references(check: Check) -> Iterator[tuple[str, str]]:
    """(url, name) of each file that OSWorld's get_cloud_file would fetch for a check."""
    for getter in (check.result, check.expected):
        if getter is not None and getter.type == "cloud_file":
            yield from zip(_listed(getter, "path"), _listed(getter, "dest"), strict=False)


def _place_references(check: Check, context: EpisodeContext) -> Path:
    """Put them where get_cloud_file looks before it fetches; returns that folder.

    It is the episode's own folder, where a test suite finds the modules that it tests, unless a
    result has the name of a reference: OSWorld's getter would then compare the result with itself.
    """
    names = [name for _, name in _references(check)]
    result = check.result
    saved = [] if result is None or result.type == "cloud_file" else _listed(result, "dest")
    folder = context.folder / "references" if set(names) & set(saved) else context.folder
    for url, name in _references(check):
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise EnvError(f"evaluator {check.func}: dest {name!r} leaves the episode's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_kept(url, context.folder), path)  # a copy: a metric may write to its files
    return folder


def _kept(url: str, folder: Path) -> Path:
    """Where an episode keeps the file at `url`, beside the files that evaluators see."""
    return folder / ".references" / content_hash(url.encode())


def _listed(getter: Getter, key: str) -> list[str]:
    """Return a parameter that is one text, or a list of them where the getter has `multi`."""
    value = getter.parameters.get(key, [])
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _value(getter: Getter | None, guest: Guest) -> Any:
    assert getter is not None
    return GETTERS[getter.type](guest, getter.parameters)
