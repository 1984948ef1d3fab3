"""A run directory: a worker's name is its own, and the configuration of the run is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import ConfigError, RunDirectoryError
from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.run_dir import (
    IDENTITY,
    claim,
    leave_end,
    leave_error,
    leave_signal,
    read_run,
    refuse_another_run,
    refuse_live,
    save_config,
)


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


def test_a_name_keeps_how_its_process_ended(config: Config) -> None:
    def left() -> tuple[bool, str]:
        [process] = workers_of(config.run.dir)
        return process.is_ended, process.error

    with claim(config, "train"):
        assert left() == (False, "")
        with pytest.raises(RunDirectoryError, match=f"train is running already.*pid {os.getpid()}"):
            refuse_live(config.run.dir)
        leave_end(config.run.dir, "train")
    assert left() == (True, "")
    refuse_live(config.run.dir)
    assert left() == (True, "")
    with claim(config, "train"):
        leave_error(config.run.dir, "train", "no\nroom")
    assert left() == (False, "no room")
    leave_signal(config.run.dir, "train", 9)  # it had left an error before
    assert left() == (False, "no room")
    leave_end(config.run.dir, "train")
    assert left() == (False, "no room")
    with claim(config, "train"):
        pass  # as of a process that is killed
    assert left() == (False, "")
    leave_signal(config.run.dir, "train", 9)
    leave_signal(config.run.dir, "no-such-process", 9)
    assert left() == (False, "killed by signal 9")
    with claim(config, "train"):
        assert left() == (False, "")


def test_processes_of_several_hosts_have_names_with_their_host(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path}, "bus": {"host": "127.0.0.1"}})
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


def test_a_run_whose_configuration_has_an_unknown_key_is_of_another_version(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path, "seed": 7}})
    save_config(config)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    stored["tune"]["no_such_key"] = 3
    path.write_text(json.dumps(stored))
    with pytest.raises(RunDirectoryError, match="another version"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", "{", '{"run": 3}'])
def test_what_is_no_configuration_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"no readable config\.json"):
        read_run(tmp_path)


def test_a_changed_configuration_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path}, "train": {"lr": 1e-6}})
    save_config(config)
    changed = config.model_copy(update={"train": config.train.model_copy(update={"lr": 0.5})})
    save_config(changed)
    assert "train.lr was 1e-06 at the run's last start, is 0.5 now" in caplog.text


ANOTHER = {
    "env.suite": "desk",
    "model.path": "builtin:small",
    "policy.action_parser": "uitars",
    "policy.coordinates": "thousand",
}


@pytest.mark.parametrize("key", IDENTITY)
def test_another_suite_or_model_is_refused_without_force(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section, _, name = key.partition(".")
    one = Config.model_validate({"run": {"dir": tmp_path}})
    other = Config.model_validate({"run": {"dir": tmp_path}, section: {name: ANOTHER[key]}})
    refuse_another_run(other)  # there is no run yet
    save_config(one)
    for refused in (refuse_another_run, save_config):
        with pytest.raises(ConfigError, match=rf"^{key} = .* was started with .*--force") as no:
            refused(other)
        assert no.value.exit_code == 2
    assert read_run(tmp_path) == one
    save_config(other, force=True)
    assert f"{key} was " in caplog.text
    assert read_run(tmp_path) == other
    refuse_another_run(other)


def test_other_adapters_are_refused_without_force(tmp_path: Path) -> None:
    one, other, none = (
        Config.model_validate({"run": {"dir": tmp_path}, "model": {"lora": lora}})
        for lora in ({"alpha": 8.0}, {"alpha": 16.0}, None)
    )
    save_config(one)
    refuse_another_run(one)
    for now, line in (
        (other, r"model\.lora\.alpha = 16\.0, but"),
        (none, r"model\.lora is not set"),
    ):
        for refused in (refuse_another_run, save_config):
            with pytest.raises(ConfigError, match=rf"^{line}.* was started.*--force"):
                refused(now)
        assert read_run(tmp_path) == one
    save_config(other, force=True)
    refuse_another_run(other)


def test_another_way_to_write_a_path_is_the_same_model_and_suite(tmp_path: Path) -> None:
    for at in ("models/a", str(Path.cwd() / "models" / "a"), "models/./a/"):
        more = {"model": {"path": at}, "env": {"suite": f"{at}.py:Own"}}
        save_config(Config.model_validate({"run": {"dir": tmp_path}, **more}))
    with pytest.raises(ConfigError, match=r"env\.suite"):
        refuse_another_run(
            Config.model_validate(
                {
                    "run": {"dir": tmp_path},
                    "model": {"path": at},
                    "env": {"suite": "models/a.py:Another"},
                }
            )
        )
