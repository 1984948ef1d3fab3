"""A process with all that it started, to the last; without /proc, the process alone.

adopt_orphans   from now on what this process's descendants leave behind stays its descendant
descendants     pids below a process, in whatever session or group
kill_below      ends all of them
kill_tree       ends the process, too
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ROUNDS = 20  # against one that starts processes while it is ended


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (prctl(2)): daemons do not get away."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The pids of all processes below `pid`, zombies not among them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("*"):
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state ppid ...; a name may hold anything, so count from its end
            state, parent = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
        except OSError:  # it has just ended
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill_tree(pid: int) -> None:
    """End `pid` and everything below it; returns at once, the dead are its parent's to collect."""
    _send(pid, signal.SIGSTOP)  # so that it starts nothing more, and still holds what it adopted
    kill_below(pid)
    _send(pid, signal.SIGKILL)


def kill_below(pid: int) -> None:
    """End everything below `pid`, which should start nothing meanwhile."""
    for _ in range(_ROUNDS):
        below = descendants(pid)
        if not below:
            return
        for each in below:
            _send(each, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
