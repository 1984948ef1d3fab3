"""A process with all processes that it started, however deep.

adopt_orphans   from now on what this process's descendants leave behind stays its descendant
descendants     pids below a process, in whatever session or group
kill_below      ends all of them
kill_tree       ends the process, too
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h; psutil has no such call
_ROUNDS = 20  # against a process that starts others while it is ended


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (prctl(2)), so that no daemon escapes."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`, zombies not among them."""
    return [process.pid for process in _below(pid)]


def kill_tree(pid: int) -> None:
    """End `pid` and everything below it; returns at once, zombies are left for their parents."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.suspend()  # so that it starts nothing more, and still holds what it adopted
        kill_below(pid)
        process.kill()


def kill_below(pid: int) -> None:
    """End everything below `pid`, which should start nothing meanwhile."""
    for _ in range(_ROUNDS):
        below = _below(pid)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _below(pid: int) -> list[psutil.Process]:
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    except psutil.AccessDenied:  # some process of this host is not ours to read: hidepid=1, proc(5)
        processes = _readable_below(pid)
    return [process for process in processes if _lives(process)]


def _readable_below(pid: int) -> list[psutil.Process]:
    """As `children` finds them, among the processes that may be read; slower."""
    psutil.process_iter.cache_clear()  # it leaves out a pid that was reused since the last call
    children: dict[int | None, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    processes, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        processes += below
        waiting += [process.pid for process in below]
    return processes


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
