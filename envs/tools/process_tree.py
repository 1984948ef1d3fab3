"""A process with all processes that it started, however deep.

adopt_orphans   makes this process the parent of the processes that its descendants leave behind
descendants     the pids below a process, in any session or group
kill_below      kills all processes below a process
kill_tree       kills a process and all processes below it
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h; psutil has no such call
_ROUNDS = 20  # tries to kill everything, since a process may start others meanwhile


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (prctl(2)), so that no daemon escapes."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`, without zombies."""
    return [process.pid for process in _below(pid)]


def kill_tree(pid: int) -> None:
    """Kill `pid` and everything below it, and return at once; their parents reap the zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.suspend()  # so that it starts nothing more, and still holds what it adopted
        kill_below(pid)
        process.kill()


def kill_below(pid: int) -> None:
    """Kill everything below `pid`, which should start nothing meanwhile."""
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
    except psutil.AccessDenied:
        # This user may not read some process of the host (hidepid=1, proc(5)).
        processes = _readable_below(pid)
    return [process for process in processes if _lives(process)]


def _readable_below(pid: int) -> list[psutil.Process]:
    """Return the processes below `pid` among those that this user may read; slower than `children`."""
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
