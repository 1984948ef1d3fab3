"""What is known of a run's processes on this host, without its data process.

why_absent   why no data process answers, from what it left in the run directory
over         why the run is over; ended_well and ended_badly, how its data process ended
last_error   the error that ended a process, by its log
run_stacks   `dart status --stacks`: the stacks of every process
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
    """Return the state of the run's data process, the processes that wait for it, and the likely cure.

    Over `tcp` it may run well, with other keys than ours.
    """
    workers = {worker.name: worker for worker in workers_of(run_dir)}
    data = workers.pop("data", None)
    where = f"data (pid {data.pid})" if data else ""
    if data is None or not data.liveness:
        what = f"waits for {awaited('data')} or `dart up CONFIG`"
        what += f"; {_OVER_TCP}" if tcp else ""
    elif data.liveness == "stopped":
        what = f"{where} is stopped (SIGSTOP or Ctrl-Z); kill -CONT {data.pid} lets it go on"
    elif data.liveness == "gone":
        what = _how_it_ended(where, run_dir, data.error)
    else:
        what = f"{where} runs but does not answer; dart status --stacks shows what it does"
        what = f"{what}; {_OVER_TCP}" if tcp else what
    waiting = [name for name, each in workers.items() if each.liveness not in ("", "gone")]
    ended = [f"{name} has ended: {each.error}" for name, each in workers.items() if each.error]
    return "; ".join([what, *([f"{', '.join(waiting)} wait for it"] if waiting else []), *ended])


def _how_it_ended(where: str, run_dir: Path, error: str) -> str:
    """`error` is what it left itself: its log may lack it, e.g. as the disk is full."""
    again = f"{start('dart data')} or `dart up CONFIG`"
    if error := error or ended_badly(run_dir):
        return f"{where} has ended: {error}; fix that and {again}"
    return over(run_dir) or f"{where} has ended; {again}"


def over(run_dir: Path) -> str:
    """One line about a run that has ended normally: why, and how to view it; empty otherwise."""
    reason = ended_well(run_dir)
    return f"the run is over: {reason}; `dart view {run_dir}` shows it" if reason else ""


def ended_badly(run_dir: Path) -> str:
    """Return the error that ended the run's data process; empty if none did."""
    return last_error(log_dir(run_dir) / "data.log")


def ended_well(run_dir: Path) -> str:
    """Why the run was over when its data process ended; empty if it was not, or an error ended it."""
    return "" if ended_badly(run_dir) else _found_last(log_dir(run_dir) / "data.log", _OVER)


def last_error(log_file: Path) -> str:
    """Return the error that ended the process whose log this is, in one line; empty if none did."""
    return _found_last(log_file, _ERROR)


def _found_last(log_file: Path, wanted: re.Pattern[str]) -> str:
    """Return the match in the newest matching line since the process last started; empty without one."""
    lines = _read(log_file, max(0, _size(log_file) - _TAIL_BYTES)).splitlines()
    for line in reversed(lines):
        if _STARTS in line:
            return ""
        if found := wanted.search(line):
            return found[1]
    return ""


# --- stacks ----------------------------------------------------------------------------------

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
                os.kill(worker.pid, DUMP_SIGNAL)
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
    while DUMP_END not in (text := _read(log_file, begin)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    say(text.partition(DUMP_END)[0].rstrip() or f"wrote nothing to {log_file} in {DUMP_S:.0f} s")
    return 0 if DUMP_END in text else 1


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
