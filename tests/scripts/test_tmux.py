"""scripts/tmux.sh types what a person would, one pane each."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tmux.sh"


def script(*arguments: object, env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors; `env` says where its `dart` and its Python are."""
    ended = subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | env,
        cwd=ROOT,
    )
    return ended.returncode, ended.stdout, ended.stderr


def commands(printed: str) -> list[list[str]]:
    """The command lines of a dry run, without the folder of `dart`."""
    lines = [shlex.split(line) for line in printed.splitlines()]
    return [["dart" if word.endswith("/dart") else word for word in line] for line in lines]


def environment(folder: Path) -> Path:
    """A Python environment that has dart: its `bin`."""
    (folder / "bin").mkdir(parents=True)
    for name, program in (("python", ""), ("dart", " -m dart_cli")):
        file = folder / "bin" / name
        file.write_text(
            f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}{program} "$@"\n'
        )
        file.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def venv(tmp_path: Path) -> dict[str, str]:
    """Where the script finds dart."""
    return {"DART_VENV": str(environment(tmp_path / "venv").parent)}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    return path


def test_a_box_trains_on_some_gpus_and_rolls_out_on_the_others(
    config: Path, venv: dict[str, str]
) -> None:
    code, out, _ = script(
        *("--train", "0-1", "--rollout", "2-4,7", "--envs", 2, "--dry-run"),
        *(config, "--set", "env.tasks=['$(id)']"),
        env=venv,
    )
    assert code == 0
    lines = commands(out)
    sizes = ["--set", "up.rollouts=4", "--set", "up.rollout_gpus=[]", "--set", "up.envs=2"]
    given = [str(config), "--set", "env.tasks=['$(id)']", *sizes]
    placed = ["--set", "train.ranks=2", "--set", "up.train_gpus=[]", "--set", "up.rollout_gpus=[]"]
    assert lines == [
        ["dart", "status", *given],
        ["dart", "data", *given],
        ["CUDA_VISIBLE_DEVICES=0,1", "dart", "train", str(config), *placed, *given[1:]],
        *[["dart", "env", *given]] * 2,
        *[[f"CUDA_VISIBLE_DEVICES={gpu}", "dart", "rollout", *given] for gpu in (2, 3, 4, 7)],
    ]


def test_a_dry_run_is_one_wherever_it_is_asked_for(config: Path, venv: dict[str, str]) -> None:
    before, after = (
        script(*words, env=venv | {"PATH": "/usr/bin:/bin"})
        for words in (
            ("--dry-run", config, "--set", "run.seed=1"),
            (config, "--set", "run.seed=1", "--dry-run"),
        )
    )
    assert before == after
    assert before[0] == 0
    assert "dry-run" not in before[1]


def test_a_box_is_shared_out_as_the_configuration_says(config: Path, venv: dict[str, str]) -> None:
    with config.open("a") as file:
        file.write("[up]\ntrain_gpus = [0, 1]\nrollout_gpus = [2, 3, 4, 5]\n")
    sets = ["train.ranks=2", "up.rollouts=2", "rollout.engine=vllm", "vllm.tensor_parallel=2"]
    given = [part for each in sets for part in ("--set", each)]
    code, out, err = script("--dry-run", config, *given, env=venv)
    assert (code, err) == (0, "")
    lines = commands(out)
    assert ["CUDA_VISIBLE_DEVICES=0,1", "dart", "train", str(config), *given] in lines
    assert lines[-2:] == [
        [f"CUDA_VISIBLE_DEVICES={gpus}", "dart", "rollout", str(config), *given]
        for gpus in ("2,3", "4,5")
    ]


def test_gpus_of_one_side_leave_the_other_side_its_own(config: Path, venv: dict[str, str]) -> None:
    with config.open("a") as file:
        file.write("[train]\nranks = 2\n")
        file.write('[rollout]\nengine = "vllm"\n[vllm]\ntensor_parallel = 2\n[up]\nrollouts = 2\n')
        file.write("train_gpus = [0, 1]\nrollout_gpus = [2, 3, 4, 5]\n")
    code, out, _ = script("--dry-run", "--train", "7", config, env=venv)
    assert code == 0
    assert "CUDA_VISIBLE_DEVICES=7" in out
    assert [line[0] for line in commands(out)[-2:]] == [
        "CUDA_VISIBLE_DEVICES=2,3",
        "CUDA_VISIBLE_DEVICES=4,5",
    ]
    code, out, _ = script("--dry-run", "--rollout", "6-7", config, env=venv)
    assert code == 0
    assert [line[:3] for line in commands(out) if "=" in line[0]] == [
        ["CUDA_VISIBLE_DEVICES=0,1", "dart", "train"],
        ["CUDA_VISIBLE_DEVICES=6,7", "dart", "rollout"],
    ]
    code, out, err = script("--dry-run", "--rollout", "1-2", config, env=venv)
    assert (code, out) == (2, "")
    assert "up.rollout_gpus lists GPU 1, which up.train_gpus lists too" in err
    assert err.count("\n") == 1


def test_there_are_as_many_processes_as_the_configuration_says(
    config: Path, venv: dict[str, str]
) -> None:
    sets = ("--set", "up.envs=3", "--set", "up.rollouts=2")
    _, out, _ = script("--dry-run", config, *sets, env=venv)
    roles = [line[1] for line in commands(out)]
    assert roles == ["status", "data", "train", *["env"] * 3, *["rollout"] * 2]
    _, out, _ = script("--dry-run", "--envs", 1, "--rollouts", 1, config, *sets, env=venv)
    assert [line[1] for line in commands(out)] == ["status", "data", "train", "env", "rollout"]
    for line in commands(out):  # the last one of a key counts
        assert line[-4:] == ["--set", "up.rollouts=1", "--set", "up.envs=1"]


def test_the_page_on_boxes_shows_what_it_types(venv: dict[str, str]) -> None:
    page = (ROOT / "docs" / "box.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"It types these commands.*?```bash\n(.*?)```", page, re.DOTALL)
    _, out, _ = script("--dry-run", "configs/ui-tars-7b.toml", env=venv)
    assert commands(out) == commands(shown)


def test_without_a_venv_the_active_environment_says_which_gpus(
    config: Path, tmp_path: Path
) -> None:
    with config.open("a") as file:
        file.write("[up]\ntrain_gpus = [3]\n")
    active = environment(tmp_path / "active")
    (active / "python3").write_text("#!/bin/sh\nexit 1\n")  # as one that has no pydantic
    (active / "python3").chmod(0o755)
    env = {"DART_VENV": "/nowhere", "PATH": f"{active}:{os.environ['PATH']}"}
    code, out, err = script("--dry-run", config, env=env)
    assert (code, err) == (0, "")
    assert f"CUDA_VISIBLE_DEVICES=3 {active}/dart train" in out
    shutil.copy(active / "python3", active / "python")
    code, out, err = script("--dry-run", config, env=env)
    assert (code, out) == (2, "")
    assert "no Python with dart's packages: scripts/setup makes .venv" in err
    assert err.count("\n") == 1


def test_a_mistake_in_its_gpus_is_one_line(config: Path, venv: dict[str, str]) -> None:
    code, out, err = script("--dry-run", config, "--set", "up.train_gpus=[0, 1]", env=venv)
    assert (code, out) == (2, "")
    assert "set train.ranks = 2" in err
    assert err.count("\n") == 1


def test_a_laptop_has_one_of_each(config: Path, venv: dict[str, str]) -> None:
    _, out, _ = script("--dry-run", config, env=venv)
    roles = [line[1] for line in commands(out)]
    assert roles == ["status", "data", "train", "env", "rollout"]


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ([], "name the TOML file"),
        (["nowhere.toml"], "no such file: nowhere.toml"),
        (["--gpus", "1"], "no option --gpus"),
        (["--train"], "--train wants a value"),
        (["--train", "0;id"], "want GPUs such as"),
        (["--rollout", "a"], "want GPUs such as"),
        (["--envs", "0"], "want a whole number from 1 on"),
        (["--session", "a b", "CONFIG"], "use letters, digits"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], cure: str, config: Path, venv: dict[str, str]
) -> None:
    given = [config if each == "CONFIG" else each for each in arguments]
    code, out, err = script(*given, env=venv)
    assert (code, out) == (2, "")
    assert cure in err
    assert err.count("\n") == 1


def test_help_is_the_head_of_the_script() -> None:
    code, out, _ = script("--help", env={})
    assert code == 0
    assert out.startswith("The roles of a run in tmux")
    assert "set -" not in out


@pytest.fixture
def tmux(tmp_path: Path, venv: dict[str, str]) -> Iterator[dict[str, str]]:
    """A tmux of this test's own, and a `dart` that is this one."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux on this machine")
    sockets = tmp_path / "tmux"
    sockets.mkdir(mode=0o700)
    env = {**venv, "TMUX_TMPDIR": str(sockets), "SHELL": "/bin/sh", "TMUX": ""}
    yield env
    _tmux(env, "kill-server")


def _tmux(env: dict[str, str], *arguments: str) -> str:
    return subprocess.run(
        ["tmux", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | env,
    ).stdout


def test_every_pane_runs_its_role(config: Path, tmux: dict[str, str]) -> None:
    program = Path(tmux["DART_VENV"]) / "bin" / "dart"
    program.write_text(program.read_text().rstrip() + " --dry-run\n")  # of each role in its pane
    arguments = ("--detached", "--session", "a", "--rollouts", 2, config)
    code, out, err = script(*arguments, env=tmux)
    assert (code, out, err) == (0, "tmux attach -t a\n", "")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        panes = {
            window: [
                _tmux(tmux, "capture-pane", "-p", "-J", "-S", "-", "-t", pane)
                for pane in _tmux(tmux, "list-panes", "-t", f"a:{window}", "-F", "#D").split()
            ]
            for window in ("run", "rollout")
        }
        done = [text for texts in panes.values() for text in texts if "nothing was started" in text]
        if len(done) == 5:
            break
        assert time.monotonic() < deadline, panes
        time.sleep(0.2)
    assert [len(texts) for texts in panes.values()] == [4, 2]
    for role, text in zip(("status", "data", "train", "env"), panes["run"], strict=True):
        assert f"dart {role}" in text.replace("\n", "")
    assert script(*arguments, env=tmux)[0] == 0  # it is there: gone back to, nothing is added
    assert len(_tmux(tmux, "list-panes", "-s", "-t", "a").splitlines()) == 6
