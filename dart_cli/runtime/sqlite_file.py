"""An SQLite file: one connection whose failures become one line with the fix.

SqliteFile   reads rows, and writes in transactions
connect      opens a connection
explain      turns a failure of SQLite into a StoreError with file, fault and fix
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

from bus.errors import StoreError

BUSY_TIMEOUT_S = 20.0
"""Seconds for which a connection waits for another one's lock before it raises StoreError."""

Mode = Literal["ro", "rwc"]
"""The mode in which a file is opened: `ro` only reads; `rwc` also writes, and creates a missing file."""


class SqliteFile:
    """One connection to a file, for one thread. Use it as a context manager, or call `close`."""

    damaged = "move the file away"
    """The fix for a file that is damaged, or has other tables than expected."""

    def __init__(self, path: Path, mode: Mode) -> None:
        self._path = path
        self._connection = connect(path, mode, damaged=self.damaged)
        self._connection.row_factory = sqlite3.Row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Return the rows of a query. Raises StoreError."""
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise explain(self._path, error, damaged=self.damaged) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what the block writes, or nothing if it raises. Other writers wait. Raises StoreError."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise explain(self._path, error, damaged=self.damaged) from error


def connect(
    path: Path, mode: Mode, *, threads: bool = False, damaged: str = ""
) -> sqlite3.Connection:
    """Return a connection to a file, whose user begins and ends all transactions.

    `threads` allows several threads to use it in turn. `damaged` is the fix for a damaged file. Raises
    StoreError.
    """
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_TIMEOUT_S,
            check_same_thread=not threads,
        )
    except sqlite3.Error as error:
        raise explain(path, error, damaged=damaged) from None


def _how_to_open(path: Path) -> str:
    """Return the fix for a file that SQLite cannot open; SQLite itself gives no reason."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path.parent, os.W_OK | os.X_OK) or (
        path.exists() and not os.access(path, os.R_OK | os.W_OK)
    ):
        return "make the file and its directory writable for this user"
    if not path.exists():
        return "there is no such file"
    return "this process may have too many open files: raise `ulimit -n`"


def explain(path: Path, error: Exception, *, damaged: str = "") -> StoreError:
    """Return the error for a failure of SQLite; `damaged` is the fix for a damaged or foreign file."""
    text = str(error).lower()
    if "disk is full" in text:
        fix = "free space on its disk and start again; nothing acknowledged is lost"
    elif "disk i/o" in text:
        fix = (
            "free space on its disk and start again, or use another disk if this one fails; nothing "
            "acknowledged is lost"
        )
    elif "readonly" in text:
        fix = "make the file and its directory writable for this user"
    elif "unable to open" in text:
        fix = _how_to_open(path)
    elif "locked" in text:
        fix = "another program holds it open for writing; close that program"
    elif "malformed" in text or "not a database" in text or "corrupt" in text:
        fix = f"the file is damaged: {damaged}"
    elif "no such table" in text or "no such column" in text:
        fix = f"its tables are not dart's: {damaged}"
    else:
        fix = "see the log"
    return StoreError(f"{path}: {error}; {fix}")
