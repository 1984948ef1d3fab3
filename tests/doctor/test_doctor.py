"""The doctor names what is wrong with its cure, and an exit code that scripts can trust."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_store
from dart_cli.doctor import machine, run
from dart_cli.doctor.findings import Finding, guarded, is_healthy, ok, summary
from dart_cli.runtime.role import save_config
from tests.data.parts import make_ledger, play, small_config

GIB = 2**30
CPU: dict[str, object] = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0}
CUDA: dict[str, object] = {"version": "2.13.0", "cuda": "12.8", "gpus": 0}


def doctor(*arguments: object) -> int:
    """The exit code of `dart doctor ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *map(str, arguments)])
    return int(exit_.value.code or 0)


def config_in(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"run": {"dir": folder / "run"}, **sections})


def worst(findings: list[Finding]) -> Finding:
    """The most serious of them."""
    return max(findings, key=lambda each: ("ok", "warning", "error").index(each.level))


# --- the verb -------------------------------------------------------------------------------


def test_a_good_configuration_ends_with_zero_and_an_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n')
    assert doctor(path, "--play", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["healthy"] is True
    found = {each["subject"]: each for each in result["findings"]}
    assert {"python", "packages", "torch", "disk", "tasks", "episode"} <= set(found)
    assert "mini/" in found["episode"]["text"]
    assert "s in the environment" in found["episode"]["text"]
    assert not (tmp_path / "run").exists()


def test_every_mistake_of_a_configuration_is_printed_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[env]\ntasks = ["mini/clik"]\n'
        '[model]\npath = "nowhere"\n[eval]\nseed = 3\n'
    )
    assert doctor(path) == 1
    out = capsys.readouterr().out
    for part in ("mini/clik", "is no folder: nowhere", "hf download", "eval.seed must be >="):
        assert part in out
    assert "3 things must be fixed first" in out


def test_a_run_directory_is_examined_as_a_run_and_not_as_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path, rollout={"engine": "scripted"})
    with open_store(config.run.dir):
        save_config(config)
    assert doctor(config.run.dir, "--play", "--json") == 0
    found = {each["subject"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {"config", "run directory", "disk", "tasks", "episode"} <= found


@pytest.mark.parametrize("content", ["[run]\nder = 3\n", "not toml", None])
def test_a_file_that_is_no_configuration_is_an_error_and_the_host_is_examined_all_the_same(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_text(content)
    assert doctor(path) == 1
    out = capsys.readouterr().out
    assert out.startswith("error    config")
    assert "open files" in out


def test_an_episode_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--play") == 2
    assert "--play needs to know what" in capsys.readouterr().err


def test_an_environment_that_breaks_is_an_error_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "broken.py"
    suite.write_text(
        "from bus.errors import EnvError\n"
        "from envs.base import Task\n"
        "class Env:\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        raise EnvError('the screen stays dark')\n"
        "    def step(self, action): raise NotImplementedError\n"
        "    def evaluate(self): raise NotImplementedError\n"
        "    def close(self): pass\n"
        "class Suite:\n"
        "    name = 'broken'\n"
        "    tasks = {'broken/a': Task('broken/a', 'broken', 'do it', 3)}\n"
        "    def make_env(self): return Env()\n"
    )
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n'
        f'[env]\nsuite = "{suite}:Suite"\n'
    )
    assert doctor(path, "--play") == 1
    assert "the screen stays dark" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(tmp_path: Path) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("two\nlines")

    [found] = guarded("x", broken)
    assert (found.level, found.text) == ("error", "could not be examined: RuntimeError: two lines")
    assert not is_healthy([ok("y", ""), found])
    assert summary([found]) == "1 thing must be fixed first"
    assert summary([ok("y", "")]) == "everything is in order"
    assert summary([Finding("y", "warning", "", "")]) == "it can run; 1 warning"


# --- this host ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "torch", "visible", "needed", "level", "part"),
    [
        ([], CPU, None, False, "ok", "none: the tiny model needs none"),
        ([], CPU, None, True, "error", "none, and the run asks for one"),
        (["H200, 141 GiB"], CPU, None, False, "warning", "install the CUDA build"),
        (["H200, 141 GiB"], CPU, None, True, "error", "install the CUDA build"),
        (["H200, 141 GiB"], CUDA, None, True, "error", "the driver is older"),
        (["H200, 141 GiB"], CUDA, "", True, "error", "unset it"),
        (["H200, 141 GiB"], CUDA | {"gpus": 1}, "0", True, "ok", "torch sees 1 of 1"),
        ([], "exit code 1: no module", None, False, "error", "scripts/setup"),
    ],
)
def test_gpus_are_those_that_torch_sees(
    listed: list[str], torch: Any, visible: str | None, needed: bool, level: str, part: str
) -> None:
    found = worst(list(machine.judge_gpus(listed, torch, visible, needed=needed)))
    assert found.level == level
    findings = list(machine.judge_gpus(listed, torch, visible, needed=needed))
    assert any(part in f"{each.text} {each.cure}" for each in findings)


@pytest.mark.parametrize(
    ("version", "cure"),
    [(None, "is not installed"), ("1.9", "1.9, want >=2.0"), ("2.0", ""), ("2.1rc1", "")],
)
def test_a_package_is_there_within_its_bounds(version: str | None, cure: str) -> None:
    found = list(machine.judge_package(Requirement("numpy>=2.0"), version))
    assert bool(found) == bool(cure)
    assert all(cure in each.text and each.cure == "pip install 'numpy>=2.0'" for each in found)


@pytest.mark.parametrize(
    ("judge", "level"),
    [
        (lambda: machine.judge_shared(64 * 2**20), "warning"),
        (lambda: machine.judge_shared(8 * GIB), "ok"),
        (lambda: machine.judge_files(100, 100), "error"),
        (lambda: machine.judge_files(1024, 1 << 20), "warning"),
        (lambda: machine.judge_files(1024, 1024), "warning"),
        (lambda: machine.judge_files(-1, -1), "ok"),
        (lambda: machine.judge_files(4096, 4096), "ok"),
        (lambda: run.judge_room(GIB, 50, Path("/x")), "error"),
        (lambda: run.judge_room(10 * GIB, 50, Path("/x")), "warning"),
        (lambda: run.judge_room(60 * GIB, 50, Path("/x")), "ok"),
    ],
)
def test_limits_are_judged(judge: Callable[[], Finding], level: str) -> None:
    found = judge()
    assert found.level == level
    assert bool(found.cure) == (level != "ok")


def test_a_program_is_an_error_where_the_suite_plays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(machine.PROGRAMS, "Chromium", (("chromium",), "miniwob", "install it"))
    assert {each.level for each in machine.programs("mini")} == {"ok"}
    for suite, program in (("miniwob", "Chromium"), ("desktop", "Xvfb"), ("osworld", "Docker")):
        found = worst(list(machine.programs(suite)))
        assert (found.subject, found.level) == (program, "error")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = worst([each for each in machine.programs("osworld") if each.subject == "Docker"])
    assert found.level == "error"
    assert "its daemon does not answer: exit code 1: no daemon" in found.text


def test_another_program_is_given_a_deadline() -> None:
    answer, fault = machine.ask([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert answer == ""
    assert "gave no answer in 0 s" in fault
    assert machine.ask(["no-such-program-here"])[1].startswith("no-such-program-here: No such file")


# --- a configuration on it ------------------------------------------------------------------


def test_a_run_directory_is_ours_alone_or_can_be_made(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert {each.level for each in run.directory(config)} <= {"ok", "warning"}
    config.run.dir.mkdir(mode=0o755)
    config.run.dir.chmod(0o755)
    found = worst(list(run.directory(config)))
    assert (found.level, found.cure) == ("error", f"chmod 700 {config.run.dir}")
    config.run.dir.chmod(0o700)
    config.run.dir.rmdir()
    config.run.dir.write_text("")
    assert "is no directory" in worst(list(run.directory(config))).text


def test_an_existing_run_is_reported_live_or_not_and_is_not_disturbed(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play(make_ledger(config, store), 0)
        store.commit()
        assert run.holder(config.run.dir) == str(os.getpid())
        assert "a run is live in it" in next(iter(run.directory(config))).text
    assert run.holder(config.run.dir) == ""
    assert "a run that can be continued" in next(iter(run.directory(config))).text
    (config.run.dir / "run.db").write_bytes(b"no database" * 1000)
    assert next(iter(run.directory(config))).level == "error"
    with (config.run.dir / "data.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the reader holds no lock


def test_a_network_disk_is_refused_for_the_database() -> None:
    assert not list(run.judge_file_system("ext4", Path("/x")))
    [found] = run.judge_file_system("nfs4", Path("/x"))
    assert found.level == "error"
    assert run.file_system(Path("/proc")) == "proc"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_in(tmp_path, bus={"transport": "tcp", "port": min(port, 65000)})
        if port <= 65000:
            [found] = run.ports(config)
            assert found.level == "error"
            assert f"port {port}: Address already in use" in found.text
    [found] = run.ports(config_in(tmp_path))
    assert found.level == "ok"


def test_a_host_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    [found] = run.ports(config_in(tmp_path, bus={"transport": "tcp", "host": "a..b"}))
    assert found.level == "error"
    assert "bus.host a..b, port 7800: it is not a host name" in found.text


def test_a_model_of_an_unknown_user_has_no_size(tmp_path: Path) -> None:
    engine = {"engine": "transformers"}
    config = config_in(tmp_path, model={"path": "~no.such.user/x"}, rollout=engine)
    assert list(run.model(config)) == []


def test_a_model_folder_has_a_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    [found] = run.model(config_in(tmp_path, model={"path": str(tmp_path)}))
    assert (found.level, found.cure) == ("error", "download the whole folder again")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 500], "data_offsets": [0, 0]}})
    content = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(content)
    found, weights = run.model(config_in(tmp_path, model={"path": str(tmp_path)}))
    assert "0.00 billion parameters" in found.text
    assert "3 sets take 0.0 GB" in weights.text
    assert run.judge_weights(15 * GIB, 3, 61 * GIB, tmp_path).level == "ok"
    assert run.judge_weights(15 * GIB, 3, 59 * GIB, tmp_path).level == "error"
