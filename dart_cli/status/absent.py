"""Why no data process answers, from what it left in the run directory of this host."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bus.heartbeat import awaited, start
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import log_dir

_TAIL_BYTES = 65536
_STARTS = " starts, pid "
_ERROR = re.compile(r"^(?:bus\.errors\.)?(\w*Error: .+)")
_OVER_TCP = "or bus.host, bus.port or bus.keys differ from its own: give it the same configuration"
_OVER = re.compile(r": the run is over: (.+)")


def why_absent(run_dir: Path, *, tcp: bool = False) -> str:
    """The state of the run's data process, the processes that wait for it, and the likely cure.

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
    """The error that ended the run's data process; empty if none did."""
    return last_error(log_dir(run_dir) / "data.log")


def ended_well(run_dir: Path) -> str:
    """Why the run was over when its data process ended; empty if it was not, or an error ended it."""
    return "" if ended_badly(run_dir) else _found_last(log_dir(run_dir) / "data.log", _OVER)


def last_error(log_file: Path) -> str:
    """The error that ended the process whose log this is, in one line; empty if none did."""
    return _found_last(log_file, _ERROR)


def _found_last(log_file: Path, wanted: re.Pattern[str]) -> str:
    """The match in the newest matching line since the process last started; empty without one."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if _STARTS in line:
            return ""
        if found := wanted.search(line):
            return found[1]
    return ""
