"""A run directory has one writer; what cannot be opened is an error with its cure."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.data.store import connection
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.runtime.sqlite_file import explain


def test_a_second_writer_is_refused_with_the_holder_of_the_run(run_dir: Path) -> None:
    with open_store(run_dir), pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        open_store(run_dir)
    open_store(run_dir).close()


def test_the_run_directory_is_private(run_dir: Path) -> None:
    open_store(run_dir).close()
    assert run_dir.stat().st_mode & 0o077 == 0


def test_no_run_is_an_error_that_names_what_to_start(run_dir: Path) -> None:
    with pytest.raises(RunDirectoryError, match="start `dart data`"):
        open_reader(run_dir)


def test_a_directory_without_permission_is_an_error_that_names_it(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "data.lock").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        open_store(run_dir)


def test_why_a_database_cannot_be_opened_is_found_out(tmp_path: Path) -> None:
    fault = sqlite3.OperationalError("unable to open database file")
    assert "there is no folder" in str(explain(tmp_path / "away" / "run.db", fault))
    assert "there is no such file" in str(explain(tmp_path / "run.db", fault))
    (tmp_path / "run.db").touch()
    assert "too many open files" in str(explain(tmp_path / "run.db", fault))


def test_the_log_of_a_long_reader_shrinks_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST_WAL_MIB", 1)
    with open_store(run_dir) as store:
        wal = store.path.with_name(f"{store.path.name}-wal")
        store._write("CREATE TABLE more (a)")
        with open_reader(run_dir) as reader:
            reader._connection.execute("BEGIN")
            reader._rows("SELECT * FROM runs")
            for _ in range(4):
                store._write("INSERT INTO more VALUES (zeroblob(1000000))")
                store.commit()
            assert wal.stat().st_size > 2**21
        store.checkpoint()
        store._write("INSERT INTO more VALUES (1)")
        store.commit()
        assert wal.stat().st_size <= 2**20
