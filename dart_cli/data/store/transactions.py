"""Writing in transactions: opens and migrates the database, commits, gives up.

Transactions   collects writes in one open transaction until `commit`, so that many requests share it

The database is in write-ahead mode. With synchronous=NORMAL a commit survives the death of any
process (kill -9); a loss of power costs at most the commits since the last checkpoint, never the
file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlite_utils import Database

from bus.errors import DartError, RunDirectoryError, StoreError
from dart_cli.data.store.connection import as_dict, explain, made_by_newer, marks
from dart_cli.data.store.migrations import APPLICATION_ID, MIGRATIONS, unknown_steps
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import (
    BatchRow,
    GroupRow,
)

CACHE_MIB = 32


class Transactions(Reader):
    """A Reader whose connection also writes. Holds the run directory's lock until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self._lock = lock
        self.path = path
        self._connection = self._connect("rwc")
        try:
            self._prepare()
            # Moves pages from the log into the database in another thread: see checkpoint.
            self._checkpointer = self._connect("rwc", threads=True)
            self._checkpointing = threading.Lock()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Commit what is written, fold the log into the database, and free the run directory."""
        try:
            if self._connection.in_transaction:
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

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Where the block raises, what it has written is taken back; what came before stays."""
        self._write("SAVEPOINT block")
        try:
            yield
        except BaseException:
            self._write("ROLLBACK TO block")
            raise
        finally:
            self._write("RELEASE block")

    def abandon(self) -> None:
        """Forget everything written since the last commit, and write nothing more."""
        if self._connection.in_transaction:
            self._connection.rollback()
        self._connection.execute("PRAGMA query_only = ON")

    def checkpoint(self) -> None:
        """Move committed pages from the log into the database, as far as readers allow.

        Meant for another thread: it waits for the disk, while the writer goes on.
        """
        with self._checkpointing:
            try:
                self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.ProgrammingError:
                return  # closed while this thread waited
            except sqlite3.Error as error:
                raise explain(self.path, error) from error

    def _prepare(self) -> None:
        """Check that the file is ours and whole, set the modes, bring the schema up to date."""
        try:
            [[mark]] = self._connection.execute("PRAGMA application_id")
            rows = self._connection.execute("SELECT tbl_name FROM sqlite_master")
            # A first start that was cut off leaves the list of steps, made before the first one.
            tables = {name for (name,) in rows} - {MIGRATIONS.migrations_table}
            if tables and mark != APPLICATION_ID:
                raise StoreError(f"{self.path} is not dart's database; choose another run.dir")
            if not tables:
                self._connection.execute("PRAGMA page_size = 8192")
            database = Database(self._connection, execute_plugins=False)
            if newer := unknown_steps(database):
                raise RunDirectoryError(made_by_newer(self.path, newer))
            database.enable_wal()
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA cache_size = -{CACHE_MIB * 1024}")
            # The service moves the log in another thread; this bounds it where that does not run.
            self._connection.execute("PRAGMA wal_autocheckpoint = 8000")
            MIGRATIONS.apply(database)
        except DartError:
            raise
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        self._connection.row_factory = as_dict

    def _insert(self, table: str, row: GroupRow | BatchRow) -> None:
        values = vars(row)
        self._write(
            f"INSERT INTO {table} ({','.join(values)}) VALUES ({marks(list(values))})",  # noqa: S608
            list(values.values()),
        )

    def _write(self, sql: str, values: Sequence[object] = ()) -> int:
        """Execute within the open transaction; the number of rows it changed."""
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            return self._connection.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise explain(self.path, error) from error

    def _write_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(sql, rows)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
