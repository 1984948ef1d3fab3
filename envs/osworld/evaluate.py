"""The verdict on a guest's state, by the evaluator of its task file.

    foreign        whether a check needs OSWorld's package
    judge          the verdict; whatever breaks raises EnvError, and the episode is invalid
    refuse_solved  no episode begins with its task done

Checks of plain commands are done here; all others by OSWorld's own evaluators (evaluator_process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bus.errors import EnvError
from envs.actions import Action
from envs.base import Verdict
from envs.metrics import METRICS, claimed, joined
from envs.osworld.guest import Guest
from envs.osworld.setup import Workplace, prepare
from envs.taskfile import Check, Evaluator, Getter, TaskFile


def _rule(_: Guest, config: Mapping[str, Any]) -> Any:
    return config["rules"]


def _vm_command_line(guest: Guest, config: Mapping[str, Any]) -> str:
    return guest.execute(config["command"], shell=bool(config.get("shell")), deadline_s=150).output


def _vm_command_error(guest: Guest, config: Mapping[str, Any]) -> str:
    return guest.execute(config["command"], shell=bool(config.get("shell")), deadline_s=150).error


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
    return not evaluator.infeasible and not all(_native(check) for check in evaluator.checks)


def judge(task: TaskFile, last: Action | None, guest: Guest, place: Workplace) -> Verdict:
    """What the state says, given the episode's `last` action. Raises EnvError where it broke.

    As in OSWorld `postconfig` comes first, and is not asked for where the last action decides.
    """
    evaluator = task.evaluator
    verdict = claimed(evaluator, last)
    if verdict is not None:
        return verdict
    prepare(evaluator.postconfig, guest, place, lenient=True)
    score = joined((_score(check, guest, place) for check in evaluator.checks), evaluator.conj)
    # OSWorld's getters take a guest that does not answer for an empty result: ask it once more.
    guest.screenshot()
    names = ", ".join(check.func for check in evaluator.checks)
    return Verdict("pass" if score >= 1.0 else "fail", f"{names}: {score:g}, needs 1")


def refuse_solved(task: TaskFile, guest: Guest, place: Workplace) -> None:
    """Raise EnvError where the task is done before anything was.

    Asked only where asking changes nothing and costs little: no `postconfig`, no foreign evaluator.
    """
    evaluator = task.evaluator
    if evaluator.infeasible or evaluator.postconfig or foreign(evaluator):
        return
    if judge(task, None, guest, place).outcome == "pass":
        raise EnvError("the task is already done at reset; its set-up must undo it")


def _native(check: Check) -> bool:
    getters = [getter for getter in (check.result, check.expected) if getter is not None]
    known = all(getter.type in GETTERS for getter in getters)
    return check.func in METRICS and len(getters) == 2 and known and not check.options


def _score(check: Check, guest: Guest, place: Workplace) -> float:
    if not _native(check):
        return place.judge.score(check, guest.address, place.folder)
    try:
        return METRICS[check.func](_value(check.result, guest), _value(check.expected, guest))
    except (AttributeError, KeyError, TypeError) as error:
        raise EnvError(f"evaluator {check.func}: {type(error).__name__}: {error}") from error


def _value(getter: Getter | None, guest: Guest) -> Any:
    assert getter is not None
    return GETTERS[getter.type](guest, getter.parameters)
