"""OSWorld's evaluators in a process of their own, with a deadline.

    find_python        the interpreter that has the package desktop-env, or the install step
    find_checkout      the checkout of OSWorld that a folder of tasks belongs to
    EvaluatorProcess   that process: started early, killed if it hangs
    ScoredGuest        what it must know of an episode

desktop-env pins versions of torch and numpy that dart does not run with, hence another interpreter;
an evaluator that hangs or crashes then also costs no more than its episode.
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

CURE = (
    "install the checkout that the tasks come from in an environment of its own (python -m venv "
    "osworld-eval && osworld-eval/bin/pip install -e OSWorld) and set env.options.evaluator_python"
)


def find_python(named: str) -> str:
    """Return the interpreter for evaluators, or an empty text if there is none.

    `named` is the option; without it this interpreter is taken if it has desktop-env. Raises
    MissingPartError if there is no interpreter of that name.
    """
    if not named:
        return sys.executable if importlib.util.find_spec("desktop_env") else ""
    found = find_named(named)
    if found is None:
        raise MissingPartError(f"evaluator_python: no interpreter at {named}: {CURE}")
    return found


def find_checkout(tasks: Path) -> Path | None:
    """Return the nearest folder above `tasks` that holds the package `desktop_env`, or None."""
    return next((each for each in tasks.resolve().parents if (each / "desktop_env").is_dir()), None)


@dataclass(frozen=True)
class ScoredGuest:
    """What OSWorld's functions are told of the episode."""

    address: Address
    folder: Path  # for the episode's files
    screen: tuple[int, int]  # pixels
    password: str  # of the guest's user


class EvaluatorProcess:
    """One process that runs OSWorld's evaluators; one slot uses it. Raises EnvError.

    It works in `checkout`, if given: task files name files relative to it, and its package
    `desktop_env` comes before that of the interpreter.
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
        """Start the process if there is none; returns at once."""
        if not self._python:
            raise EnvError(f"this task needs OSWorld's evaluators (package desktop-env): {CURE}")
        self._program.start()

    def score(self, check: Check, guest: ScoredGuest, references: Path) -> float:
        """Return the score of OSWorld's metric, 0.0 to 1.0; `references` holds the files of `cloud_file`."""
        told = {
            "func": check.func,
            "result": _told(check.result),
            "expected": _told(check.expected),
            "options": dict(check.options),
        }
        request = {"do": "score", "check": told, "references": str(references), **_of(guest)}
        return float(self._ask(request, f"evaluator {check.func}")["score"])

    def prepare(self, step: SetupStep, guest: ScoredGuest) -> None:
        """Perform a set-up step as OSWorld does."""
        told = {"type": step.type, "parameters": dict(step.parameters)}
        self._ask({"do": "setup", "step": told, **_of(guest)}, f"set-up step {step.type}")

    def parts(self) -> dict[str, Any]:
        """Return what the installation has: see `parts` of evaluator_program.py."""
        return self._ask({"do": "parts"}, "package desktop_env")

    def end(self) -> None:
        """Kill the process and what it started, if any."""
        self._program.end()

    def close(self) -> None:
        """Kill the process; may be called twice."""
        self._program.close()

    def _ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        self.start()
        return self._program.ask(request, self._deadline_s, what)[0]


def _of(guest: ScoredGuest) -> dict[str, Any]:
    return {
        "guest": asdict(guest.address),
        "folder": str(guest.folder),
        "screen": list(guest.screen),
        "password": guest.password,
    }


def _told(getter: Getter | None) -> dict[str, Any] | None:
    return None if getter is None else {"type": getter.type, **getter.parameters}
