"""The program that runs the setup and reward programs of CUA-Gym's task bundles.

It runs as `python -c SOURCE` and is never imported; envs/tools/child_program.py defines the protocol. Its only
request runs a program in a process of its own, which it forks:

    {"do": "run", "source": ..., "name": ..., "folder": ..., "addresses": [[host, port], ...],
     "deadline_s": ..., "skip_sleep": ...}
    ->  {"status": ..., "out": ..., "err": ..., "opened": [address, ...], "refused": [what, ...]}

`status` is the exit status, None if the program was killed at its deadline; `out` and `err` are the ends of its
output. `opened` are the addresses with which it started a browser, which is not started. `refused` is what it
asked for and may not have: connections to other addresses than `addresses`, files written outside `folder`,
other programs, signals to processes, a model as a judge. Python's audit events are the means, which hold an
honest program within these bounds; they are no prison for one that means harm.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ORPHAN_POLL_S = 1.0
POLL_S = 0.005
MOST_WRITTEN = 64 << 20  # bytes of one file
MOST_MEMORY = 4 << 30  # bytes of address space
TAIL = 4000  # characters of an output that are returned
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables that a program sees; the others may hold keys."""
PRELOADED = ("json", "urllib.request", "uuid", "datetime", "copy", "re", "requests")
"""Modules that most programs import. They are loaded once, before a program is forked."""
BROWSERS = (
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chromium",
    "chromium-browser",
    "firefox",
    "xdg-open",
)
WINDOW_TOOLS = ("pkill", "killall", "wmctrl", "xdotool", "sleep")
"""Programs that only look after the windows of a desktop, which is not there: they do nothing."""
JUDGE = "reward_judge"
"""The module with which a reward asks a model."""
PROCESS_EVENTS = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
)
PATH_EVENTS = (
    "os.chmod",
    "os.chown",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
)


def main() -> None:
    """Answer requests until stdin ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    for line in requests:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the caller gets every error as an answer
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def end_with(parent: int) -> None:
    """End this process once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    os._exit(1)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a program in a new process and return what it did."""
    folder = Path(request["folder"])
    places = {name: folder / f".{name}" for name in ("out", "err", "report")}
    for place in places.values():
        place.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        be_program(request, places)  # does not return
    status = wait_for(pid, time.monotonic() + request["deadline_s"])
    report: dict[str, list[str]] = {"opened": [], "refused": []}
    if places["report"].exists():
        for line in places["report"].read_text("utf-8").splitlines():
            kind, what = json.loads(line)
            if what not in report[kind]:
                report[kind].append(what)
    out, err = (
        places[name].read_text("utf-8", "replace") if places[name].exists() else ""
        for name in ("out", "err")
    )
    return {"status": status, "out": out[-TAIL:], "err": err[-TAIL:], **report}


def wait_for(pid: int, until: float) -> int | None:
    """Return the exit status of a process; None if it had to be killed with its group."""
    while time.monotonic() < until:
        child, status = os.waitpid(pid, os.WNOHANG)
        if child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def be_program(request: dict[str, Any], places: dict[str, Path]) -> None:
    """Run the program in this process, which was forked for it, and end the process."""
    status = 1
    try:
        os.setsid()
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(places[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        report_to = os.open(places["report"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        folder = os.path.realpath(request["folder"])
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        os.environ.clear()
        os.environ.update(variables, HOME=folder, TMPDIR=folder, DISPLAY=":0")
        os.chdir(folder)

        def report(kind: str, what: str) -> None:
            os.write(report_to, json.dumps([kind, what]).encode() + b"\n")

        if request["skip_sleep"]:
            time.sleep = lambda _: None
        subprocess.Popen = browser_only(report)  # type: ignore[assignment, misc]
        os.system = lambda command: browser_only(report)(command).returncode
        names = {"__name__": "__main__", "__file__": request["name"]}
        code = compile(request["source"], request["name"], "exec")
        sys.addaudithook(guard(folder, request["addresses"], report))
        exec(code, names)  # noqa: S102 - what this process is for
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - this process only runs the program
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def guard(
    folder: str, addresses: Sequence[Sequence[Any]], report: Callable[[str, str], None]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a hook for Python's audit events that refuses what a program of a bundle may not do."""
    allowed = {(str(host), int(port)) for host, port in addresses}
    hosts = {host for host, _ in allowed} | {"localhost"}

    def refuse(what: str) -> None:
        report("refused", what)
        raise PermissionError(f"refused: {what}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            address = args[1]
            is_mock = isinstance(address, tuple) and address[1] in {port for _, port in allowed}
            if not is_mock or address[0] not in hosts:
                refuse(f"a connection to {address}")
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            if args[0] not in hosts:
                refuse(f"the host {args[0]}")
        elif event == "socket.bind":
            refuse("a port of its own")
        elif event in ("os.kill", "os.killpg"):
            refuse(f"a signal to process {args[0]}")
        elif event in PROCESS_EVENTS:
            refuse(f"the program {args[0] if args else ''}")
        elif event == "import" and args[0] == JUDGE:
            refuse("a model as a judge")
        elif event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) and outside(path):
                refuse(f"writing {path}")
        elif event in PATH_EVENTS and any(outside(path) for path in args):
            refuse(f"{event.partition('.')[2]} {args[0]}")
        elif event == "ctypes.dlopen":
            refuse("a library of C")

    def outside(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor that is open already, or a mode
        place = os.path.realpath(os.fsdecode(path))
        return not (place.startswith(folder + os.sep) or place == os.devnull)

    return hook


def browser_only(report: Callable[[str, str], None]) -> type:
    """Return a class in place of subprocess.Popen: it notes the addresses that a browser was to open."""

    class Process:
        """A process that has ended well and has written nothing."""

        returncode, pid, stdin, stdout, stderr = 0, 0, None, None, None

        def __init__(self, args: Any, *_: Any, **__: Any) -> None:
            self.args = args
            words = shlex.split(args) if isinstance(args, str) else [os.fspath(a) for a in args]
            words = [
                part for word in words for part in (shlex.split(word) if " " in word else [word])
            ]
            names = [Path(word).name for word in words]
            if any(name in BROWSERS for name in names):
                for word in words:
                    if word.startswith(("http://", "https://")):
                        report("opened", word)
            elif not names or names[0] not in WINDOW_TOOLS:
                what = f"the program {words[0] if words else ''}"
                report("refused", what)
                raise PermissionError(f"refused: {what}")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def poll(self) -> int:
            return 0

        def wait(self, **_: float | None) -> int:
            return 0

        def communicate(self, *_: Any, **__: Any) -> tuple[str, str]:
            return "", ""

        def terminate(self) -> None:
            pass

        kill = terminate

    return Process


if __name__ == "__main__":
    main()
