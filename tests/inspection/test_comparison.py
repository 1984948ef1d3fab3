"""What tells runs apart: keys whose values differ, and a note that is read from the run's folder alone."""

from __future__ import annotations

from pathlib import Path

from dart_cli.data.store.rows import BatchRow
from dart_cli.inspection.axes import Places
from dart_cli.inspection.comparison import (
    MAX_NOTE_BYTES,
    NO_SETTING,
    read_note,
    settings_that_differ,
)


def test_settings_that_differ_are_dotted_keys_and_a_run_s_place_is_none() -> None:
    one = {
        "run": {"dir": "a", "seed": 0},
        "env": {"suite": "mini", "tasks": ["x", "y"], "judge": {"use": "check"}},
        "train": {"lr": 1e-4, "name": ""},
    }
    other = {
        "run": {"dir": "b", "seed": 0},
        "env": {"suite": "mini", "tasks": ["x"], "judge": {"use": "missing"}},
        "train": {"lr": 0.0001, "name": "true"},
        "old": {"key": True},
    }
    assert settings_that_differ([one, other, one]) == {
        "env.judge.use": ["check", "missing", "check"],
        "env.tasks": ['["x", "y"]', '["x"]', '["x", "y"]'],
        "old.key": [NO_SETTING, "true", NO_SETTING],
        "train.name": ['""', "true", '""'],
    }
    assert settings_that_differ([one]) == settings_that_differ([]) == {}


def test_a_note_is_the_text_of_the_run_s_own_file_and_bounded(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    assert read_note(run) == ""
    secret.write_text("secret")
    (run / "notes.md").symlink_to(secret)
    assert read_note(run) == ""
    (run / "notes.md").unlink()
    (run / "notes.md").write_bytes("  größer\n\xff".encode("latin-1"))
    assert read_note(run) == "gr\ufffd\ufffder\n\ufffd"
    (run / "notes.md").write_text("x" * 2 * MAX_NOTE_BYTES)
    assert read_note(run) == "x" * MAX_NOTE_BYTES + " ..."


def batch(number: int, version: int | None, run_s: float, trajectories: int) -> BatchRow:
    return BatchRow(
        id=number,
        state="trained" if version else "batched",
        formed_at=1e9 + 2 * run_s,  # with a pause as long as the training
        formed_version=0,
        temperature=1.0,
        reward=0.0,
        trained_version=version,
        run_s=run_s,
        trajectories=trajectories,
    )


def test_a_version_stands_where_its_batch_was_formed_in_minutes_served_and_trajectories() -> None:
    batches = [
        batch(1, 1, 60, 100),
        batch(
            2, 3, 150, 400
        ),  # its weights were lost with a trainer, and made again by the next batch
        batch(3, 3, 180, 500),
        batch(4, None, 300, 900),
    ]
    by_version, by_trajectories, by_minutes = (
        Places(axis, batches) for axis in ("version", "trajectories", "minutes")
    )
    versions = (0, 0.5, 1, 2, 3, 7)
    assert [by_version.of_version(each) for each in versions] == [0, 0.5, 1, 2, 3, 3]
    assert [by_trajectories.of_version(each) for each in versions] == [0, 50, 100, 300, 500, 500]
    assert [by_minutes.of_version(each) for each in versions] == [0, 0.5, 1, 2, 3, 3]
    assert [by_minutes.of_batch(each) for each in (1, 2, 3, 4)] == [1, 2.5, 3, None]
    assert Places("minutes", []).of_version(5) == 0
