"""The parts of the host that a desktop uses: a locked folder, a display's socket, a user, installed programs.

DesktopNumber          the number of an environment's desktops; makes a fresh folder for each desktop, locked
                       as long as a process has it open
remove_stale_folders   removes folders whose owner and keeper were both killed
remove_folder          removes one folder, whose processes are dying
display_socket         returns the socket where an X server listens
remove_display         removes the socket of an X server that was killed
environment            returns the environment variables of a desktop's programs
find_programs          checks that programs are installed
find_user              returns the user that runs the programs
give                   makes that user the owner of files
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import pwd
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bus.errors import MissingPartError, TaskError

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"
logger = logging.getLogger(__name__)

HALF_DONE_S = 60.0  # seconds after which a folder without a lock is removed
FOLDER_PREFIX = "dart-desktop-"
_LOCK = "dart.lock"

_numbers_in_use: set[int] = set()  # by the environments of this process
_numbering = threading.Lock()


def find_user(name: str) -> tuple[int, int]:
    """Return the (user id, group id) with which programs run.

    They are this process's own, or the ids of the user `name` if this process is root. Raises TaskError.
    """
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise TaskError(f"no user {name!r} on this host; set env.options.user to one") from None
    if entry.pw_uid == 0:
        raise TaskError("applications do not run as root; set env.options.user to another user")
    return entry.pw_uid, entry.pw_gid


def environment(folder: Path, number: int, bus: Path, accessible: bool) -> dict[str, str]:
    """Return the environment variables of a desktop's programs; none is copied from this process."""
    return {
        "HOME": str(folder / "home"),
        "PATH": PATH,
        "DISPLAY": f":{number}",
        "XAUTHORITY": str(folder / "Xauthority"),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={bus}",
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "XDG_CURRENT_DESKTOP": "openbox",
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "GSETTINGS_BACKEND": "keyfile",  # settings are a text file that is written at once
        "GIO_USE_VFS": "local",
        "NO_AT_BRIDGE": "0" if accessible else "1",
        "SAL_USE_VCLPLUGIN": "gtk3",
    }


def find_programs(programs: Mapping[str, str]) -> None:
    """Raise MissingPartError if one of `programs` (name -> apt package) is not installed."""
    missing = {
        package for name, package in programs.items() if shutil.which(name, path=PATH) is None
    }
    if missing:
        raise MissingPartError(
            f"programs of suite desktop are not installed: apt install {' '.join(sorted(missing))}"
        )


def remove_stale_folders() -> None:
    """Remove the folders of desktops whose owner and keeper were both killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            with suppress(OSError):  # being made or removed, or its maker died meanwhile
                if time.time() - folder.stat().st_mtime > HALF_DONE_S:
                    shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (folder / _LOCK).stat()):
                shutil.rmtree(folder, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            pass  # in use, or removed meanwhile and perhaps made again
        finally:
            os.close(lock)


class DesktopNumber:
    """The number of one environment's desktops: the lowest free one, and the same at each reset.

    It is part of their folders' names: applications show the paths of their files, and screens must be
    repeatable. No other environment of this process takes the number between two desktops; one of another
    process may.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def make_folder(self) -> tuple[Path, int]:
        """Return a fresh folder and its lock, which is released when no process has it open."""
        with _numbering:
            last_number = self._number
            self._leave()
            first = () if last_number is None else (last_number,)
            for number in itertools.chain(first, itertools.count()):
                if number in _numbers_in_use:
                    continue
                if (folder_and_lock := _make_folder(number)) is not None:
                    self._number = number
                    _numbers_in_use.add(number)
                    return folder_and_lock
        raise AssertionError("numbers do not end")

    def leave(self) -> None:
        """Release the number; may be called twice."""
        with _numbering:
            self._leave()

    def _leave(self) -> None:
        if self._number is not None:
            _numbers_in_use.discard(self._number)
        self._number = None


def _make_folder(number: int) -> tuple[Path, int] | None:
    """Return a folder and its lock; None if the folder is in use."""
    folder = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{number}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return None
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (folder / _LOCK).exists():
        return folder, lock
    os.close(lock)  # another process removed it as stale before it was locked
    return None


def remove_folder(folder: Path) -> None:
    """Remove a folder into which dying processes may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    logger.warning("cannot remove %s", folder)


def display_socket(number: int) -> Path:
    """Return the socket where the X server of display `number` listens."""
    return Path(f"/tmp/.X11-unix/X{number}")  # noqa: S108 - its place is fixed


def remove_display(number: int, dying_s: float) -> None:
    """Remove the socket of an X server that was killed, unless another server listens there now.

    A killed server may keep the socket for up to `dying_s` seconds.
    """
    place = display_socket(number)
    until = time.monotonic() + dying_s
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(place))
            except ConnectionRefusedError:
                place.unlink(missing_ok=True)
                return
            except OSError:
                return  # the socket is gone
        if time.monotonic() > until:
            return
        time.sleep(0.01)


def give(path: Path, uid: int, gid: int) -> None:
    """Make a user the owner of a file, or of a folder with all its contents, if this process is root."""
    if os.geteuid() != 0:
        return
    for place in (path, *path.rglob("*")):
        os.chown(place, uid, gid, follow_symlinks=False)
