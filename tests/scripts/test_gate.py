"""scripts/test and .ci/run: what they exit with, and that a retry hides nothing.

Both run in a copy of their folders, in which set-up, checks and quickstart are stubs and the suite
is one small file of tests.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)

FLAKY = """
from pathlib import Path

def test_steady():
    pass

def test_flaky():
    first = Path("{root}/ran")
    again, _ = first.exists(), first.touch()
    assert again
"""

RESULT = {
    **dict.fromkeys(("success_before", "success_after", "greedy_before", "greedy_after"), 0.5),
    "policy_version": 3,
    "trajectories": 96,
    "minutes": 1.0,
    "minutes_total": 1.0,
    "episodes": 44,
    "per_task": [1, 2, 3, 4],
    "heldout": {"per_task": [1]},
    "run_dir": "runs/ci",
    "seed": 0,
    "curve": "plot.png",
    "films": "plot.png",
}

CONFIG = {
    "data": {"group_size": 8, "groups_per_batch": 4},
    "train": {"updates": 3, "reuse": 0},
    "eval": {"episodes": 44},
}


class Copy:
    """A tree in which the two scripts run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for path in (".ci/run", ".ci/skips", ".ci/programs", "scripts/test"):
            (root / path).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / path, root / path)
        shutil.copy(ROOT / "tests/conftest.py", root)
        (root / "tests").mkdir()
        shutil.copy(ROOT / "tests/progress.py", root / "tests")
        self.write(".ci/hidden", 'echo "$*" >> hidden; [ "$1" != --extras ] || shift; exec "$@"')
        self.write("scripts/setup", 'say() { printf "==> %s\\n" "$*"; }; PATH=$PWD/.venv/bin:$PATH')
        self.write("scripts/setup-vllm")
        self.write("scripts/setup-browsergym")
        self.write("scripts/docs")
        self.write("scripts/check", "echo checked >> checks")
        (root / ".ci/skips.toml").write_text('always = ["no *"]\nbare = []\n')
        self.quickstart()
        (root / "plot.png").write_bytes(b"\x89PNG")
        self.write(".venv/bin/dpkg")  # all programs are installed
        self.write(".venv/bin/python", f'exec {PYTHON} "$@"')
        # One worker suffices for what is tested here, and each has its own imports.
        self.write(".venv/bin/pytest", f'exec {PYTHON} -m pytest -p xdist "$@" -n 0')

    def write(self, path: str, text: str = "true") -> None:
        """A script of one line."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.root / path).chmod(0o755)

    def quickstart(self, config: dict[str, object] = CONFIG, **result: object) -> None:
        """A quickstart of this configuration, with this result."""
        self.write("runs/ci/config.json")
        (self.root / "runs/ci/config.json").write_text(json.dumps(config))
        self.write("scripts/quickstart", f"echo noise; echo '{json.dumps(RESULT | result)}'")

    def pytest_exits(self, status: int) -> None:
        """A pytest that runs nothing."""
        self.write(
            ".venv/bin/pytest",
            f'printf "%s\\n" "$*" >> calls; mkdir -p .pytest_cache/v/dart; '
            f"echo '{{}}' > .pytest_cache/v/dart/skips; exit {status}",
        )

    def suite(self, text: str) -> None:
        """The suite of the real pytest."""
        (self.root / "test_it.py").write_text(text)

    def run(self, *command: str) -> tuple[int, list[str]]:
        """Exit status, and the lines of its output."""
        ended = subprocess.run(
            command,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={
                **{key: text for key, text in os.environ.items() if not key.startswith("PYTEST_")},
                "PATH": f"{self.root}/.venv/bin:{os.environ['PATH']}",
                "DART_VENV": ".venv",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # xdist alone is needed
            },
        )
        return ended.returncode, ended.stdout.splitlines()

    def lines(self, name: str) -> list[str]:
        """What the stubs noted."""
        path = self.root / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize("status", range(6))
def test_the_exit_status_is_pytests_and_nothing_is_retried(copy: Copy, status: int) -> None:
    copy.pytest_exits(status)
    assert copy.run("scripts/test")[0] == status
    assert copy.run("scripts/test", "tests/cli", "-x")[0] == status
    assert copy.lines("calls") == ["-n 3 --dist loadfile --no-loadscope-reorder", "tests/cli -x"]
    assert copy.lines("checks") == ["checked"] * 2


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_failed_check_fails_whatever_the_tests_did(copy: Copy, status: int) -> None:
    copy.pytest_exits(status)
    copy.write("scripts/check", "echo a line too long; exit 1")
    ended, lines = copy.run("scripts/test")
    assert ended == 10
    assert "a line too long" in lines


@pytest.mark.parametrize("status", [2, 3, 4, 5])
def test_ci_retries_nothing_where_pytest_could_not_run(copy: Copy, status: int) -> None:
    copy.pytest_exits(status)
    assert copy.run(".ci/run")[0] == status
    assert len(copy.lines("calls")) == 1


def test_ci_retries_nothing_where_a_check_failed(copy: Copy) -> None:
    copy.pytest_exits(1)
    copy.write("scripts/check", "exit 1")
    assert copy.run(".ci/run")[0] == 10
    assert len(copy.lines("calls")) == 1


def test_ci_fails_with_the_quickstart(copy: Copy) -> None:
    copy.pytest_exits(0)
    assert copy.run(".ci/run")[0] == 0
    copy.write("scripts/quickstart", "exit 3")
    assert copy.run(".ci/run")[0] != 0
    copy.quickstart(greedy_after=1.5)
    assert copy.run(".ci/run")[0] != 0


@pytest.mark.parametrize(
    ("size", "reuse", "least"), [(8, 0, 96), (1, 0, 12), (1, 1, 8), (8, 2, 32)]
)
def test_ci_counts_the_trajectories_that_the_quickstarts_configuration_trains_on(
    copy: Copy, size: int, reuse: int, least: int
) -> None:
    copy.pytest_exits(0)
    data = {"group_size": size, "groups_per_batch": 4}
    config = CONFIG | {"data": data, "train": {"updates": 3, "reuse": reuse}}
    copy.quickstart(config, trajectories=least)
    assert copy.run(".ci/run")[0] == 0
    copy.quickstart(config, trajectories=least - 1)
    assert copy.run(".ci/run")[0] != 0


def test_a_test_that_would_pass_on_a_retry_fails_the_suite(copy: Copy) -> None:
    copy.suite(FLAKY.format(root=copy.root))
    assert copy.run("scripts/test")[0] == 1
    # What it leaves is enough to run the failed test alone.
    ended, lines = copy.run("scripts/test", "--last-failed", "-q", "-rA")
    assert ended == 0
    assert [line for line in lines if line.startswith("PASSED")] == [
        "PASSED test_it.py::test_flaky"
    ]


def test_ci_passes_a_test_that_passes_alone_and_names_the_defect_last(copy: Copy) -> None:
    copy.suite(FLAKY.format(root=copy.root))
    ended, lines = copy.run(".ci/run")
    assert ended == 0
    assert lines[-1] == (
        "failed beside others, passed alone: a defect to fix: bare: test_it.py::test_flaky"
    )


def test_ci_fails_with_a_test_that_fails_alone_too(copy: Copy) -> None:
    copy.suite("def test_wrong():\n    assert False\n")
    ended, lines = copy.run(".ci/run")
    assert ended == 1
    assert not any("defect" in line for line in lines)


RAN = """
import os
from pathlib import Path
import pytest

def test_{name}():
    if "{name}" == "browser" and "HIDDEN" in os.environ:
        pytest.skip("no browser")
    with Path("{root}/ran").open("a") as file:
        file.write("{name} hidden={{}}\\n".format(os.environ.get("HIDDEN")))
"""


def test_ci_runs_each_test_once_with_python_alone_or_where_all_is_installed(copy: Copy) -> None:
    for name in ("plain", "browser"):
        (copy.root / f"test_{name}.py").write_text(RAN.format(name=name, root=copy.root))
    copy.write(
        ".ci/hidden", 'echo "$*" >> hidden; [ "$1" != --extras ] || shift; HIDDEN=1 exec "$@"'
    )
    (copy.root / ".ci/skips.toml").write_text('always = []\nbare = ["no browser"]\n')
    assert copy.run(".ci/run")[0] == 0
    assert copy.lines("ran") == ["plain hidden=1", "browser hidden=None"]
    tests, quickstart = copy.lines("hidden")
    assert tests == "scripts/test"
    assert quickstart.startswith("--extras scripts/quickstart ")


SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skipped(number):
    pytest.skip("{reason}")
"""


@pytest.mark.parametrize(
    ("reason", "always", "bare", "ended"),
    [
        ("no GPU", ["no GPU"], [], 0),
        ("no GPU", ["no *"], ["no *"], 0),
        ("no GPU", [], ["no GPU"], 1),  # it is there where everything is
        ("the moon", ["no GPU"], [], 1),
        ("no GPU", ["no GPU"], ["no browser"], 1),  # the browser should have been hidden
    ],
)
def test_ci_fails_where_tests_are_skipped_for_a_reason_that_it_does_not_expect(
    copy: Copy, reason: str, always: list[str], bare: list[str], ended: int
) -> None:
    copy.suite(SKIPPED.format(reason=reason))
    (copy.root / ".ci/skips.toml").write_text(f"always = {always}\nbare = {bare}\n")
    status, lines = copy.run(".ci/run")
    assert status == ended
    assert any(line.split(maxsplit=1)[:1] == ["3"] and reason in line for line in lines)
    assert any("<-" in line for line in lines) == bool(ended)
