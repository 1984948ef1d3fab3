"""`dart data` is the process or a tool; values on its command line are checked."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_store
from envs.contract.blobs import content_hash
from tests.data.parts import ask_lease, make_ledger, step_record, trajectory_end
from tests.inspection.parts import run


def test_a_configuration_starts_the_process_and_a_command_is_a_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c.toml", "ls"):
        (tmp_path / name).write_text('[run]\ndir = "run"\n')
    for arguments in (
        ["c.toml", "--dry-run"],
        ["--dry-run", "c.toml"],
        ["--set", "run.seed=3", "c.toml", "--dry-run"],
        ["serve", "c.toml", "--dry-run"],
        ["./ls", "--dry-run"],
    ):
        assert run(*arguments) == 0, arguments
        assert "nothing was started" in capsys.readouterr().out
    assert run("ls", "c.toml") == 2
    assert "no run in run yet" in capsys.readouterr().err


def test_help_teaches_the_process_and_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("dart data CONFIG", "./ls", "CONFIG | COMMAND", "collect", "export", "why"):
        assert text in out
    assert run("c.toml", "--help") == 0
    assert "--dry-run" in capsys.readouterr().out
    for tool in ("ls", "show", "stats", "why", "collect", "export", "import"):
        assert run(tool, "--help") == 0
        assert f"dart data {tool}" in capsys.readouterr().out.split("Example:")[1]


def test_a_misspelt_command_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("shwo", "g000001-00") == 2
    assert "did you mean `dart data show`" in " ".join(capsys.readouterr().err.split())
    assert run("nothing.toml") == 2
    assert "no such file: nothing.toml" in capsys.readouterr().err


def test_export_and_import_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate(
        {"run": {"dir": tmp_path / "run"}, "rollout": {"engine": "scripted"}}
    )
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/other"\n[rollout]\nengine = "scripted"\n')
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for slot in range(2):
            lease = ask_lease(ledger, slot)
            ledger.step(step_record(lease.trajectory_id, 0, image=file.getvalue()))
            ledger.end(trajectory_end(lease.trajectory_id, 1, "pass" if slot else "fail"))
        store.commit()
        assert content_hash(file.getvalue()) in store.screenshots([content_hash(file.getvalue())])
        assert run("export", config.run.dir, tmp_path / "out") == 0  # beside a live writer
    assert "2 trajectories, 2 steps" in capsys.readouterr().out
    assert run("export", config.run.dir, tmp_path / "none", "--pool", "--outcome", "fail") == 2
    assert "--pool exports successes only" in capsys.readouterr().err
    assert run("import", path, tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["joined"], told["not_passed"]) == (1, 1)
    assert run("import", path, tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err
