"""`served:FILE.toml`: the tasks of another program; a mistake in the file is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import ConfigError, MissingPartError, TaskError
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config
from envs.contract.registry import check_parts, load_suite, make_env

FILE = """
max_steps = 12
[[tasks]]
id = "chrome/1"
instruction = "clear the history"
[[tasks]]
id = "vlc/2"
max_steps = 3
split = "heldout"
"""


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "tasks.toml"
    path.write_text(FILE)
    return f"served:{path}"


def test_tasks_of_a_file_are_a_suite_without_an_environment(suite: str) -> None:
    tasks = load_suite(suite).tasks
    assert [(t.id, t.max_steps, t.split, t.instruction) for t in tasks.values()] == [
        ("chrome/1", 12, "train", "clear the history"),
        ("vlc/2", 3, "heldout", ""),
    ]
    with pytest.raises(TaskError, match="through `dart serve`"):
        make_env(suite)
    with pytest.raises(MissingPartError, match=r"set up.serve = true and up.envs = 0"):
        check_parts(suite, {})


def test_a_run_of_such_tasks_needs_no_environment_of_ours(suite: str) -> None:
    served = Config.model_validate({"env": {"suite": suite}, "up": {"envs": 0, "serve": True}})
    for role in ("serve", "data", "rollout", "train", None):
        check_config(served, role=role)  # type: ignore[arg-type]
    for config, role in ((served, "env"), (Config.model_validate({"env": {"suite": suite}}), None)):
        with pytest.raises(ConfigError, match="through `dart serve`"):
            check_config(config, role=role)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks = 3", "tasks must be a valid list"),
        ("tasks = []", "tasks: List should have at least 1 item"),
        ("tasks = [3]", r"tasks\.0 must be a valid dictionary"),
        ("[[tasks]]\nid = 3", r"tasks\.0\.id must be a valid string, got 3"),
        ("[[tasks]]\nname = 'x'", r"tasks\.0\.id is missing"),
        ("[[tasks]]\nid = ''", r"tasks\.0\.id: String should have at least 1"),
        ("[[tasks]]\nid = ' '", r"tasks\.0\.id must be printable"),
        ("[[tasks]]\nid = 'x'\n[[tasks]]\nid = 'x'", r"tasks\.1: 'x' is listed twice"),
        ("[[tasks]]\nid = 'x'\nsplit = 'test'", "split must be 'train' or 'heldout'"),
        ("[[tasks]]\nid = 'x'\nmax_steps = 0", "max_steps must be greater than or equal to 1"),
        ("[[tasks]]\nid = 'x'\nmax_steps = true", "max_steps must be a valid integer"),
        ("steps = 3\n[[tasks]]\nid = 'x'", "steps: Extra inputs are not permitted"),
        ("[[tasks", "tasks.toml: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.toml"
    path.write_text(text)
    with pytest.raises(TaskError, match=message):
        load_suite(f"served:{path}")


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(TaskError, match=r"nothing.toml: cannot be read: No such file"):
        load_suite("served:nothing.toml")
