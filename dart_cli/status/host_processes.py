"""The processes of a run on this host, read from the run directory, without its data service.

why_absent   why the data service does not answer, which processes wait for it, and the likely fix
over         a line on a run that has ended normally
ended_well   why the run was over when its data service ended
ended_badly  the error that ended its data service
last_error   the error that ended a process, read from its log
run_stacks   prints the stacks of every process: `dart status --stacks`
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from bus.errors import RunDirectoryError
from bus.heartbeat import awaited, start
from dart_cli.runtime.liveness import RunProcess, workers_of
from dart_cli.runtime.logs import DUMP_END, DUMP_SIGNAL, log_dir

_TAIL_BYTES = 65536
_STARTS = " starts, pid "
_ERROR = re.compile(r"^(?:bus\.errors\.)?(\w*Error: .+)")
_OVER_TCP = "or bus.host, bus.port or bus.keys differ from its own: give it the same configuration"
_OVER = re.compile(r": the run is over: (.+)")


def why_absent(run_dir: Path, *, tcp: bool = False) -> str:
    """Return the state of the data service, the processes that wait for it, and the likely fix.

    Over `tcp` the service may run well and only have other keys in its configuration.
    """
    workers = {worker.name: worker for worker in workers_of(run_dir)}
    service = workers.pop("data", None)
    name = f"data (pid {service.pid})" if service else ""
    if service is None or not service.liveness:
        parts = [f"waits for {awaited('data')} or `dart up CONFIG`", *([_OVER_TCP] if tcp else [])]
    elif service.liveness == "stopped":
        parts = [f"{name} is stopped (SIGSTOP or Ctrl-Z); kill -CONT {service.pid} lets it go on"]
    elif service.liveness == "gone":
        parts = [_how_it_ended(name, run_dir, service.error)]
    else:
        parts = [f"{name} runs but does not answer; dart status --stacks shows what it does"]
        parts += [_OVER_TCP] if tcp else []
    waiting = [other for other, worker in workers.items() if worker.liveness not in ("", "gone")]
    parts += [f"{', '.join(waiting)} wait for it"] if waiting else []
    parts += [
        f"{other} has ended: {worker.error}" for other, worker in workers.items() if worker.error
    ]
    return "; ".join(parts)


def _how_it_ended(name: str, run_dir: Path, error: str) -> str:
    """Return how the data service ended.

    `error` is what it recorded itself; its log may lack it, e.g. if the disk is full.
    """
    restart = f"{start('dart data')} or `dart up CONFIG`"
    if error := error or ended_badly(run_dir):
        return f"{name} has ended: {error}; fix that and {restart}"
    return over(run_dir) or f"{name} has ended; {restart}"


def over(run_dir: Path) -> str:
    """Return a line on a run that has ended normally: why, and how to view it; empty for other runs."""
    reason = ended_well(run_dir)
    return f"the run is over: {reason}; `dart view {run_dir}` shows it" if reason else ""


def ended_badly(run_dir: Path) -> str:
    """Return the error that ended the run's data service; empty if no error did."""
    return last_error(log_dir(run_dir) / "data.log")


def ended_well(run_dir: Path) -> str:
    """Return why the run was over when its data service ended; empty if it was not, or an error ended it."""
    return "" if ended_badly(run_dir) else _last_match(log_dir(run_dir) / "data.log", _OVER)


def last_error(log_file: Path) -> str:
    """Return the error that ended the process with this log, in one line; empty if no error did."""
    return _last_match(log_file, _ERROR)


def _last_match(log_file: Path, pattern: re.Pattern[str]) -> str:
    """Return the first group of the newest match since the process last started; empty without one."""
    lines = _read(log_file, max(0, _size(log_file) - _TAIL_BYTES)).splitlines()
    for line in reversed(lines):
        if _STARTS in line:
            return ""
        if match := pattern.search(line):
            return match[1]
    return ""


# --- stacks ----------------------------------------------------------------------------------

DUMP_S = 5.0
"""Seconds within which all processes must have written their stacks."""
_LOOK_S = 0.05
_LOGS = {"up": "dart-up"}  # the log of `dart up` itself; up.log has the output of its children
_ABLE_TO_ANSWER = ("running", "blocked")


def run_stacks(run_dir: Path, say: Callable[[str], None]) -> int:
    """Ask all living processes for their stacks and print them; return 1 if one wrote none, else 0.

    The data service need not answer. Raises RunDirectoryError if no process of the run lives on this host.
    """
    living = [worker for worker in workers_of(run_dir) if worker.liveness not in ("", "gone")]
    if not living:
        raise RunDirectoryError(f"{run_dir}: no process of this run lives on this host")
    begins = {worker.name: _size(_log_of(run_dir, worker)) for worker in living}
    for worker in living:
        if worker.liveness in _ABLE_TO_ANSWER:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(worker.pid, DUMP_SIGNAL)
    deadline = time.monotonic() + DUMP_S
    return max(
        _print_stacks(run_dir, worker, begins[worker.name], deadline, say) for worker in living
    )


def _print_stacks(
    run_dir: Path, worker: RunProcess, begin: int, deadline: float, say: Callable[[str], None]
) -> int:
    """Print the stacks of one process once they are complete, or what it wrote until the deadline."""
    say(f"=== {worker.name} (pid {worker.pid})")
    if worker.liveness not in _ABLE_TO_ANSWER:
        say(f"is stopped (SIGSTOP or Ctrl-Z); kill -CONT {worker.pid} lets it go on")
        return 1
    log_file = _log_of(run_dir, worker)
    while DUMP_END not in (text := _read(log_file, begin)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    say(text.partition(DUMP_END)[0].rstrip() or f"wrote nothing to {log_file} in {DUMP_S:.0f} s")
    return 0 if DUMP_END in text else 1


def _log_of(run_dir: Path, worker: RunProcess) -> Path:
    """Return the log of a process."""
    return log_dir(run_dir) / f"{_LOGS.get(worker.name, worker.name)}.log"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, begin: int) -> str:
    """Return the text of a file from the byte `begin` on; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
