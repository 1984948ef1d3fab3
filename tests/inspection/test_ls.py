"""`dart data ls` lists the trajectories that match, of the run or of its pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_store
from tests.data.parts import ask_lease, make_ledger, play_group, small_config, trajectory_end
from tests.inspection.parts import PlayedRun, run


def test_ls_lists_what_fits(run_content: PlayedRun, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*arguments: object) -> list[str]:
        assert run("ls", run_content.config.run.dir, "--json", *arguments) == 0
        return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]

    everything = ids()
    assert everything == [row.id for row in run_content.store.trajectories()]
    assert ids("--limit", 2) == everything[-2:]
    assert ids("--reason", "all_success") == [f"{run_content.solved}-0{i}" for i in range(4)]
    assert ids("--state", "trained", "--outcome", "pass") == [
        f"{run_content.mixed}-00",
        f"{run_content.mixed}-03",
    ]
    tasks = {row.task_id for row in run_content.store.groups()}
    assert sorted(each for task in tasks for each in ids("--task", task)) == sorted(everything)
    assert run("ls", run_content.config.run.dir, "--task", "mini/clik") == 2
    assert "did you mean 'mini/click'" in capsys.readouterr().err


def test_ls_is_a_table_that_names_what_it_leaves_out(
    run_content: PlayedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", run_content.config.run.dir, "--limit", 3) == 0
    out = capsys.readouterr().out
    assert run_content.playing in out
    assert f"{run_content.mixed}-00" not in out
    assert "the newest 3 that match; --limit shows more" in out
    assert run("ls", run_content.config.run.dir, "--pool") == 0
    pool = capsys.readouterr().out
    assert run("ls", run_content.config.run.dir, "--pool", "--json") == 0
    members = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {f"{run_content.solved}-00"} <= {member["id"] for member in members}
    assert {member["task_id"] for member in members} >= {"mini/click", "mini/popup"}
    assert "oracle" in pool
    assert "unknown" in pool
    assert f"{run_content.solved}-00" in pool
    assert run("ls", run_content.config.run.dir, "--pool", "--outcome", "pass") == 2


def test_what_the_end_of_a_run_cancelled_is_listed_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        group = play_group(ledger, ["pass"] * 4)
        lease = ask_lease(ledger, 0)
        ledger.end(trajectory_end(lease.trajectory_id, 0, "invalid", "cancelled"))
        store.commit()

    def ids(*options: object) -> tuple[list[str], str]:
        assert run("ls", config.run.dir, "--json", *options) == 0
        out, err = capsys.readouterr()
        return [json.loads(line)["id"] for line in out.splitlines()], err

    judged = [f"{group}-0{index}" for index in range(4)]
    listed, note = ids("--limit", 4)
    assert listed == judged
    assert "1 cancelled" in note
    assert "--reason cancelled" in note
    for asked in (["--reason", "cancelled"], ["--outcome", "invalid"]):
        assert ids(*asked) == ([lease.trajectory_id], "")
    assert lease.trajectory_id in ids("--state", "dropped")[0]
    assert run("ls", config.run.dir) == 0
    assert "--reason cancelled" in capsys.readouterr().out
