"""`dart data stats` adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_store
from dart_cli.data.store.reader import Reader
from dart_cli.inspection.counts import counts_json
from tests.data.parts import pool_member
from tests.inspection.parts import Played, run


def test_stats_add_up(played: Played, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", played.config.run.dir, "--json") == 0
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
    assert run("stats", played.config.run.dir) == 0
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
