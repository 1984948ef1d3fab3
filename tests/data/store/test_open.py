"""A run directory has one writer; what cannot be opened is an error with its cure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.data.store.open import open_reader, open_store


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
