"""Where the bytes of weight sets lie: in shared memory where it has room, else on disk.

    Storage    the large files of one directory
    room       bytes that shared memory can take

A directory of sets is always on disk, with the manifests, so that versions are known after a
restart of the machine. A file of tensors in it may be a link into a private directory of shared
memory, which belongs to this one directory. What nothing links to any more is swept away with the next
set; the directories of runs that are gone, by whoever makes the next one. A run is not gone whose
process lives, though its directory cannot be seen from here: containers may share memory alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
import weakref
from pathlib import Path

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError

SHARED = Path("/dev/shm")  # noqa: S108 - what is made in it is private
_ORIGIN = "origin"


class Storage:
    """Makes the large files of `home`. One process writes to a directory."""

    def __init__(self, home: Path, *, shared: bool = True) -> None:
        """`shared`: use shared memory where it has room. Raises OSError."""
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        place = _private(home) if shared else None
        self._shared = place[0] if place else None
        self._let_go = weakref.finalize(self, os.close, place[1]) if place else None

    def make(self, file: Path, size_bytes: int) -> Path:
        """Where to write `file`: itself, or a new place in shared memory, to which it links then."""
        if self._shared is None or room() < 2 * size_bytes:
            return file
        target = self._shared / f"{uuid.uuid4().hex}{file.suffix}"
        file.symlink_to(target)
        return target

    def keep(self, file: Path) -> None:
        """Bring a file from shared memory to disk, in one step. Raises OSError."""
        if file.is_symlink() and file.exists():  # memory does not outlive the machine's restart
            draft = file.with_name(f".{file.name}.draft")
            shutil.copyfile(file, draft)
            with draft.open("rb") as handle:
                os.fsync(handle.fileno())
            draft.replace(file)

    def sweep(self) -> None:
        """Free what nothing in `home` links to."""
        if self._shared is None:
            return
        used = {_ORIGIN} | {
            path.readlink().name for path in self._home.glob("**/*") if path.is_symlink()
        }
        for path in self._shared.iterdir():
            if path.name not in used:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free shared memory; links into it lead nowhere then."""
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)
        if self._let_go is not None:
            self._let_go()


def room() -> int:
    """Bytes that shared memory can take: its bound, and the memory that is free."""
    try:
        of_files = shutil.disk_usage(SHARED).free
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            free = next((line for line in lines if line.startswith("MemAvailable:")), "")
        return min(of_files, int(free.split()[1]) * 1024)
    except (OSError, IndexError, ValueError):
        return 0


def _private(home: Path) -> tuple[Path, int] | None:
    """The directory in shared memory that belongs to `home`, and a descriptor that keeps it.

    None where there can be none.
    """
    if not SHARED.is_dir():
        return None
    _sweep_origins()
    try:
        while True:
            path = make_private_dir(SHARED / f"dart-{os.getuid()}-{_key(home)}")
            held = os.open(path / _ORIGIN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_SH)
            if os.fstat(held).st_nlink:  # else somebody has swept it away just now
                break
            os.close(held)
        os.pwrite(held, f"{home.absolute()}\n".encode(), 0)
    except (RunDirectoryError, OSError):
        return None
    return path, held


def _sweep_origins() -> None:
    """Free the memory of directories that nobody holds and that have been removed, or moved."""
    for path in SHARED.glob(f"dart-{os.getuid()}-*"):
        with contextlib.suppress(OSError), (path / _ORIGIN).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = file.readline().rstrip("\n")
            origin = Path(text)
            if text and (not origin.is_dir() or _key(origin) != path.name.split("-", 2)[2]):
                shutil.rmtree(path, ignore_errors=True)


def _key(home: Path) -> str:
    found = home.stat()
    return f"{found.st_dev:x}-{found.st_ino:x}"
