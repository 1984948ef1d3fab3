"""Studies of many runs, one for each arm and seed: results are stored and not measured again.

    Cell           one run of a study
    ResultCache    their results on disk, one JSON file each
    play_missing   plays the missing runs and reports progress
    settings_of    the settings in which a kept result must agree with the study that uses it
    dart, call     command lines, and a child process whose last line of output is JSON
    call_within    a child process that is stopped, as by Ctrl-C, at a deadline
    children_s     the CPU seconds of child processes that have ended
    tell           writes a line of progress

A study that was stopped resumes where it was: start it again with the same `--work`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bus.errors import ConfigError
from dart_cli.config.schema import Config
from dart_cli.runtime.supervisor import ChildError

Result = dict[str, Any]

_POLL_S = 1.0
_END_S = 60.0
"""How long a child may take to stop."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the cell's files, e.g. `uniform-0`."""
        return f"{self.arm}-{self.seed}"


@dataclass(frozen=True)
class ResultCache:
    """A folder of results by cell. `settings` returns what a cell's result depends on."""

    folder: Path
    settings: Callable[[Cell], object]

    def get(self, cell: Cell) -> Result | None:
        """Return the cell's result; None if it was not played.

        Raises ConfigError if it was played with other settings: figures of both must not meet.
        """
        path = self._path(cell)
        if not path.exists():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["settings"] != _as_json(self.settings(cell)):
            raise ConfigError(
                f"{path} was measured with other settings; choose another --work or remove it"
            )
        result: Result = stored["result"]
        return result

    def put(self, cell: Cell, result: Result) -> None:
        """Store a result; the file is complete or absent."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(cell)
        partial = path.with_suffix(".tmp")
        stored = {"settings": _as_json(self.settings(cell)), "result": result}
        partial.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"


def _as_json(value: object) -> Any:
    """Return `value` after a round trip through JSON, to compare it with one read from a file."""
    return json.loads(json.dumps(value))


def settings_of(config: Config) -> object:
    """Return the part of a configuration that results depend on: all but file locations and the seed.

    Only values that differ from the defaults, so that a field added later leaves results valid.
    """
    fields = config.model_dump(mode="json", exclude_defaults=True)
    fields.pop("run", None)
    if pool := fields.get("data", {}).get("pool"):
        fields["data"]["pool"] = len(pool)
    return fields


def play_missing(
    cells_to_play: Sequence[Cell],
    cells: ResultCache,
    play: Callable[[Cell], Result],
    *,
    at_once: int = 1,
    tell: Callable[[str], None],
) -> dict[Cell, Result]:
    """Return the results of `cells_to_play`, in their order; play the cells that are not on disk.

    `at_once` cells are played together, in threads. An error that `play` raises ends the study once
    the others in play have ended; finished results are kept.
    """
    results = {cell: result for cell in cells_to_play if (result := cells.get(cell)) is not None}
    missing = [cell for cell in cells_to_play if cell not in results]
    if results:
        tell(f"{len(results)} of {len(cells_to_play)} runs are in {cells.folder} already")
    began = time.monotonic()
    ending = threading.Event()

    def play_one(cell: Cell) -> Result:
        if ending.is_set():
            raise CancelledError
        tell(f"{cell.name} begins")
        try:
            result = play(cell)
        except BaseException:
            ending.set()  # at once: a free thread would take the next cell
            raise
        cells.put(cell, result)
        return result

    with ThreadPoolExecutor(at_once, "cell") as pool:
        playing = {pool.submit(play_one, cell): cell for cell in missing}
        try:
            for count, future in enumerate(as_completed(playing), start=1):
                try:
                    results[playing[future]] = future.result()
                except CancelledError:  # because another cell failed; its future raises the error
                    continue
                minutes = (time.monotonic() - began) / 60
                left = minutes / count * (len(missing) - count)
                tell(
                    f"{playing[future].name} is done; {len(results)} of {len(cells_to_play)} runs, "
                    f"{minutes:.1f} min so far, about {left:.0f} more"
                )
        finally:
            ending.set()
    return {cell: results[cell] for cell in cells_to_play}


def dart(*words: str) -> list[str]:
    """Return the command line of `dart`."""
    return [sys.executable, "-m", "dart_cli", *words]


def overrides(sets: Sequence[str]) -> list[str]:
    """Return `--set KEY=VALUE` for each setting."""
    return [part for each in sets for part in ("--set", each)]


def call(command: Sequence[str], log: Path, root: Path) -> Result:
    """Run a command in `root`, add its output to `log`, and return the JSON of its last line.

    Raises ChildError if it fails.
    """
    with _logged(command, log) as file:
        child = subprocess.run(
            command,
            cwd=root,
            env=_environment(root),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            check=False,
        )
        file.write(child.stdout)
    if child.returncode:
        raise _failed(command, log, child.returncode)
    line: Result = json.loads(child.stdout.strip().rpartition("\n")[2])
    return line


def call_within(deadline_s: float, command: Sequence[str], log: Path, root: Path) -> None:
    """Run a command in `root` and add its output to `log`; stop it at the deadline, as by Ctrl-C.

    Raises ChildError if it fails, or has not ended by the deadline.
    """
    is_late = False
    with _logged(command, log) as file:
        child = subprocess.Popen(
            command, cwd=root, env=_environment(root), stdout=file, stderr=file, text=True
        )
        try:
            child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
            try:
                child.wait(_END_S)
            finally:
                child.kill()
    if is_late or child.returncode:
        raise _failed(command, log, child.returncode)


def children_s() -> float:
    """Return the CPU seconds of the child processes that have ended, and of their children."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def tell(text: str) -> None:
    """Write a line with the time of day to stderr."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def _logged(command: Sequence[str], log: Path) -> TextIO:
    """Open the log and write the command as its next line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("a", encoding="utf-8")
    file.write(f"+ {' '.join(command)}\n")
    file.flush()
    return file


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}


def _failed(command: Sequence[str], log: Path, code: int) -> ChildError:
    return ChildError(f"{' '.join(command[1:4])} ended with {code}; see {log}", code)
