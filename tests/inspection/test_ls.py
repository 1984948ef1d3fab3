"""`dart data ls` lists the trajectories that match, of the run or of its pool."""

from __future__ import annotations

import json

import pytest

from tests.inspection.parts import Played, run


def test_ls_lists_what_fits(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*arguments: object) -> list[str]:
        assert run("ls", played.config.run.dir, "--json", *arguments) == 0
        return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]

    everything = ids()
    assert everything == [row.id for row in played.store.trajectories()]
    assert ids("--limit", 2) == everything[-2:]
    assert ids("--reason", "all_success") == [f"{played.solved}-0{i}" for i in range(4)]
    assert ids("--state", "trained", "--outcome", "pass") == [
        f"{played.mixed}-00",
        f"{played.mixed}-03",
    ]
    tasks = {row.task_id for row in played.store.groups()}
    assert sorted(each for task in tasks for each in ids("--task", task)) == sorted(everything)
    assert run("ls", played.config.run.dir, "--task", "mini/clik") == 2
    assert "did you mean 'mini/click'" in capsys.readouterr().err


def test_ls_is_a_table_that_names_what_it_leaves_out(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", played.config.run.dir, "--limit", 3) == 0
    out = capsys.readouterr().out
    assert played.playing in out
    assert f"{played.mixed}-00" not in out
    assert "the newest 3 that fit; --limit shows more" in out
    assert run("ls", played.config.run.dir, "--pool") == 0
    pool = capsys.readouterr().out
    assert "oracle" in pool
    assert "unknown" in pool
    assert f"{played.solved}-00" in pool
    assert run("ls", played.config.run.dir, "--pool", "--outcome", "pass") == 2
