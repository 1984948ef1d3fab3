"""Find out from the kernel what the processes of a run on this host are doing.

error_of                 returns the error that ended a process
process_liveness         returns what a process is doing: gone, stopped, blocked or running
start_ticks              returns when a process began, which tells it from a later one with the same pid
end_of                   returns what became of a silent process: it ended in order, crashed, or lives
RunProcess, workers_of   the processes that have, or had, a name in a run directory
when_orphaned            calls a function once this process's parent is gone
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_DISK_SLEEP: "blocked",
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
}
_SLACK_S = 1.0
_START = 19  # field `starttime` of /proc/PID/stat, counted from the state
PARENT_POLL_S = 1.0


def process_liveness(pid: int, *, silent_s: float = 0.0, ticks: int = 0) -> str:
    """Return what a process is doing, which had the pid `pid` `silent_s` seconds ago.

    If `ticks` is not 0, the process is identified by these `start_ticks` instead of `silent_s`. It is `gone`
    (another process may have its pid now), `stopped` (SIGSTOP, Ctrl-Z, a debugger), `blocked` (in the kernel:
    disk, GPU driver) or `running` (it computes or waits); empty if the system does not show it.
    """
    try:
        state = _STATES.get(psutil.Process(pid).status(), "running")
    except (psutil.NoSuchProcess, ValueError):  # a heartbeat may name an invalid pid
        return "gone"
    except psutil.AccessDenied:
        return ""
    began = start_ticks(pid)
    is_later = began != ticks if ticks else _age_s(began) + _SLACK_S < silent_s
    return "gone" if began and is_later else state


def start_ticks(pid: int) -> int:
    """Return when a process began, in the kernel's ticks since boot; 0 if there is no such process.

    Changes of the clock do not affect it, so it tells a process from a later one with the same pid.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[_START])
    except (OSError, ValueError, IndexError):
        return 0


def _age_s(ticks: int) -> float:
    """Return the seconds since a process with these `start_ticks` began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


ENDED = "ended"
"""The text in the lock file of a process that ended in order."""
KILLED = "killed by signal"
"""The beginning of the text that `dart up` writes into the lock file of a child that a signal killed."""


def end_of(state: str, liveness: str, error: str) -> str:
    """Return in a few words what became of a process whose heartbeats have stopped.

    `ended`: it ended in order, as the state of its last heartbeat shows. `failed`, or `killed by signal 9`:
    the text in its lock file shows it. `stopped`, `blocked` or `silent`: it lives. `lost`: nothing shows how
    it ended; it was killed, or its host went down.
    """
    if error:
        return error if error.startswith(KILLED) else "failed"
    if state == "stopping":
        return ENDED
    return {"running": "silent", "gone": "lost", "": "lost"}.get(liveness, liveness)


@dataclass(frozen=True)
class RunProcess:
    """A process that has, or had, a name in a run."""

    name: str
    pid: int
    liveness: str  # see `process_liveness`; empty only for one that may not be read
    error: str = ""  # the error that ended it, if one did
    is_ended: bool = False  # whether it ended in order


def workers_of(run_dir: Path) -> list[RunProcess]:
    """Return the processes that took a name in `run_dir` (run_dir.claim), ordered by name.

    Processes of other hosts appear as gone. No lock is taken, because it could keep a starting process out.
    """
    processes = []
    for path in sorted((run_dir / "workers").glob("*.lock")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            silent_s = time.time() - path.stat().st_mtime
        except OSError:
            continue
        owner, _, error = text.strip().partition("\n")
        pid, _, ticks = owner.partition(" ")
        if pid.isdecimal():
            began = int(ticks) if ticks.isdecimal() else 0
            liveness = process_liveness(int(pid), silent_s=silent_s, ticks=began)
            is_ended, why = error.strip() == ENDED, error.strip()
            processes.append(
                RunProcess(path.stem, int(pid), liveness, "" if is_ended else why, is_ended)
            )
    return processes


def error_of(run_dir: Path, worker: str, pid: int) -> str:
    """Return the error that ended process `pid` with the name `worker`; empty if none did."""
    errors = (
        process.error
        for process in workers_of(run_dir)
        if (process.name, process.pid) == (worker, pid)
    )
    return next(errors, "")


def when_orphaned(parent: int, then: Callable[[], object]) -> None:
    """Call `then` in a new thread once `parent` is no longer this process's parent.

    This works however the parent ended, and takes at most `PARENT_POLL_S`.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        then()

    threading.Thread(target=watch, name="orphan", daemon=True).start()
