"""The keeper of one desktop: a process that starts the desktop's programs, watches them and ends them all.

It is run by path, with only the standard library. It drops root, sets limits and adopts the orphans of its
children (PR_SET_CHILD_SUBREAPER). On command, or when its owner has ended in any way, it kills all of them
and removes the desktop's folder.

    Keeper         reads commands, starts programs, reports events, ends everything
    descendants    returns the process ids of all children of a process, adopted ones included

The owner (envs/suites/desktop/desktop.py) sends JSON lines: {"name", "command", "env"} starts a program;
`-displayfd` of Xvfb is descriptor DISPLAY_FD. The end of this pipe ends the desktop. The keeper sends
{"display": number}, {"started": name, "pid"}, {"exited": name, "pid", "status"} (a negative status is a
signal, as in subprocess) and {"over": why}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SERVER = "Xvfb"
GUARD_S = 1.0  # seconds between checks of memory and number of processes
END_S = 5.0  # seconds that killing all processes may take
POLITE_S = 0.5  # seconds that the X server has to remove its lock and socket
OPEN_FILES = 1024
FILE_BYTES = 256 << 20  # largest file that a program may write
ADDRESS_BYTES = 8 << 30  # address space of one process

DISPLAY_FD = 9  # where Xvfb writes the number of its display

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


class Keeper:
    """The keeper of one desktop.

    `plan` has folder, uid, gid, memory_mb, processes and vital (program names).
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._programs: dict[int, str] = {}  # by process id
        self._server: int | None = None
        self._display, display = os.pipe()
        os.dup2(display, DISPLAY_FD, inheritable=False)
        os.close(display)
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the owner decides

    def run(self) -> None:
        """Keep the desktop until its owner or one of its vital programs ends, then end everything."""
        rest = number = b""
        last_guard = time.monotonic()
        try:
            while True:
                ready = select.select([0, self._wake, self._display], [], [], GUARD_S)[0]
                if self._wake in ready:
                    os.read(self._wake, 4096)
                if self._display in ready:
                    number += os.read(self._display, 16)
                    if number.endswith(b"\n"):
                        tell(display=int(number))
                        number = b""
                if why := self._reap():
                    tell(over=why)
                    return
                if 0 in ready:
                    block = os.read(0, 1 << 16)
                    if not block:
                        return
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        self._start(**json.loads(line))
                if time.monotonic() - last_guard > GUARD_S:
                    last_guard = time.monotonic()
                    if why := self._guard():
                        tell(over=why)
                        return
        finally:
            self._end()

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        log = Path(self._plan["folder"]) / f"{name}.log"
        try:
            with log.open("ab") as out:
                program = subprocess.Popen(
                    command,
                    env=env,
                    cwd=env["HOME"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(DISPLAY_FD,) if name == SERVER else (),
                    start_new_session=True,
                    preexec_fn=_die_with_keeper,  # noqa: PLW1509 - this process has one thread
                )
        except OSError as error:
            tell(exited=name, pid=0, status=127, why=str(error))
            return
        if name == SERVER:
            self._server = program.pid
        program.returncode = 0  # _reap waits for it, Popen must not
        self._programs[program.pid] = name
        tell(started=name, pid=program.pid)

    def _reap(self) -> str:
        """Reap and report the processes that ended; return why the desktop is over, "" if it is not."""
        over = ""
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = child
                name = self._programs.pop(pid, "")
                if not name:
                    continue
                code = os.waitstatus_to_exitcode(status)
                if name in self._plan["vital"]:
                    over = over or f"{name} ended with status {code}{self._last_line(name)}"
                else:
                    tell(exited=name, pid=pid, status=code)
        return over

    def _last_line(self, name: str) -> str:
        """Return ": " and the last line that a program wrote; "" if it wrote none."""
        with suppress(OSError):
            log = Path(self._plan["folder"]) / f"{name}.log"
            lines = log.read_text(errors="replace").strip().splitlines()
            return f": {lines[-1]}" if lines else ""
        return ""

    def _guard(self) -> str:
        """Return which limit the desktop's processes exceed, "" if they exceed none."""
        pids = descendants(os.getpid())
        if len(pids) > self._plan["processes"]:
            return f"{len(pids)} processes, more than {self._plan['processes']}"
        used = sum(map(anonymous_mb, pids))
        if used > self._plan["memory_mb"]:
            return f"{used:.0f} MB of memory used, more than {self._plan['memory_mb']}"
        return ""

    def _end(self) -> None:
        """Kill all processes, the X server last and politely, and remove the desktop's folder."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server = self._server
        if server in self._programs:
            for pid in set(descendants(os.getpid())) - {server}:
                _kill(pid, signal.SIGKILL)
            _kill(server, signal.SIGTERM)
            self._wait(POLITE_S, lambda: server not in self._programs)
        self._wait(END_S, self._kill_all)
        for _ in range(10):
            shutil.rmtree(self._plan["folder"], ignore_errors=True)
            if not Path(self._plan["folder"]).exists():
                return
            time.sleep(0.05)

    def _kill_all(self) -> bool:
        pids = descendants(os.getpid())
        for pid in pids:
            _kill(pid, signal.SIGKILL)
        return not pids

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while not is_done() and time.monotonic() < until:
            time.sleep(0.005)
            self._reap()


def descendants(root: int) -> list[int]:
    """Return the process ids of all processes below `root`, including zombies."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                stat = (folder / "stat").read_bytes()
                parents[int(folder.name)] = int(stat.rpartition(b")")[2].split()[1])
    family, generation = set[int](), {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation} - family
        family |= generation
    return sorted(family)


def anonymous_mb(pid: int) -> float:
    """Return the memory of a process that no file backs, in MiB; 0 if the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def tell(**event: Any) -> None:
    """Send one event to the owner, which may have ended."""
    with suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


def drop_root(uid: int, gid: int) -> None:
    """Become another user permanently, if this process is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def set_limits() -> None:
    """Set the limits of this process and of all processes that it starts."""
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_AS, ADDRESS_BYTES),
    ):
        hard = resource.getrlimit(what)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (least, least))


def _die_with_keeper() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _kill(pid: int | None, how: signal.Signals) -> None:
    with suppress(OSError):
        if pid:
            os.kill(pid, how)


def main() -> None:
    """Keep the desktop that the first argument describes."""
    plan = json.loads(sys.argv[1])
    os.umask(0o077)
    drop_root(plan["uid"], plan["gid"])
    set_limits()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Keeper(plan).run()


if __name__ == "__main__":
    main()
