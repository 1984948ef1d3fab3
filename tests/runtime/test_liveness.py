"""Whether the processes of a run live."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dart_cli.runtime.liveness import is_alive, process_liveness, start_ticks, workers_of


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


def test_a_step_of_the_clock_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = start_ticks(os.getpid())
    assert ticks > 0
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr("psutil.boot_time", lambda: 4e9)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 4e9)
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks - 1)  # another process had this pid
    assert is_alive(os.getpid(), 0)
    assert not is_alive(-5, 0)
