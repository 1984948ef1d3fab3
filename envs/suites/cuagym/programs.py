"""Runs the setup and reward programs of bundles in an interpreter that has the package `requests`.

Programs        the process that runs them for one environment, and a folder of their own
ProgramResult   what a program did
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from bus.errors import MissingPartError
from envs.tools.child_program import ChildProgram

MARGIN_S = 10.0  # beyond a program's deadline, for its start and its end


@dataclass(frozen=True)
class ProgramResult:
    """What a program did. `status` is its exit status, None if it was killed at its deadline."""

    status: int | None
    out: str
    err: str
    opened: tuple[str, ...]  # addresses with which it started a browser
    refused: tuple[str, ...]  # what it asked for and may not have

    @property
    def why_failed(self) -> str:
        """Why it cannot be relied on; empty if it can."""
        if self.refused:
            return f"it may not have {', '.join(self.refused[:3])}"
        if self.status is None:
            return "it did not end in time"
        if self.status != 0:
            return f"exit status {self.status}{_last_line(self.err or self.out)}"
        return ""


class Programs:
    """The process that runs the programs of one environment; not thread-safe. Raises EnvError."""

    def __init__(self, python: str) -> None:
        """Prepare; the process starts with the first program."""
        self._python = python
        self._folder: Path | None = None
        self._child: ChildProgram | None = None

    @property
    def folder(self) -> Path:
        """The folder in which the programs run, which they may write to."""
        if self._folder is None:
            self._folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="dart-cuagym-")))
        return self._folder

    @property
    def pid(self) -> int | None:
        """The process id; None if no process runs."""
        return None if self._child is None else self._child.pid

    def run(
        self,
        name: str,
        source: str,
        addresses: Sequence[tuple[str, int]],
        *,
        deadline_s: float,
        skip_sleep: bool,
    ) -> ProgramResult:
        """Run a program that may reach `addresses` only, for at most `deadline_s`."""
        if self._child is None:
            text = files("envs.suites.cuagym").joinpath("program.py").read_text(encoding="utf-8")
            self._child = ChildProgram(self._python, text, folder=self.folder)
        request = {
            "do": "run",
            "name": name,
            "source": source,
            "folder": str(self.folder),
            "addresses": [list(address) for address in addresses],
            "deadline_s": deadline_s,
            "skip_sleep": skip_sleep,
        }
        answer, _ = self._child.ask(request, deadline_s + MARGIN_S, name)
        return ProgramResult(
            answer["status"],
            answer["out"],
            answer["err"],
            tuple(answer["opened"]),
            tuple(answer["refused"]),
        )

    def empty(self) -> None:
        """Remove everything that the programs wrote."""
        if self._folder is not None:
            for path in self._folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the process and remove the folder; may be called twice."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_python(python: str) -> None:
    """Raise MissingPartError if an interpreter lacks the package that the programs of bundles import."""
    child = ChildProgram(python, _CHECK)
    try:
        answer, _ = child.ask({}, MARGIN_S * 3, f"the packages of {python}")
    finally:
        child.close()
    if not answer["requests"]:
        raise MissingPartError(
            f"{python} has no package requests, which CUA-Gym's programs import: {python} -m pip install requests, "
            "or name another interpreter in env.options.python"
        )


_CHECK = """
import importlib.util, json, sys
sys.stdin.readline()
print(json.dumps({"requests": importlib.util.find_spec("requests") is not None}), flush=True)
sys.stdin.readline()
"""


def _last_line(text: str) -> str:
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return line and f": {line[:300]}"
