"""The doctor reports mistakes with their fixes, and returns an exit code for scripts."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from dart_cli.config import devices
from dart_cli.data.store.open import open_store
from dart_cli.doctor import machine
from dart_cli.runtime.run_dir import save_config
from tests.doctor.parts import config_in, doctor
from tests.env.unruly_suite import SUITE as UNRULY
from tests.stopping import signal_in


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


def test_an_episode_that_hangs_and_is_stopped_leaves_the_findings_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n[env]\nsuite = "{UNRULY}"\n'
        'tasks = ["unruly/reset-hang"]\n'
    )
    signal_in(monkeypatch, "doctor/0 to reset unruly/reset-hang", signal.SIGTERM)
    assert doctor(path, "--play", "--json") == 143
    printed, text = capsys.readouterr()
    result = json.loads(printed)["findings"]
    assert result[0]["subject"] == "config"
    assert result[-1]["subject"] == "episode"
    assert result[-1]["text"].startswith("stopped after ")
    assert "it had waited 0 s for doctor/0 to reset unruly/reset-hang" in text


def test_every_mistake_of_a_configuration_is_printed_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[env]\ntasks = ["mini/clik"]\n'
        '[model]\npath = "nowhere"\n[eval]\ntasks = ["mini/x"]\n'
    )
    assert doctor(path) == 1
    out = capsys.readouterr().out
    for part in ("mini/clik", "is no folder: nowhere", "hf download", "eval.tasks"):
        assert part in out
    assert "3 things must be fixed first" in out


def test_a_missing_gpu_is_told_once_with_every_key_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a 7B whose folder is not here is planned by its published shape."""
    monkeypatch.setattr(devices, "_host_gpus", lambda: 0)
    monkeypatch.setattr(machine, "list_gpus", lambda: ([], ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = Path(__file__).parents[2] / "configs" / "ui-tars-7b.toml"
    assert doctor(path, "--json", "--set", f"run.dir={tmp_path / 'run'}") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    errors = {each["subject"]: each["text"] for each in findings if each["level"] == "error"}
    errors.pop("rollout.engine", None)  # where vLLM is not installed
    assert errors.keys() == {"gpu", "model.path"}
    assert errors["gpu"] == (
        'none, and the run asks for some: rollout.device = "cuda", train.device = "cuda", '
        "up.train_gpus = [0, 1, 2, 3, 4, 5], up.rollout_gpus = [6, 7]"
    )
    plans = [each["text"] for each in findings if each["subject"] == "plan"]
    assert plans[0].startswith("plan for: the published shape of UI-TARS-1.5-7B, as ")
    assert any("trainer: 6 ranks, each 50.7 GB of 85.5 GB" in each for each in plans)


def test_a_run_directory_is_examined_as_a_run_and_not_as_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path, rollout={"engine": "scripted"})
    with open_store(config.run.dir):
        save_config(config)
    assert doctor(config.run.dir, "--play", "--json") == 0
    result = {each["subject"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {"config", "run directory", "disk", "tasks", "episode"} <= result


@pytest.mark.parametrize("content", ["[run]\nder = 3\n", "not toml"])
def test_a_file_that_is_no_configuration_is_an_error_and_the_host_is_examined_all_the_same(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(content)
    assert doctor(path) == 1
    out = capsys.readouterr().out
    assert out.startswith("error    config")
    assert "open files" in out


def test_an_episode_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--play") == 2
    assert "--play needs a run; add its TOML file" in capsys.readouterr().err


def test_an_environment_that_breaks_is_an_error_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "broken.py"
    suite.write_text(
        "from bus.errors import EnvError\n"
        "from envs.contract.base import Task\n"
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
