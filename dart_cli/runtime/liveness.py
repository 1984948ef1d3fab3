"""The processes of a run on this host, as the kernel knows them.

error_of                 what ended a process
process_liveness         what a silent process is doing
start_ticks              which process has a pid, whatever the host's clock says
end_of                   the word for a silent process: whether it ended in order, crashed, or lives
RunProcess, workers_of   the processes that have, or had, a name in a run directory
when_orphaned            calls something once this process's parent is gone
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
    """Return what process `pid` is doing, which was alive `silent_s` seconds ago or has these `start_ticks`.

    `gone` (its pid may be another process's by now), `stopped` (SIGSTOP, Ctrl-Z, a debugger),
    `blocked` (in the kernel: disk, GPU driver), `running` (it computes or waits), or empty where the
    system does not show it.
    """
    try:
        state = _STATES.get(psutil.Process(pid).status(), "running")
    except (psutil.NoSuchProcess, ValueError):  # a heartbeat may name a pid that cannot be one
        return "gone"
    except psutil.AccessDenied:
        return ""
    began = start_ticks(pid)
    is_later = began != ticks if ticks else _age_s(began) + _SLACK_S < silent_s
    return "gone" if began and is_later else state


def start_ticks(pid: int) -> int:
    """Return when a process began, in the kernel's ticks since boot; 0 where there is none.

    No step of the clock changes it, so that it tells a process from a later one of the same pid.
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
"""What a process leaves that ended in order."""
KILLED = "killed by signal"
"""Begins what `dart up` leaves of a child that a signal ended, which could leave nothing itself."""


def end_of(state: str, liveness: str, error: str) -> str:
    """Return in a word or a few what became of a process whose heartbeats have stopped.

    `ended`: in order, by the state of its last heartbeat. `failed`, or `killed by signal 9`: by what was left
    of its end. `stopped`, `blocked` or `silent`: it lives. `lost`: nothing says how it ended; it was killed, or
    its host went down.
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
    error: str = ""  # why it ended, if an error ended it
    is_ended: bool = False  # in order


def workers_of(run_dir: Path) -> list[RunProcess]:
    """Return the processes that took a name in `run_dir` (role.claim), by name; those of other hosts are gone.

    Takes no lock: a lock of ours, however short, could keep a starting process out.
    """
    found = []
    for path in sorted((run_dir / "workers").glob("*.lock")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            silent_s = time.time() - path.stat().st_mtime
        except OSError:
            continue
        owner, _, error = text.strip().partition("\n")
        pid, _, ticks = owner.partition(" ")
        if pid.isdecimal():
            known = int(ticks) if ticks.isdecimal() else 0
            liveness = process_liveness(int(pid), silent_s=silent_s, ticks=known)
            is_ended, why = error.strip() == ENDED, error.strip()
            found.append(
                RunProcess(path.stem, int(pid), liveness, "" if is_ended else why, is_ended)
            )
    return found


def error_of(run_dir: Path, worker: str, pid: int) -> str:
    """Return what ended process `pid`, which had the name `worker`; empty if no error did."""
    found = (each for each in workers_of(run_dir) if (each.name, each.pid) == (worker, pid))
    return next((each.error for each in found), "")


def when_orphaned(parent: int, then: Callable[[], object]) -> None:
    """Call `then`, in a thread of its own, once `parent` is not this process's parent any more.

    However the parent ended; within `PARENT_POLL_S`.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        then()

    threading.Thread(target=watch, name="orphan", daemon=True).start()
