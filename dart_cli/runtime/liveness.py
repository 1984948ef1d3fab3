"""The processes of a run on this host, as the kernel knows them.

    process_liveness                 what has become of a process that is silent
    RunProcess, workers_of   who has, or had, a name in a run directory
    when_orphaned        calls something once this process's parent is gone

Only Linux tells the liveness of a process (/proc); elsewhere it is unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "X": "gone"}
_STARTED = 19
"""`starttime` among the fields behind the command's bracket in /proc/PID/stat (proc(5), field 22)."""
_SLACK_S = 1.0
PARENT_POLL_S = 1.0


def process_liveness(pid: int, heard_at: float) -> str:
    """What process `pid`, which was alive at `heard_at` (unix seconds), is doing now.

    `gone` (its number may be another's by now), `stopped` (SIGSTOP, Ctrl-Z, a debugger), `blocked`
    (in the kernel: disk, GPU driver), `running` (it computes or waits), or empty where that cannot
    be known.
    """
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    age_s = uptime_s - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    if time.time() - age_s > heard_at + _SLACK_S:
        return "gone"  # this one began later
    return _STATES.get(fields[0], "running")


@dataclass(frozen=True)
class RunProcess:
    """Who has, or had, a name in a run."""

    name: str
    pid: int
    liveness: str  # see `process_liveness`; never empty for a living one on Linux


def workers_of(run_dir: Path) -> list[RunProcess]:
    """Everybody who took a name in `run_dir` (process.claim), by name; those of other hosts are gone.

    Looks without locking: a lock of ours, however short, could keep a starting process out.
    """
    found = []
    for path in sorted((run_dir / "workers").glob("*.lock")):
        try:
            text, taken_at = path.read_text(encoding="ascii").strip(), path.stat().st_mtime
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            found.append(RunProcess(path.stem, int(text), process_liveness(int(text), taken_at)))
    return found


def when_orphaned(parent: int, then: Callable[[], object]) -> None:
    """Call `then`, in a thread of its own, once `parent` is not this process's parent any more.

    However it ended: nobody has to tell. Within `PARENT_POLL_S`.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        then()

    threading.Thread(target=watch, name="orphan", daemon=True).start()
