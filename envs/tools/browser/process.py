"""A headless Chromium process with its own profile: found, started, used through a pipe, ended.

find_chromium           finds the binary, or raises an error with the install step
resolving               the flag with which the names of some hosts resolve, and no others
BrowserProcess          one browser with its process group and a new profile folder
make_profile            makes a new folder with a lock that lasts as long as this process
remove_profile          removes such a folder
remove_stale_profiles   removes folders whose owners were killed
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from bus.errors import EnvError, MissingPartError

logger = logging.getLogger(__name__)

BINARY = "/usr/lib/chromium/chromium-headless-shell"
"""Debian's binary. The one in /usr/bin is a script, which would be a process between this one and the
browser. The full browser cannot draw on command."""

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-smooth-scrolling",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-sync",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--no-first-run",
    "--mute-audio",
    "--force-color-profile=srgb",
    "--lang=en-US",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name resolves; see `resolving`
    # A frame is drawn only on command, and then completely: see TaskPage.look of suite miniwob.
    "--run-all-compositor-stages-before-draw",
    "--disable-partial-raster",  # otherwise remains of the previous frame show at rounded edges
    "--disable-threaded-animation",
    "--disable-threaded-scrolling",
    "--disable-checker-imaging",
    "--disable-image-animation-resync",
)

PAGE_FILES = ("--allow-file-access-from-files", "--hide-scrollbars")
"""Further flags for pages that are files of this machine and draw all that they have to show."""


def resolving(names: Iterable[str]) -> str:
    """Return the flag with which only these hosts resolve, by name or by address."""
    excluded = "".join(f" , EXCLUDE {name}" for name in sorted(set(names)))
    return f"--host-resolver-rules=MAP * ~NOTFOUND{excluded}"


PROFILE_PREFIX = "dart-chromium-"
_LOCK, _LOG = "dart.lock", "chromium.log"
_THEIR_IN, _THEIR_OUT = 3, 4  # descriptors that --remote-debugging-pipe reads from and writes to
_CLOSE_DEADLINE_S = 5.0


def find_chromium(path: str = "") -> Path:
    """Return the browser's binary: `path`, or Debian's. Raises MissingPartError with the install step."""
    place = path or BINARY
    if os.access(place, os.X_OK) and Path(place).is_file():
        return Path(place)
    fix = "set env.options.chromium to its binary" if path else "or set env.options.chromium"
    raise MissingPartError(f"no Chromium at {place}: apt install chromium-headless-shell, {fix}")


class BrowserProcess:
    """A browser in its own session; `flags` come after FLAGS and override them.

    Raises EnvError if it cannot be started.
    """

    def __init__(self, binary: Path, scale: float, flags: Sequence[str] = ()) -> None:
        remove_stale_profiles()
        self._writing = threading.Lock()
        self._ending = threading.Lock()
        self._how = ""  # how the browser ended; empty while it runs
        self._closed = False
        self._profile, self._lock = make_profile()
        their_in, self._to = _pipe()
        self._from, their_out = _pipe()
        os.set_blocking(self._to, False)
        try:
            self.pid = os.posix_spawn(
                binary,
                [*_command(binary, self._profile, scale), *flags],
                {**os.environ, "TZ": "UTC", "LANG": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, their_in, _THEIR_IN),
                    (os.POSIX_SPAWN_DUP2, their_out, _THEIR_OUT),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, self._profile / _LOG, os.O_WRONLY | os.O_CREAT, 0o600),
                ],
                setsid=True,
            )
        except OSError as error:
            os.close(self._from)
            self._forget()
            raise EnvError(f"cannot start {binary}: {error}") from error
        finally:
            os.close(their_in)
            os.close(their_out)

    def read(self, size: int) -> bytes:
        """Return the next bytes from the browser; b"" once it has ended."""
        block = os.read(self._from, size)
        if not block:
            os.close(self._from)
        return block

    def write(self, message: bytes, deadline_s: float) -> None:
        """Send bytes to the browser. Raises EnvError if it has ended, or does not read for `deadline_s`."""
        until, rest = time.monotonic() + deadline_s, memoryview(message)
        if not self._writing.acquire(timeout=deadline_s):
            raise EnvError(f"Chromium did not read for {deadline_s:g} s")
        try:
            while rest:
                left_s = max(0.0, until - time.monotonic())
                if self._closed or not select.select([], [self._to], [], left_s)[1]:
                    raise EnvError(f"Chromium did not read for {deadline_s:g} s")
                rest = rest[os.write(self._to, rest) :]
        except OSError as error:
            raise EnvError(f"Chromium is gone: {error.strerror}") from error
        finally:
            self._writing.release()

    @property
    def folder(self) -> Path:
        """The folder of its profile, which is removed with the browser, also after a `kill -9` of its owner."""
        return self._profile

    def last_words(self) -> str:
        """Return the last line of the browser's log; empty if there is none."""
        with suppress(OSError):
            lines = (self._profile / _LOG).read_text(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    @property
    def running(self) -> bool:
        """Whether the browser process itself lives; its children may keep its end of the pipe open."""
        with self._ending:
            if self._how:
                return False
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> str:
        """Kill the remaining processes of the browser, and return how it ended, e.g. `signal 9`."""
        with self._ending:
            if self._how:
                return self._how
            # Kill before reaping: until then no other process can get the id of the browser or of its group.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._how = _reap(self.pid)
            return self._how

    def close(self) -> None:
        """End all processes of the browser and remove its profile; may be called twice."""
        self.end()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._forget()

    def _forget(self) -> None:
        os.close(self._to)
        remove_profile(self._profile)
        os.close(self._lock)


def remove_stale_profiles() -> None:
    """Remove the profiles whose owners have died, which are those with a free lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PROFILE_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # its owner is making or removing it, or it belongs to another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_profile(folder)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)


def make_profile() -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock, which lasts as long as this process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PROFILE_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another process removed it as stale before it was locked


def _command(binary: Path, profile: Path, scale: float) -> list[str]:
    # The sandbox does not work for root; for other users it stays on.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    own = [f"--force-device-scale-factor={scale:g}", f"--user-data-dir={profile}"]
    return [str(binary), *FLAGS, *sandbox, *own]


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, (read, write), at descriptors above those that the browser uses."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _reap(pid: int) -> str:
    """Wait for the end of the browser process, and return how it ended."""
    until = time.monotonic() + _CLOSE_DEADLINE_S
    while time.monotonic() < until:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid == pid:
            code = os.waitstatus_to_exitcode(status)
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        time.sleep(0.005)
    logger.warning("Chromium %d did not end in %g s", pid, _CLOSE_DEADLINE_S)
    return f"not in {_CLOSE_DEADLINE_S:g} s"


def remove_profile(folder: Path) -> None:
    """Remove a profile, repeatedly, since the last processes of its browser may still write to it."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    logger.warning("cannot remove %s", folder)
