"""scripts/setup says what is fetched and how much is left, also where its output is a file."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]

OLD_PIP = """\
Looking in indexes: https://pypi.org/simple
Processing /wheels/lark-1.3.1-py3-none-any.whl
Collecting msgpack>=1.1
  Downloading msgpack-1.2.4-cp311-cp311-manylinux2014_x86_64.whl (480 kB)
     ━━━━━━━━━━━━━━━━━━━━ 480.2/480.2 kB 35.9 MB/s eta 0:00:00
Collecting pyarrow>=18.0
  Downloading pyarrow-22.0.0-cp311-cp311-manylinux_2_28_x86_64.whl (47.7 MB)
Requirement already satisfied: torch in ./lib
Installing collected packages: lark, msgpack, pyarrow
Successfully installed lark-1.3.1 msgpack-1.2.4 pyarrow-22.0.0
"""
NEW_PIP = """\
Collecting msgpack>=1.1
  Downloading msgpack-1.2.4-cp311-cp311-manylinux2014_x86_64.whl.metadata (8 kB)
Collecting pyarrow>=18.0
  Using cached pyarrow-22.0.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (3 kB)
Collecting lark
  Using cached lark-1.3.1-py3-none-any.whl.metadata (2 kB)
Downloading msgpack-1.2.4-cp311-cp311-manylinux2014_x86_64.whl (480 kB)
Using cached pyarrow-22.0.0-cp311-cp311-manylinux_2_28_x86_64.whl (47.7 MB)
Using cached lark-1.3.1-py3-none-any.whl (111 kB)
Installing collected packages: lark, msgpack, pyarrow
"""


def shown(text: str, folder: Path) -> list[str]:
    """What the script makes of pip's output."""
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "install_progress.py", str(folder), "4"],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return [line.strip() for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("text", [OLD_PIP, NEW_PIP], ids=["pip 23", "pip 25"])
def test_a_log_tells_large_downloads_and_counts(text: str, tmp_path: Path) -> None:
    large, installed, end = shown(text, tmp_path)
    assert large == "fetching pyarrow, 48 MB"
    assert installed == "installed 0 of about 4 packages"
    assert end.startswith("installed 0 of about 4 packages, ")


def test_packages_count_as_installed_when_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "pip-23.dist-info").mkdir()
    progress = runpy.run_path(str(ROOT / "scripts" / "install_progress.py"))["Progress"](
        tmp_path, 4
    )
    progress.read("Installing collected packages: lark, msgpack, pyarrow")
    for name in ("lark", "msgpack"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
    assert progress.text().strip() == "installed 2 of about 4 packages"


def test_what_is_fetched_is_counted_before_anything_is_installed(tmp_path: Path) -> None:
    before, _, _ = OLD_PIP.partition("Installing")
    assert shown(before, tmp_path)[-1].startswith("fetched 3 of about 4 packages, 48 MB, ")


def test_a_log_is_not_flooded_and_keeps_errors(tmp_path: Path) -> None:
    many = "".join(f"Collecting p{i}\n  Downloading p{i}-1.0.whl (1.5 MB)\n" for i in range(500))
    lines = shown(many + "ERROR: No matching distribution found for p501\n", tmp_path)
    assert lines[0] == "ERROR: No matching distribution found for p501"
    assert lines[1].startswith("fetched 500 of about 4 packages, 750 MB, ")
    assert len(lines) == 2


def test_one_package_is_no_plural(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "install_progress.py", tmp_path, "1"],
        input="Installing collected packages: torch\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "installed 0 of 1 package\n" in ended.stdout


@pytest.mark.parametrize("command", [["scripts/setup"], ["bash", "-c", "source scripts/setup"]])
def test_setup_is_run_or_sourced_and_names_a_python_that_cannot_be_used(
    command: list[str], tmp_path: Path
) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\ncase $2 in *platform*) echo Python 3.9.2;; *) exit 1;; esac\n")
    old.chmod(0o755)
    ended = subprocess.run(
        command if command[0] == "bash" else [ROOT / command[0]],
        cwd=ROOT if command[0] == "bash" else tmp_path,
        env=os.environ | {"DART_PYTHON": str(old), "DART_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert f"DART_PYTHON={old} is Python 3.9.2" in ended.stderr
    assert "3.11 to 3.13" in ended.stderr
    assert not (tmp_path / "venv").exists()
