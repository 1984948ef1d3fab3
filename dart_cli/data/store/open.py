"""Open the run's database for reading or writing.

    open_reader   returns a Reader; a writer may be live
    open_store    returns the Store, of which there is one for each run directory

The database is `run.db`. While a Store is open, `data.lock` is locked and contains its process.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.writer import Store

DATABASE = "run.db"
LOCK = "data.lock"


def open_store(run_dir: Path) -> Store:
    """Open the run's database for writing, and create it if there is none.

    Raises RunDirectoryError if another process writes to it or its schema is not this dart's, StoreError if
    it is damaged or cannot be written.
    """
    make_private_dir(run_dir)
    lock = _take_lock(run_dir)
    try:
        return Store(run_dir / DATABASE, lock)
    except BaseException:
        os.close(lock)
        raise


def open_reader(run_dir: Path) -> Reader:
    """Open the run's database for reading; a live `dart data` is not disturbed.

    Raises RunDirectoryError if there is no run or its schema is not this dart's, StoreError if it
    is damaged.
    """
    path = run_dir / DATABASE
    if not path.is_file():
        raise RunDirectoryError(f"no run in {run_dir}: {DATABASE} is missing; start `dart data`")
    return Reader(path)


def _take_lock(run_dir: Path) -> int:
    """Lock the run directory, and return the file descriptor that holds the lock until it is closed."""
    path = run_dir / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise RunDirectoryError(
            f"{run_dir} is in use by another `dart data`, process {holder}; "
            "stop it, or choose another run.dir"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
    return handle
