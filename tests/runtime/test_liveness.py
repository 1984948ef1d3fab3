"""Whether the processes of a run live."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dart_cli.runtime.liveness import end_of, process_liveness, workers_of


def test_a_number_that_another_process_has_by_now_is_gone() -> None:
    assert process_liveness(os.getpid(), heard_at=0.0) == "gone"


def test_a_number_that_no_process_can_have_is_gone() -> None:
    assert process_liveness(-5, heard_at=time.time()) == "gone"


def test_a_zombie_is_gone_though_its_parent_did_not_collect_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_liveness(child.pid, heard_at=time.time()) == "gone"


def test_an_unused_run_directory_has_no_workers(tmp_path: Path) -> None:
    assert workers_of(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "liveness", "error", "word"),
    [
        ("stopping", "gone", "", "ended"),
        ("stopping", "", "", "ended"),  # of another host
        ("stopping", "gone", "no room", "failed"),
        ("ready", "gone", "no room", "failed"),
        ("ready", "gone", "killed by signal 9", "killed by signal 9"),
        ("ready", "gone", "", "lost"),
        ("ready", "", "", "lost"),
        ("ready", "stopped", "", "stopped"),
        ("ready", "blocked", "", "blocked"),
        ("ready", "running", "", "silent"),
    ],
)
def test_a_silent_process_that_ended_in_order_is_told_apart_from_one_that_crashed(
    state: str, liveness: str, error: str, word: str
) -> None:
    assert end_of(state, liveness, error) == word
