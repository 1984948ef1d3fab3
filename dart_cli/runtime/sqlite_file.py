"""A file of SQLite: one connection whose failures are one line with the cure.

SqliteFile   rows, and transactions that are whole or absent
connect      a connection to a file that is told in errors
explain      a failure of SQLite as a StoreError: file, fault and cure
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
"""How long a connection waits for another's lock before it is a StoreError."""

Mode = Literal["ro", "rwc"]
"""Read alone, or write, and begin the file if it is not there."""


class SqliteFile:
    """One connection to a file. Use as a context manager, or call `close`; from one thread."""

    damaged = "move the file away"
    """The cure for a file that is damaged, or not what it should be."""

    def __init__(self, path: Path, mode: Mode) -> None:
        self._path = path
        self._connection = connect(path, mode, damaged=self.damaged)
        self._connection.row_factory = sqlite3.Row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the file."""
        self._connection.close()

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise explain(self._path, error, damaged=self.damaged) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that the block writes, or nothing; no other writer is let in between."""
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
    """Return a connection, which `threads` may share in turn; transactions are begun and ended by its user alone."""
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
    """Return the cure where SQLite cannot open a file, for which it gives no reason."""
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
    """Return the error for a failure of SQLite; `damaged` is the cure where the file is no longer one of ours."""
    text = str(error).lower()
    if "disk is full" in text:
        cure = "free space on its disk and start again; nothing acknowledged is lost"
    elif "disk i/o" in text:
        cure = (
            "free space on its disk and start again, or use another disk if this one fails; nothing "
            "acknowledged is lost"
        )
    elif "readonly" in text:
        cure = "make the file and its directory writable for this user"
    elif "unable to open" in text:
        cure = _how_to_open(path)
    elif "locked" in text:
        cure = "another program holds it open for writing; close that program"
    elif "malformed" in text or "not a database" in text or "corrupt" in text:
        cure = f"the file is damaged: {damaged}"
    elif "no such table" in text or "no such column" in text:
        cure = f"its tables are not dart's: {damaged}"
    else:
        cure = "see the log"
    return StoreError(f"{path}: {error}; {cure}")
