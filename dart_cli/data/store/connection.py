"""A connection to the run's database, and what every query needs.

    Connection     opens the file read-only, checks its schema, returns rows as dicts
    Transactions   a connection that also writes, for the one process that may
    where_clause   makes the WHERE clause of a query
    check_version  refuses a database of another dart

Every failure of SQLite becomes a StoreError with the file and the fix.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from sqlite_utils import Database

from bus.errors import DartError, RunDirectoryError, StoreError, UserError
from dart_cli.runtime import sqlite_file
from dart_cli.runtime.sqlite_file import Mode, connect

APPLICATION_ID = 0x44415254
"""Marks the file as dart's ("DART"), so that no other program's database is written to."""

VERSION = 4
"""Version of the tables, in SQLite's `user_version`. Raise it with every change of a table. A run whose
database has another version can go on only with the dart that began it, or be exported by that dart with
`dart data export`."""

SCHEMA = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")

CACHE_MIB = 32
MOST_WAL_MIB = 128
"""Size to which the write-ahead log is cut back once all of it is in the database."""

Conflict = Literal["", "OR IGNORE", "OR REPLACE"]


class Connection:
    """A read-only connection. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = self._connect("ro")
        try:
            self._check_schema()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _connect(self, mode: Mode, *, threads: bool = False) -> sqlite3.Connection:
        return connect(self.path, mode, threads=threads, damaged=recovery(self.path))

    def _check_schema(self) -> None:
        try:
            [[version]] = self._connection.execute("PRAGMA user_version")
        except sqlite3.Error as error:
            raise explain(self.path, error) from None
        check_version(self.path, version)
        self._connection.row_factory = as_dict

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """Return the rows as dicts. Raises StoreError, or UserError for a value that SQLite cannot hold."""
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        except (OverflowError, UnicodeEncodeError) as error:  # a value from the command line
            raise UserError(f"{self.path} holds no such value: {error}") from None

    def _stream(self, sql: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield rows as tuples, one at a time, for tables of very many rows."""
        try:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            yield from cursor.execute(sql, values)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error


class Transactions(Connection):
    """A connection that also writes. It has the run directory's lock until `close`.

    Writes are collected in one open transaction until `commit`, so that many requests share it. The
    database is in write-ahead mode with synchronous=NORMAL: a commit survives the death of any process
    (kill -9), and a loss of power costs at most the commits since the last checkpoint, never the file.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self._lock = lock
        self._fault: StoreError | None = None  # the first fault; nothing is written after it
        self.path = path
        self._connection = self._connect("rwc")
        try:
            self._prepare()
            # Used by `checkpoint` alone, in another thread.
            self._checkpointer = self._connect("rwc", threads=True)
            self._checkpointing = threading.Lock()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Commit what is written, and release the run directory."""
        try:
            self.commit()
        finally:
            with self._checkpointing:
                self._checkpointer.close()
            self._connection.close()
            os.close(self._lock)

    def commit(self) -> None:
        """Make everything written since the last commit durable, all or nothing."""
        if self._connection.in_transaction:
            self._write("COMMIT")

    def abandon(self, fault: StoreError) -> None:
        """Roll back everything written since the last commit, and write nothing more.

        Every later attempt to write raises the first fault.
        """
        self._fault = self._fault or fault
        if self._connection.in_transaction:
            self._connection.rollback()
        self._connection.execute("PRAGMA query_only = ON")

    def checkpoint(self) -> None:
        """Move committed pages from the log into the database, as far as readers allow.

        Call it in another thread: it waits for the disk while the writer goes on.
        """
        with self._checkpointing:
            try:
                self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.ProgrammingError:
                return  # closed while this thread waited
            except sqlite3.Error as error:
                raise explain(self.path, error) from error

    def _prepare(self) -> None:
        """Check that the file is dart's and whole, set the modes, and make the tables of a new file."""
        try:
            database = Database(self._connection, execute_plugins=False)
            [[mark]] = self._connection.execute("PRAGMA application_id")
            [[version]] = self._connection.execute("PRAGMA user_version")
            tables = database.table_names()
            if tables and mark != APPLICATION_ID:
                raise StoreError(f"{self.path} is not dart's database; choose another run.dir")
            if tables:
                check_version(self.path, version)
            else:
                self._connection.execute("PRAGMA page_size = 8192")
            self._connection.execute("PRAGMA journal_mode = WAL").fetchall()
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA cache_size = -{CACHE_MIB * 1024}")
            # The service checkpoints the log in another thread; this bounds the log elsewhere.
            self._connection.execute("PRAGMA wal_autocheckpoint = 8000").fetchall()
            # The log grows while a reader takes minutes, and shrinks again when it has ended.
            self._connection.execute(
                f"PRAGMA journal_size_limit = {MOST_WAL_MIB * 2**20}"
            ).fetchall()
            if not tables:  # pragmas are part of the transaction, so all of it is done or nothing
                database.executescript(
                    f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {VERSION}; COMMIT;"
                )
        except DartError:
            raise
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        self._connection.row_factory = as_dict

    def _insert(self, table: str, *rows: Mapping[str, object], conflict: Conflict = "") -> int:
        """Insert rows with the same columns; return how many were inserted."""
        if not rows:
            return 0
        columns = list(rows[0])
        return self._write_many(
            f"INSERT {conflict} INTO {table} ({','.join(columns)}) "  # noqa: S608
            f"VALUES ({marks(columns)})",
            [list(row.values()) for row in rows],
        )

    def _write(self, sql: str, values: Sequence[object] = ()) -> int:
        """Execute within the open transaction; return the number of rows that it changed."""
        return self._changed(self._connection.execute, sql, values)

    def _write_many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        return self._changed(self._connection.executemany, sql, rows)

    def _changed(self, execute: Callable[..., sqlite3.Cursor], sql: str, values: object) -> int:
        """Execute SQL within the open transaction; return the number of changed rows. Raises StoreError."""
        if self._fault is not None:
            raise StoreError(str(self._fault))
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            return execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise explain(self.path, error) from error


def explain(path: Path, error: Exception) -> StoreError:
    """Return the StoreError for a failure of SQLite, with file, fault and fix in one line."""
    return sqlite_file.explain(path, error, damaged=recovery(path))


def recovery(path: Path) -> str:
    """Return what to do with a database that is damaged."""
    return (
        "put a copy back, choose another run.dir, or save what is readable with "
        f"`sqlite3 {path} .recover | sqlite3 new.db`"
    )


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """Return a row as column -> value; this is a row factory of SQLite."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def where_clause(
    equal: Mapping[str, object | None],
    *,
    version: int | None = None,
    group_ids: Sequence[str] | None = None,
    but_reason: str | None = None,
) -> tuple[str, list[object]]:
    """Return the WHERE clause for columns that must equal the values that are not None, and its parameters.

    `version` must be between the oldest and the newest version that sampled the trajectory; `but_reason`
    leaves out trajectories that were dropped for this reason; only trajectories of `group_ids` match.
    """
    clauses = [f"{column} = ?" for column, value in equal.items() if value is not None]
    values = [value for value in equal.values() if value is not None]
    if version is not None:
        clauses.append("? BETWEEN t.oldest_version AND t.newest_version")
        values.append(version)
    if but_reason is not None:
        clauses.append("t.reason != ?")
        values.append(but_reason)
    if group_ids is not None:
        clauses.append("t.group_id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(list(group_ids)))
    return ("WHERE " + " AND ".join(clauses) if clauses else ""), values


def marks(values: Sequence[object]) -> str:
    """Return question marks for the values of an IN clause."""
    return ",".join("?" * len(values))


def check_version(path: Path, version: int) -> None:
    """Raise RunDirectoryError if a database has other tables than this dart's."""
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise RunDirectoryError(
            f"{path} was written by {age} dart (schema {version}, this one has {VERSION}); go on with "
            "that version, or choose another run.dir"
        )
