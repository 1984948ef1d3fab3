"""Runs OSWorld's evaluators in a separate process, with a deadline.

    find_python        returns the interpreter that has the package desktop-env
    find_checkout      returns the checkout of OSWorld that a folder of tasks belongs to
    EvaluatorProcess   the process, which is started early and killed if it hangs
    ScoredGuest        the facts about an episode that the process needs

desktop-env pins versions of torch and numpy that dart does not run with, so that it needs another
interpreter. An evaluator that hangs or crashes then also costs only its episode.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from bus.errors import EnvError, MissingPartError
from envs.suites.osworld.guest import Address
from envs.tools.child_program import ChildProgram, find_named
from envs.tools.taskfile import Check, Getter, SetupStep

FIX = (
    "install the checkout that the tasks come from in a separate environment (python -m venv "
    "osworld-eval && osworld-eval/bin/pip install -e OSWorld) and set env.options.evaluator_python"
)


def find_python(option: str) -> str:
    """Return the interpreter for evaluators, "" if there is none.

    It is the one that the `option` names; if that is empty, this interpreter, provided that it has
    desktop-env. Raises MissingPartError if there is no interpreter of that name.
    """
    if not option:
        return sys.executable if importlib.util.find_spec("desktop_env") else ""
    python = find_named(option)
    if python is None:
        raise MissingPartError(f"evaluator_python: no interpreter at {option}: {FIX}")
    return python


def find_checkout(tasks: Path) -> Path | None:
    """Return the nearest folder above `tasks` that contains the package `desktop_env`, or None."""
    parents = tasks.resolve().parents
    return next((folder for folder in parents if (folder / "desktop_env").is_dir()), None)


@dataclass(frozen=True)
class ScoredGuest:
    """The facts about an episode that OSWorld's functions need."""

    address: Address
    folder: Path  # for the episode's files
    screen: tuple[int, int]  # pixels
    password: str  # of the guest's user


class EvaluatorProcess:
    """A process that runs OSWorld's evaluators for one slot. Raises EnvError.

    Its working folder is the `checkout`, if there is one: task files name files relative to it, and its
    package `desktop_env` takes precedence over the interpreter's.
    """

    def __init__(self, python: str, deadline_s: float, checkout: Path | None = None) -> None:
        self._python = python
        self._deadline_s = deadline_s
        source = (
            files("envs.suites.osworld")
            .joinpath("evaluator_program.py")
            .read_text(encoding="utf-8")
        )
        variables = {}
        if checkout is not None:
            paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self._program = ChildProgram(python, source, folder=checkout or "", variables=variables)

    def start(self) -> None:
        """Start the process if there is none, without waiting for it."""
        if not self._python:
            raise EnvError(f"this task needs OSWorld's evaluators (package desktop-env): {FIX}")
        self._program.start()

    def score(self, check: Check, guest: ScoredGuest, references: Path) -> float:
        """Return the score of OSWorld's metric, 0.0 to 1.0; `references` has the files of `cloud_file`."""
        fields = {
            "func": check.func,
            "result": _plain_getter(check.result),
            "expected": _plain_getter(check.expected),
            "options": dict(check.options),
        }
        request = {"do": "score", "check": fields, "references": str(references)}
        answer = self._ask({**request, **_plain_guest(guest)}, f"evaluator {check.func}")
        return float(answer["score"])

    def prepare(self, step: SetupStep, guest: ScoredGuest) -> None:
        """Perform a set-up step as OSWorld does."""
        fields = {"type": step.type, "parameters": dict(step.parameters)}
        request = {"do": "setup", "step": fields, **_plain_guest(guest)}
        self._ask(request, f"set-up step {step.type}")

    def parts(self) -> dict[str, Any]:
        """Return the names that the installation has (`parts` of evaluator_program.py)."""
        return self._ask({"do": "parts"}, "package desktop_env")

    def end(self) -> None:
        """Kill the process and its children, if it runs."""
        self._program.end()

    def close(self) -> None:
        """Kill the process; may be called twice."""
        self._program.close()

    def _ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        self.start()
        return self._program.ask(request, self._deadline_s, what)[0]


def _plain_guest(guest: ScoredGuest) -> dict[str, Any]:
    return {
        "guest": asdict(guest.address),
        "folder": str(guest.folder),
        "screen": list(guest.screen),
        "password": guest.password,
    }


def _plain_getter(getter: Getter | None) -> dict[str, Any] | None:
    return None if getter is None else {"type": getter.type, **getter.parameters}
