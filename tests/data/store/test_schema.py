"""Databases of older and newer darts, and of other programs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError, StoreError
from dart_cli.data.store import connection
from dart_cli.data.store.connection import APPLICATION_ID, VERSION
from dart_cli.data.store.open import open_reader, open_store
from tests.data.store.parts import fill


@pytest.mark.parametrize(("version", "age"), [(VERSION - 1, "older"), (VERSION + 1, "newer")])
def test_a_database_of_another_dart_is_one_clear_line_and_stays_as_it_is(
    run_dir: Path, version: int, age: str
) -> None:
    run_dir.mkdir(mode=0o700)
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("CREATE TABLE runs (id TEXT)")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = (run_dir / "run.db").read_bytes()
    for opening in (open_store, open_reader):
        with pytest.raises(RunDirectoryError, match=f"{age} dart.*choose another run.dir") as told:
            opening(run_dir)
        assert told.value.exit_code == 2
        assert "\n" not in str(told.value)
    assert (run_dir / "run.db").read_bytes() == before


def test_another_programs_database_is_left_alone(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("CREATE TABLE diary (text)")
    db.close()
    with pytest.raises(StoreError, match="not dart's database"):
        open_store(run_dir)


def test_a_first_start_that_was_cut_off_is_completed_by_the_next(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(connection, "SCHEMA", "CREATE TABLE runs (id TEXT); CREATE TABLE runs (id);")
        with pytest.raises(StoreError, match="already exists"):
            open_store(run_dir)
    with open_store(run_dir) as store:
        fill(store)
