"""One desktop: a virtual display with its own window manager, message bus and HOME.

    Desktop    a desktop, which is started as a whole, used by one thread, and removed as a whole
    Settings   its size, limits, user and deadlines

Nothing outlives an episode: each has its own desktop, which starts in a third of a second, without the
applications. A keeper starts and ends the processes of a desktop (envs/suites/desktop/keeper.py).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.suites.desktop.host_resources import (
    PATH,
    DesktopNumber,
    display_socket,
    environment,
    find_user,
    give,
    remove_display,
    remove_folder,
    remove_stale_folders,
)
from envs.suites.desktop.keeper import DISPLAY_FD, SERVER
from envs.suites.desktop.screen import Framebuffer, children, ticks
from envs.suites.desktop.x11 import Display, connecting, write_authority

logger = logging.getLogger(__name__)

BACKGROUND = 0x3B5268
POLL_S = 0.005
REPORT_S = 0.5  # seconds that the keeper may take to report what ended
KEEPER_S = 30.0  # seconds that the keeper may take to end everything, on a busy host
DYING_S = 2.0  # seconds that its children may take to die if the keeper was killed
SLACK_S = 1.0  # added to the deadline around a wait that has its own deadline and a better message

_KEEPER = Path(__file__).with_name("keeper.py")
_VITAL = (SERVER, "openbox", "dbus-daemon")


@dataclass(frozen=True)
class Settings:
    """Settings of a desktop."""

    width: int = 1280  # pixels
    height: int = 720
    user: str = "nobody"  # runs the programs, if this process runs as root
    memory_mb: int = 2048  # most memory of all its programs, without files that they map
    processes: int = 64  # most processes
    deadline_s: float = 20.0  # of each wait


class Desktop:
    """A running desktop.

    `fill` writes the episode's files into HOME before a program starts. With `accessible`, applications
    report their widgets (envs/suites/desktop/accessibility.py). Raises EnvError if it cannot be started, and
    from all methods once it broke.
    """

    def __init__(
        self,
        settings: Settings,
        fill: Callable[[Path], None],
        desktop_number: DesktopNumber,
        *,
        accessible: bool = False,
    ) -> None:
        remove_stale_folders()
        self.settings = settings
        self._accessible = accessible
        self._over = ""  # why the desktop is over
        self._closing = threading.Lock()
        self._closed = False
        self._rest = b""  # a message of the keeper that is not complete yet
        self._events: list[dict[str, Any]] = []  # from the keeper, not handled yet
        self._crashed = ""  # which application crashed, and how
        self._number: int | None = None  # of the display
        self._running: dict[int, str] = {}  # applications by process id
        self._serving: list[int] = []  # process ids of the vital programs
        self.screen: Framebuffer | None = None
        self.display: Display | None = None
        uid, gid = find_user(settings.user)
        self.folder, self._lock = desktop_number.make_folder()
        self.home = self.folder / "home"
        try:
            for name in ("home", "run", "tmp", "screen"):
                (self.folder / name).mkdir(mode=0o700)
            self._keeper = self._start_keeper(uid, gid)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            raise
        try:
            self._bring_up(fill, uid, gid)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of the keeper."""
        return self._keeper.pid

    @property
    def socket(self) -> Path:
        """The socket where the X server listens."""
        assert self._number is not None, "a desktop that is up has a display"
        return display_socket(self._number)

    @property
    def applications(self) -> list[str]:
        """The names of the applications that run."""
        self.check()
        return list(self._running.values())

    def launch(self, name: str, command: Sequence[str]) -> int:
        """Start an application and return its process id. Raises EnvError."""
        return self._start(name, command)

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run a program to its end and return its output. Raises EnvError, also if the program fails."""
        log = self.folder / f"{name}.log"
        before = log.stat().st_size if log.exists() else 0
        with self.bounded(f"running {name}"):
            pid = self.launch(name, command)
            self.wait_for(lambda: pid not in self._running, f"{name} did not end")
            self.check()  # the program may have failed before the first check
        return log.read_bytes()[before:].decode(errors="replace")

    def busy(self) -> int:
        """Return a number that changes only while an application computes; its value has no other meaning."""
        child_pids = (child for pid in self._running for child in children(pid))
        return sum(map(ticks, (*self._running, *self._serving, *child_pids)))

    def check(self) -> None:
        """Raise EnvError if the desktop is over, or an application crashed."""
        self._listen(0.0)
        self._events.clear()
        if self._over or self._crashed:
            raise EnvError(self._over or self._crashed)

    @contextmanager
    def bounded(self, what: str, times: float = 1.0) -> Iterator[None]:
        """End the desktop if the block takes longer than the deadline, so that a call that hangs returns.

        `times` multiplies the deadline if the block waits for several things. An EnvError in the block is
        raised with `what` in its message; if the desktop itself broke, its own error is raised instead.
        """
        deadline_s = times * self.settings.deadline_s + SLACK_S
        timer = threading.Timer(deadline_s, self._give_up, (f"{what} took {deadline_s:g} s",))
        timer.daemon = True
        timer.start()
        try:
            yield
        except EnvError as error:
            self._listen(REPORT_S)  # the keeper's report is a better message than a lost connection
            self.check()
            raise EnvError(f"{what}: {error}") from error
        finally:
            timer.cancel()
        if self._over:
            raise EnvError(self._over)

    def wait_for(self, is_done: Callable[[], bool], otherwise: str, times: float = 1.0) -> None:
        """Wait until `is_done()`. Raises EnvError after the deadline, and if the desktop broke."""
        deadline_s = times * self.settings.deadline_s
        until = time.monotonic() + deadline_s
        while not is_done():
            self.check()
            if time.monotonic() > until:
                raise EnvError(f"{otherwise} in {deadline_s:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End every process and remove the folder; may be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            if self.display is not None:
                self.display.close()
            if self.screen is not None:
                self.screen.close()
            keeper, pipes = self._keeper, (self._keeper.stdin, self._keeper.stdout)
            self._hang_up()
            try:
                keeper.wait(KEEPER_S)
            except subprocess.TimeoutExpired:
                logger.warning("keeper %d of a desktop did not exit; killed", keeper.pid)
                keeper.kill()
                keeper.wait()
            for pipe in pipes:
                if pipe is not None:
                    pipe.close()
            killed = keeper.returncode != 0
            if self._number is not None:
                remove_display(self._number, DYING_S if killed else 0.0)
            if killed:  # the keeper could not clean up
                remove_folder(self.folder)
            os.close(self._lock)

    def _start_keeper(self, uid: int, gid: int) -> subprocess.Popen[bytes]:
        plan = {
            "folder": str(self.folder),
            "uid": uid,
            "gid": gid,
            "memory_mb": self.settings.memory_mb,
            "processes": self.settings.processes,
            "vital": _VITAL,
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env={"PATH": PATH},
            pass_fds=(self._lock,),
            start_new_session=True,
        )

    def _bring_up(self, fill: Callable[[Path], None], uid: int, gid: int) -> None:
        """Start the X server, fill HOME, start message bus and window manager. Raises EnvError."""
        cookie = secrets.token_bytes(16)
        authority, keys = self.folder / "Xauthority", self.folder / "server-authority"
        write_authority(keys, cookie, None)
        give(self.folder, uid, gid)
        self._environment = {"HOME": str(self.home), "PATH": PATH}
        width, height = self.settings.width, self.settings.height
        server = [SERVER, "-displayfd", str(DISPLAY_FD), "-screen", "0", f"{width}x{height}x24"]
        server += ["-nolisten", "tcp", "-noreset", "-r", "-s", "0", "-auth", str(keys)]
        self._start(SERVER, [*server, "-fbdir", str(self.folder / "screen")])
        fill(self.home)  # while the server starts
        give(self.home, uid, gid)
        number = self._number = int(self._await("display")["display"])
        write_authority(authority, cookie, number)
        give(authority, uid, gid)
        bus = self.folder / "bus"
        self._environment = environment(self.folder, number, bus, self._accessible)
        address = f"--address=unix:path={bus}"
        self._start("dbus-daemon", ["dbus-daemon", "--session", "--nofork", "--nopidfile", address])
        self._start("openbox", ["openbox", "--sm-disable"])
        self.screen = Framebuffer(self.folder / "screen")
        # Other desktops may connect first; the deadline begins after that wait.
        longest_s = 2 * (self.settings.deadline_s + SLACK_S)
        with connecting(longest_s), self.bounded("connecting to the X server"):
            self.display = Display(number, authority)
        with self.bounded("starting the window manager"):
            self.display.paint_root(BACKGROUND)
            self.display.move(width - 1, height - 1)  # away from any widget
            self.wait_for(self.display.managed, "openbox did not start")
            self.wait_for(bus.exists, "dbus-daemon did not start")

    def _start(self, name: str, command: Sequence[str]) -> int:
        line = {"name": name, "command": list(command), "env": self._environment}
        try:
            _pipe(self._keeper.stdin).write(json.dumps(line).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise EnvError(self._over or f"the keeper of the desktop exited: {error}") from error
        pid = int(self._await("started")["pid"])
        if name in _VITAL:
            self._serving.append(pid)
        return pid

    def _await(self, key: str) -> dict[str, Any]:
        """Return the next event that has `key`. Raises EnvError if it does not come."""
        until = time.monotonic() + self.settings.deadline_s
        while True:
            for event in self._events:
                if key in event:
                    self._events.remove(event)
                    return event
            left_s = until - time.monotonic()
            if left_s <= 0:
                self._give_up(f"no {key} in {self.settings.deadline_s:g} s")
            if self._over or self._crashed:
                raise EnvError(self._over or self._crashed)
            self._listen(left_s)

    def _listen(self, seconds: float) -> None:
        """Handle the keeper's messages; wait up to `seconds` for the first one."""
        pipe = _pipe(self._keeper.stdout)
        if pipe.closed:
            self._over = self._over or "the desktop is closed"
            return
        while select.select([pipe], [], [], seconds)[0]:
            block = os.read(pipe.fileno(), 1 << 16)
            if not block:
                self._over = self._over or "the keeper of the desktop ended"
                return
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                self._receive(json.loads(line))
            seconds = 0.0

    def _receive(self, event: dict[str, Any]) -> None:
        if "over" in event:
            self._over = self._over or f"the desktop ended: {event['over']}"
        elif "exited" in event:
            self._running.pop(event["pid"], None)
            if status := event["status"]:
                how = f"signal {-status}" if status < 0 else f"status {status}"
                self._crashed = f"{event['exited']} crashed: {event.get('why', how)}"
        else:
            if event.get("started", SERVER) not in _VITAL:
                self._running[event["pid"]] = event["started"]
            self._events.append(event)

    def _give_up(self, why: str) -> None:
        self._over = self._over or why
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the keeper's input, whereupon it ends everything."""
        with suppress(OSError):
            _pipe(self._keeper.stdin).close()


def _pipe(pipe: Any) -> Any:
    assert pipe is not None, "the keeper was started with pipes"
    return pipe
