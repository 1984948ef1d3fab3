"""`dart status --stacks`: the stacks of every process of the run on this host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from bus.errors import RunDirectoryError
from dart_cli.runtime.liveness import RunProcess, workers_of
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.stack_dump import END, SIGNAL

DUMP_S = 5.0
"""Seconds that all processes together have to write their stacks."""
_LOOK_S = 0.05
_LOGS = {"up": "dart-up"}  # of `dart up`; up.log holds what its children print
_ASKED = ("running", "blocked")


def run_stacks(run_dir: Path, say: Callable[[str], None]) -> int:
    """Ask all living processes for their stacks and print them; 1 where one gave none.

    Needs no data process. Raises RunDirectoryError where no process of the run lives on this host.
    """
    living = [worker for worker in workers_of(run_dir) if worker.liveness not in ("", "gone")]
    if not living:
        raise RunDirectoryError(f"{run_dir}: no process of this run lives on this host")
    begins = {worker.name: _size(_log_of(run_dir, worker)) for worker in living}
    for worker in living:
        if worker.liveness in _ASKED:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker.pid, SIGNAL)
    deadline = time.monotonic() + DUMP_S
    return max(_say_one(run_dir, worker, begins[worker.name], deadline, say) for worker in living)


def _say_one(
    run_dir: Path, worker: RunProcess, begin: int, deadline: float, say: Callable[[str], None]
) -> int:
    """Print one process's stacks once they are complete, or what was written by the deadline."""
    say(f"=== {worker.name} (pid {worker.pid})")
    if worker.liveness not in _ASKED:
        say(f"is stopped (SIGSTOP or Ctrl-Z); kill -CONT {worker.pid} lets it go on")
        return 1
    log_file = _log_of(run_dir, worker)
    while END not in (text := _read(log_file, begin)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    say(text.partition(END)[0].rstrip() or f"wrote nothing to {log_file} in {DUMP_S:.0f} s")
    return 0 if END in text else 1


def _log_of(run_dir: Path, worker: RunProcess) -> Path:
    return log_dir(run_dir) / f"{_LOGS.get(worker.name, worker.name)}.log"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
