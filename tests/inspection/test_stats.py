"""`dart data stats` adds up."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.reader import Reader
from dart_cli.inspection.run_counts import count, counts_json, unaccounted
from tests.data.parts import pool_member, small_config
from tests.inspection.parts import PlayedRun, run


def test_stats_add_up(
    run_content: PlayedRun, reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("stats", run_content.config.run.dir, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(json.dumps(counts_json(reader)))
    rows = reader.trajectories()
    assert sum(entry["number"] for entry in result["all"]["states"]) == len(rows)
    assert result["all"]["trajectories"] == len(rows)
    assert sum(fared["trajectories"] for fared in result["tasks"].values()) == len(rows)
    for outcome in ("pass", "fail", "invalid"):
        number = sum(row.outcome == outcome for row in rows)
        assert sum(fared["verdicts"][outcome] for fared in result["tasks"].values()) == number
        assert result["all"]["verdicts"][outcome] == number
    assert sum(n for sources in result["pool"].values() for n in sources.values()) == len(
        reader.pool()
    )
    assert result["tokens"] == sum(
        len(step.sampled.token_ids)
        for name in [*(row.id for row in rows), "x" + "ab" * 16, "x" + "ac" * 16]
        for step in reader.steps(name)
    )
    assert run("stats", run_content.config.run.dir) == 0
    assert "MiB on disk" in capsys.readouterr().out


def test_a_run_that_holds_a_pool_alone_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "run") as store:
        store.add_pool_member(*pool_member("x" + "ab" * 16))
    assert run("stats", tmp_path / "run") == 0
    assert "1 oracle" in capsys.readouterr().out
    assert run("why", "xab", "--run", tmp_path / "run") == 0
    assert "came into the pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "DELETE FROM steps WHERE step = 1 AND trajectory_id = :id",
            "another number of steps stored",
        ),
        ("DELETE FROM batch_samples WHERE step = 1 AND trajectory_id = :id", "each of their steps"),
        ("UPDATE trajectories SET state = 'dropped' WHERE id = :id", "without a reason"),
        (
            "INSERT INTO metrics SELECT 'samples', batch_id, 0, 1 FROM trajectories WHERE id = :id",
            "another number of steps than was planned",
        ),
    ],
)
def test_what_a_run_lost_without_a_reason_is_told(
    fault: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run", high_entropy=0.8, pool_ratio=0.25, max_staleness=4)
    with open_store(config.run.dir) as store:
        PlayedRun(config, store)
        trained = store.trajectories(state="trained")[0].id
        assert not unaccounted(count(store).remainder)
    with closing(sqlite3.connect(config.run.dir / "run.db")) as database:
        assert database.execute(fault, {"id": trained}).rowcount == 1
        database.commit()
    with open_reader(config.run.dir) as reader:
        [line] = unaccounted(count(reader).remainder)
    assert told in line
    assert run("stats", config.run.dir) == 0
    assert f"error: {line}" in " ".join(capsys.readouterr().out.split())
