"""One connection to the run's database, and what every query needs.

Connection     opens the file read-only, checks its schema, returns rows as dicts
explain        a failure of SQLite as a StoreError with file, fault and cure
where_clause   conditions of a query, from what was asked for

Every failure of SQLite is a StoreError that names the file and the cure.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sqlite_utils import Database

from bus.errors import RunDirectoryError, StoreError, UserError
from dart_cli.data.store.migrations import MIGRATIONS, unknown_steps
from dart_cli.runtime import sqlite_file
from dart_cli.runtime.sqlite_file import Mode, connect


class Connection:
    """A read-only connection. Use as a context manager, or call `close`."""

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
        """Free the file."""
        self._connection.close()

    def _connect(self, mode: Mode, *, threads: bool = False) -> sqlite3.Connection:
        return connect(self.path, mode, threads=threads, damaged=recovery(self.path))

    def _check_schema(self) -> None:
        try:
            database = Database(self._connection, execute_plugins=False)
            newer = unknown_steps(database)
            pending = [step.name for step in MIGRATIONS.pending(database)]
        except sqlite3.Error as error:
            raise explain(self.path, error) from None
        self._connection.row_factory = as_dict
        if newer:
            raise RunDirectoryError(made_by_newer(self.path, newer))
        if pending:
            raise RunDirectoryError(
                f"{self.path} is of an older schema (lacks {pending[0]}); "
                "start `dart data` on it once, which brings it up to date"
            )

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        except (OverflowError, UnicodeEncodeError) as error:  # of a word on the command line
            raise UserError(f"{self.path} holds no such value: {error}") from None

    def _each(self, sql: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows without their columns' names, one at a time: for tables of very many rows."""
        try:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            yield from cursor.execute(sql, values)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error


def explain(path: Path, error: Exception) -> StoreError:
    """The StoreError for a failure of SQLite: file, fault and cure in one line."""
    return sqlite_file.explain(path, error, damaged=recovery(path))


def recovery(path: Path) -> str:
    """What to do with a database that is damaged."""
    return (
        "put a copy back, choose another run.dir, or save what is readable with "
        f"`sqlite3 {path} .recover | sqlite3 new.db`"
    )


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """A row factory: column -> value."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def where_clause(
    equal: Mapping[str, object | None],
    *,
    version: int | None = None,
    group_ids: Sequence[str] | None = None,
    but_reason: str | None = None,
) -> tuple[str, list[object]]:
    """The WHERE clause for columns that must equal what is not None, and its values.

    `but_reason` leaves out what was dropped for that reason.
    """
    clauses = [f"{column} = ?" for column, wanted in equal.items() if wanted is not None]
    values = [wanted for wanted in equal.values() if wanted is not None]
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
    """A question mark for each value of an IN clause."""
    return ",".join("?" * len(values))


def made_by_newer(path: Path, steps: Sequence[str]) -> str:
    """The error for a database with schema steps that this dart does not know."""
    return f"{path} was written by a newer dart (schema step {steps[-1]}); use that version"
