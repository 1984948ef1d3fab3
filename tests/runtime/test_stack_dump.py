"""What a process is doing: SIGUSR1 writes it to the log, `dart status --stacks` asks all of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.runtime.liveness import workers_of
from dart_cli.status.host_processes import run_stacks

PROCESS = """
import asyncio, sys, threading
from pathlib import Path
from dart_cli.config.schema import Config
from dart_cli.runtime.role import run_role

async def inner():
    print("ready", flush=True)
    await asyncio.Event().wait()

async def wait_for_ever(name, stop):
    await asyncio.create_task(inner(), name="the-inner-task")

def sleep_in_a_thread():
    threading.Event().wait()

threading.Thread(target=sleep_in_a_thread, daemon=True).start()
config = Config.model_validate({"run": {"dir": Path(sys.argv[1])}})
sys.exit(run_role("env", config, wait_for_ever))
"""


@pytest.fixture
def child(tmp_path: Path) -> subprocess.Popen[str]:
    """An env process that waits forever, in the run directory tmp_path/run."""
    started = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    yield started  # type: ignore[misc]
    started.kill()
    started.communicate()


def test_all_threads_and_tasks_of_all_processes_are_printed_and_they_go_on(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    messages: list[str] = []
    for _ in range(2):  # the process lives on, and can be asked again
        messages.clear()
        assert run_stacks(tmp_path / "run", messages.append) == 0
        text = "\n".join(messages)
        assert text.startswith(f"=== env-0 (pid {child.pid})")
        assert "in sleep_in_a_thread" in text
        assert "Task the-inner-task:" in text
        assert text.index("in wait_for_ever") < text.index("awaits ")
        assert "in inner" in text
    assert child.poll() is None
    assert "in sleep_in_a_thread" in (tmp_path / "run" / "logs" / "env-0.log").read_text()


def test_a_stopped_process_is_reported_as_stopped(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    messages: list[str] = []
    assert run_stacks(tmp_path / "run", messages.append) == 1
    assert f"kill -CONT {child.pid}" in messages[1]


def test_a_run_without_processes_has_no_stacks(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    child.kill()
    child.wait()
    [worker] = workers_of(tmp_path / "run")
    assert (worker.name, worker.pid, worker.liveness) == ("env-0", child.pid, "gone")
    with pytest.raises(RunDirectoryError, match="no process of this run lives"):
        run_stacks(tmp_path / "run", print)
