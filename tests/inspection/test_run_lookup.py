"""A run and a trajectory are found by name; a wrong name is one line with the nearest cure."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dart_cli.data.store.rows import DROP_REASONS
from dart_cli.inspection.run_lookup import find_run
from tests.inspection.parts import PlayedRun, run


def test_a_run_is_named_by_directory_or_configuration_or_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("old", "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.db").touch()
        os.utime(tmp_path / "runs" / name / "run.db", (at, at))
    (tmp_path / "c.toml").write_text('[run]\ndir = "runs/old"\n')
    assert find_run(Path("runs/old")) == find_run(Path("c.toml")) == Path("runs/old")
    assert find_run(None) == Path("runs/new")
    for name in ("run.db-shm", "run.db-wal"):  # a reader opened the old one
        (tmp_path / "runs" / "old" / name).touch()
    (tmp_path / "runs" / "old" / "run.db-shm").write_bytes(b"index")
    assert find_run(None) == Path("runs/new")
    (tmp_path / "runs" / "old" / "run.db-wal").write_bytes(b"frames")  # now it is written to
    assert find_run(None) == Path("runs/old")


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("g1-9", "group g000001 has g000001-00 to g000001-03"),
        ("g000001", "group g000001 has g000001-00 to g000001-03"),
        ("g999999-00", "its groups go from g000001 to g0"),
        ("what", "ids look like g0"),
        ("xzz", "`dart data ls --pool` lists its members"),
        ("xa", "the ids of 2 members begin with it"),
    ],
)
def test_a_wrong_id_is_one_line_with_the_nearest_cure(
    wrong: str, cure: str, run_content: PlayedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("show", "why"):
        assert run(tool, wrong, "--run", run_content.config.run.dir) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert cure in err


def test_a_reason_that_nothing_is_dropped_for_is_one_line_with_the_reasons(
    run_content: PlayedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", run_content.config.run.dir, "--reason", "stal") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "did you mean 'stale'" in err
    for reason in DROP_REASONS:
        assert reason in err
    assert run("ls", run_content.config.run.dir, "--reason", "surplus") == 0


def test_every_reason_of_a_drop_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    table = page.partition("| reason of a drop | of | meaning |")[2].partition("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(DROP_REASONS) == sorted(re.findall(r"`(\w+)`", " ".join(first)))


@pytest.mark.parametrize(
    "words", [("show", "\udcff", "--run"), ("ls", "--reason", "\udcff"), ("ls", "--limit", 2**64)]
)
def test_a_value_that_no_database_can_hold_is_one_line(
    words: tuple[object, ...], run_content: PlayedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, run_content.config.run.dir) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_of_exported_successes_is_one_line_with_the_command_that_files_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part-0.parquet").touch()
    for tool in ("ls", "stats", "draw"):
        assert run(tool, tmp_path) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"dart data import CONFIG {tmp_path}" in err
