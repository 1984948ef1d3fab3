"""Processes whose terminal or pipe is gone: they go on, and end at the first signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.test_up import until, updates_done, without_a_model, write_config
from tests.waiting import PATIENCE_S, lives, wait_until

pytestmark = pytest.mark.slow


# --- processes that go on ----------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed at the end, with all they started."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            for each in (process, *below):
                each.kill()
        process.wait()


def begin(*arguments: object) -> tuple[subprocess.Popen[bytes], int]:
    """`dart ARGUMENTS` with both streams in one pipe, and the reader's end of it."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "dart_cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    os.close(writer)
    return process, reader


def simulated(folder: Path) -> Path:
    """Write the configuration of a run without a model, which does not end by itself."""
    path = write_config(folder, updates=100_000)
    without_a_model(path)
    return path


def catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler of its own: before, a signal just ends it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_reader_is_gone_ends_whole_at_the_first_signal(
    number: signal.Signals, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """As after Ctrl-C in `dart up ... 2>&1 | tee log`, which ends tee, too."""
    serving = ("--set", "up.serve=true", "--set", "serve.port=0")
    up, reader = begin("up", simulated(tmp_path), *serving)
    started.append(up)
    until(lambda: updates_done(tmp_path / "run") >= 1, "an update")
    log = tmp_path / "run" / "logs" / "dart-up.log"
    until(lambda: "serve-0: http://127.0.0.1:" in log.read_text(), "the address of dart serve")
    below = [each.pid for each in psutil.Process(up.pid).children(recursive=True)]
    assert len(below) >= 4
    os.close(reader)
    up.send_signal(number)
    assert up.wait(PATIENCE_S) == 130
    wait_until(lambda: not any(map(lives, below)), "the end of all its processes")
    logs = tmp_path / "run" / "logs"
    for name in ("data", "train", "rollout-0", "env-0", "serve-0"):
        assert (logs / f"{name}.log").read_text().rstrip().endswith(f"{name} ended")
    assert "killed" not in log.read_text()


@pytest.mark.parametrize("role", ["data", "train", "rollout", "env", "serve"])
def test_a_process_whose_reader_is_gone_goes_on_and_ends_at_the_first_signal(
    role: str, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    process, reader = begin(role, simulated(tmp_path), "--set", "serve.port=0")
    started.append(process)
    os.close(reader)
    wait_until(lambda: catches_sigterm(process.pid), "its signal handlers")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
