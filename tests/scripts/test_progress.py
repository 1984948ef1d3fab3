"""A test's limit is time without progress: it ends one that stands still, and none that computes, however slowly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import progress
from tests.waiting import PATIENCE_S, wait_until

LIMIT_S = 2.0
BUSY = """
import time
while time.process_time() < {seconds}:
    pass
"""
SUITE = """
import subprocess, sys, threading, time

BUSY = {busy!r}

def test_waits_for_what_never_comes():
    threading.Event().wait()

def test_waits_for_a_process_that_sleeps():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])

def test_computes():
    until = time.process_time() + {seconds}
    while time.process_time() < until:
        pass

def test_a_process_of_its_own_computes():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


def test_a_test_that_stands_still_fails_and_one_that_computes_beyond_the_limit_passes(
    tmp_path: Path,
) -> None:
    seconds = 1.5 * LIMIT_S
    (tmp_path / "conftest.py").write_text(
        "from tests.progress import pytest_timeout_set_timer  # noqa\n"
    )
    (tmp_path / "test_it.py").write_text(
        SUITE.format(busy=BUSY.format(seconds=seconds), seconds=seconds)
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"),
            *("--rootdir", tmp_path, "--timeout", str(LIMIT_S), tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "2 failed, 2 passed" in ended.stdout
    lines = ended.stdout.splitlines()
    failed = [line.partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
    assert [line.rpartition("::test_")[2] for line in failed] == [
        "waits_for_what_never_comes",
        "waits_for_a_process_that_sleeps",
    ]
    reasons = [line for line in lines if line.startswith("E  ")]
    assert sum("Failed: the test stands still: in 2 s its" in line for line in reasons) == 2


def test_a_test_that_runs_away_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MOST_CPU_S", 0.2)
    rung: list[int] = []
    monkeypatch.setattr(
        progress.signal, "pthread_kill", lambda _thread, number: rung.append(number)
    )
    timer = progress.ProgressTimer(LIMIT_S)
    while not rung:  # it computes
        pass
    timer.cancel()
    assert timer.reason.startswith("runs away: its processes used ")


def test_a_test_that_waits_for_a_core_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    class Starved:
        """The meter of processes that are ready to run and get no core until they have waited three limits."""

        def used(self) -> progress.Used:
            queued_s = LIMIT_S / progress.LOOKS if len(looks) < 3 * progress.LOOKS else 0.0
            looks.append(queued_s)
            return progress.CpuUse(cpu_s=0.0, queued_s=10 * queued_s)

    rung: list[int] = []
    monkeypatch.setattr(progress, "CpuMeter", Starved)
    monkeypatch.setattr(
        progress.signal, "pthread_kill", lambda _thread, number: rung.append(number)
    )
    timer = progress.ProgressTimer(LIMIT_S)
    wait_until(lambda: rung, "the limit")
    timer.cancel()
    assert sum(each > 0 for each in looks) == 3 * progress.LOOKS, "it ran out while it was starved"
    assert timer.reason.startswith("stands still")


def test_the_seconds_in_which_a_process_waits_for_a_core_are_read() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        meter = progress.CpuMeter()
        wait_until(lambda: meter.used().queued_s > 0, "a process that has no core")
    finally:
        for process in processes:
            process.kill()
            process.wait()
