"""Whether the processes of a run live."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import end_of, process_liveness, start_ticks, workers_of
from dart_cli.runtime.run_dir import claim


def test_a_number_that_another_process_has_by_now_is_gone() -> None:
    assert process_liveness(os.getpid(), silent_s=1e9) == "gone"
    assert process_liveness(os.getpid(), ticks=start_ticks(os.getpid()) - 1) == "gone"


def test_a_number_that_no_process_can_have_is_gone() -> None:
    assert process_liveness(-5) == "gone"


def test_a_zombie_is_gone_though_its_parent_did_not_collect_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_liveness(child.pid) == "gone"


def test_an_unused_run_directory_has_no_workers(tmp_path: Path) -> None:
    assert workers_of(tmp_path) == []


@pytest.mark.parametrize("step_s", [-1e9, 1e9])
def test_a_step_of_the_clock_ends_no_process(
    step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path}})
    now = time.time()
    with claim(config, "env", "env-0"):
        monkeypatch.setattr(time, "time", lambda: now + step_s)
        for boot_time in ("psutil.boot_time", "psutil._pslinux.boot_time"):
            monkeypatch.setattr(boot_time, lambda: now + step_s)
        [worker] = workers_of(tmp_path)
    assert (worker.name, worker.pid, worker.liveness) == ("env-0", os.getpid(), "running")


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
