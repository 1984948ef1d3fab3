"""A run directory: a worker's name is its own, and the configuration of the run is remembered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bus.errors import ConfigError, RunDirectoryError
from dart_cli.config.schema import Config
from dart_cli.runtime.run_dir import claim, read_run, save_config
from dart_cli.train.checkpoint import TrainerProgress, save


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run of its own."""
    (tmp_path / "run").mkdir(mode=0o700)
    return Config.model_validate({"run": {"dir": tmp_path / "run"}})


def test_worker_names_count_up_and_are_given_back(config: Config) -> None:
    with claim(config, "env") as first, claim(config, "env") as second:
        assert (first, second) == ("env-0", "env-1")
    with claim(config, "env") as again:
        assert again == "env-0"


def test_a_name_in_use_is_refused_with_its_pid(config: Config) -> None:
    with (
        claim(config, "data") as name,
        pytest.raises(RunDirectoryError, match=rf"data is running already.*pid {os.getpid()}"),
        claim(config, "data"),
    ):
        assert name == "data"


@pytest.mark.parametrize("name", ["data", "train", "up"])
def test_the_name_of_a_process_that_a_run_has_once_is_no_other_s(config: Config, name: str) -> None:
    refused = pytest.raises(ConfigError, match=f"the run's one {name} process: use e.g. env-0")
    with refused, claim(config, "env", name):
        pass
    with claim(config, name) as its:
        assert its == name
    with claim(config, "env", f"{name}-0") as near:
        assert near == f"{name}-0"


def test_the_name_of_a_killed_process_is_free_again(config: Config) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from dart_cli.config.schema import Config\nfrom dart_cli.runtime.run_dir import claim\n"
        "config = Config.model_validate({'run': {'dir': Path(sys.argv[1])}})\n"
        "with claim(config, 'train') as name:\n    print(name, flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(config.run.dir)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "train\n"
    with pytest.raises(RunDirectoryError), claim(config, "train"):
        pass
    child.kill()
    child.communicate()
    with claim(config, "train") as name:
        assert name == "train"


def test_processes_of_several_hosts_have_names_with_their_host(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path}, "bus": {"transport": "tcp"}})
    with claim(config, "env") as name:
        assert name.startswith("env-")
        assert name.endswith("-0")
        assert len(name) > len("env-0")


def test_a_run_directory_remembers_its_configuration_wherever_it_moves(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(Config.model_validate({"run": {"dir": run_dir, "seed": 7}}))
    moved = run_dir.rename(tmp_path / "moved")
    assert read_run(moved).run.seed == 7
    assert read_run(moved).run.dir == moved


def test_a_changed_configuration_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path}})
    save_config(config)
    changed = config.model_copy(update={"train": config.train.model_copy(update={"lr": 0.5})})
    save_config(changed)
    assert "train.lr was 1e-06 at the run's last start, is 0.5 now" in caplog.text


ANOTHER = {"model": {"path": "builtin:miniwob"}, "policy": {"codec": "uitars"}}


@pytest.mark.parametrize("key", ["model.path", "policy.codec"])
def test_another_model_is_refused_once_there_is_a_checkpoint(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = key.partition(".")[0]
    run_dir = {"run": {"dir": tmp_path}}
    one, other = (
        Config.model_validate(run_dir | more) for more in ({}, {section: ANOTHER[section]})
    )
    save_config(one)
    save_config(other)
    assert f"{key} was " in caplog.text
    save(tmp_path / "checkpoints", TrainerProgress(updates=1), {"w": torch.zeros(1)}, {}, keep=1)
    save_config(other)
    with pytest.raises(
        ConfigError, match=rf"{key} = .* choose another run\.dir, or set"
    ) as refused:
        save_config(one)
    assert refused.value.exit_code == 2
    assert read_run(tmp_path) == other


def test_another_way_to_write_the_models_path_is_the_same_model(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", TrainerProgress(updates=1), {"w": torch.zeros(1)}, {}, keep=1)
    for path in ("models/a", str(Path.cwd() / "models" / "a"), "models/./a/"):
        save_config(Config.model_validate({"run": {"dir": tmp_path}, "model": {"path": path}}))
