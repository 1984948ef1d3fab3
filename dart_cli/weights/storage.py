"""Storage of weight sets: in shared memory if they fit, else on disk.

    Storage              the large files of one directory
    free_shared_memory   bytes that shared memory can take
    atomic_directory     a directory that is complete or absent

A directory of sets is always on disk, with the manifests, so that a restart of the machine loses no version
numbers. A file of tensors in it may be a link into a private directory of shared memory, which belongs to
this one directory. Shared files without a link are removed when the next set is written. Shared directories
of runs that were removed are removed when any process creates the next one. If a process of the run still
lives, its shared directory is kept, even if the run directory is not visible here, since containers may share
nothing but memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError

SHARED = Path("/dev/shm")  # noqa: S108 - what is made in it is private
_ORIGIN = "origin"
_DRAFT = ".draft"


class Storage:
    """The large files of the directory `home`, to which one process writes."""

    def __init__(self, home: Path, *, shared: bool = True) -> None:
        """Create the directory `home`. Use shared memory if `shared` and if that works. Raises OSError."""
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        opened = _private_directory(home) if shared else None
        self._shared = opened[0] if opened else None
        self._release = weakref.finalize(self, os.close, opened[1]) if opened else None

    def make(self, file: Path, size_bytes: int) -> Path:
        """Return the path at which to write: `file`, or one in shared memory to which `file` then links."""
        if self._shared is None or free_shared_memory() < 2 * size_bytes:
            return file
        target = self._shared / f"{uuid.uuid4().hex}{file.suffix}"
        file.symlink_to(target)
        return target

    def keep(self, file: Path) -> None:
        """Copy a file from shared memory to disk, atomically. Raises OSError."""
        if file.is_symlink() and file.exists():  # shared memory is lost when the machine restarts
            draft = file.with_name(f".{file.name}.draft")
            shutil.copyfile(file, draft)
            with draft.open("rb") as handle:
                os.fsync(handle.fileno())
            draft.replace(file)

    def sweep(self) -> None:
        """Remove shared files to which nothing in `home` links."""
        if self._shared is None:
            return
        used = {_ORIGIN} | {
            path.readlink().name for path in self._home.glob("**/*") if path.is_symlink()
        }
        for path in self._shared.iterdir():
            if path.name not in used:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free shared memory; links into it are broken afterwards."""
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)
        if self._release is not None:
            self._release()


def free_shared_memory() -> int:
    """Return the bytes that fit into shared memory: its free space, at most the available memory."""
    try:
        of_files = shutil.disk_usage(SHARED).free
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            free = next((line for line in lines if line.startswith("MemAvailable:")), "")
        return min(of_files, int(free.split()[1]) * 1024)
    except (OSError, IndexError, ValueError):
        return 0


def _private_directory(home: Path) -> tuple[Path, int] | None:
    """Return the directory in shared memory that belongs to `home`, and a descriptor that holds its lock.

    Return None if it cannot be created.
    """
    if not SHARED.is_dir():
        return None
    _sweep_origins()
    try:
        while True:
            path = make_private_dir(SHARED / f"dart-{os.getuid()}-{_key(home)}")
            descriptor = os.open(path / _ORIGIN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:  # else another process has just removed it
                break
            os.close(descriptor)
        os.pwrite(descriptor, f"{home.absolute()}\n".encode(), 0)
    except (RunDirectoryError, OSError):
        return None
    return path, descriptor


def _sweep_origins() -> None:
    """Free the memory of directories that were removed or moved and that no process has locked."""
    for path in SHARED.glob(f"dart-{os.getuid()}-*"):
        with contextlib.suppress(OSError), (path / _ORIGIN).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = file.readline().rstrip("\n")
            origin = Path(text)
            if text and (not origin.is_dir() or _key(origin) != path.name.split("-", 2)[2]):
                shutil.rmtree(path, ignore_errors=True)


def _key(home: Path) -> str:
    status = home.stat()
    return f"{status.st_dev:x}-{status.st_ino:x}"


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a draft directory, which is synced to disk and renamed to `target` at the end of the block.

    If the block raises, or the process dies, `target` does not exist. Drafts of dead processes beside it
    are removed, since only one process writes into the parent directory. The parent directory is made if it
    is missing, but not its own parents, so that a run directory that was moved is not made again. Raises
    OSError, and FileExistsError if `target` exists.
    """
    target.parent.mkdir(exist_ok=True)
    for old in target.parent.glob(f".*{_DRAFT}"):
        shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        raise FileExistsError(f"{target} exists")
    draft = target.parent / f".{target.name}{_DRAFT}"
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            _sync(path)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Force a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
