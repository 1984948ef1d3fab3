"""What a process is doing: SIGUSR1 writes it to the log, `dart status --stacks` asks all of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.runtime.liveness import process_liveness, workers_of
from dart_cli.status.absent import last_error, why_absent
from dart_cli.status.stacks import run_stacks

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
    """An env process that waits for ever, in the run directory tmp_path/run."""
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
    told: list[str] = []
    for _ in range(2):  # the process lives on, and can be asked again
        told.clear()
        assert run_stacks(tmp_path / "run", told.append) == 0
        text = "\n".join(told)
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
    told: list[str] = []
    assert run_stacks(tmp_path / "run", told.append) == 1
    assert f"kill -CONT {child.pid}" in told[1]


def test_a_run_without_processes_has_no_stacks(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    child.kill()
    child.wait()
    [worker] = workers_of(tmp_path / "run")
    assert (worker.name, worker.pid, worker.liveness) == ("env-0", child.pid, "gone")
    with pytest.raises(RunDirectoryError, match="no process of this run lives"):
        run_stacks(tmp_path / "run", print)


def test_a_number_that_another_process_has_by_now_is_gone() -> None:
    assert process_liveness(os.getpid(), heard_at=0.0) == "gone"


def test_a_zombie_is_gone_though_its_parent_did_not_collect_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_liveness(child.pid, heard_at=time.time()) == "gone"


def test_an_unused_run_directory_has_no_workers(tmp_path: Path) -> None:
    assert workers_of(tmp_path) == []


def test_a_data_process_that_does_not_answer_is_reported_with_its_state(tmp_path: Path) -> None:
    assert why_absent(tmp_path).startswith("start one with `dart data CONFIG`")
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "env-0.lock").write_text(str(os.getpid()))
    assert why_absent(tmp_path).endswith("or `dart up CONFIG`; env-0 wait for it")
    (tmp_path / "workers" / "env-0.lock").unlink()
    (tmp_path / "workers" / "data.lock").write_text(str(os.getpid()))
    assert "lives but does not answer; dart status --stacks" in why_absent(tmp_path)
    os.utime(tmp_path / "workers" / "data.lock", (0, 0))  # its number is another's by now
    assert f"data (pid {os.getpid()}) has ended; start it again" in why_absent(tmp_path)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "data.log"
    log.write_text("x INFO p: data starts, pid 1, run r\nStoreError: run.db: disk is full\n")
    assert "has ended: StoreError: run.db: disk is full; mend that" in why_absent(tmp_path)
    log.write_text(
        "x INFO p: data starts, pid 1, run r\n"
        "x INFO s: the run is over: 30 updates are done\n"
        "x INFO p: data ended\n"
    )
    assert why_absent(tmp_path).startswith("the run is over: 30 updates are done; `dart view")


def test_over_tcp_a_data_process_that_lives_may_have_other_keys(tmp_path: Path) -> None:
    assert "start one with" in why_absent(tmp_path, tcp=True)
    assert "bus.host, bus.port or bus.keys differ" in why_absent(tmp_path, tcp=True)
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "data.lock").write_text(str(os.getpid()))
    told = why_absent(tmp_path, tcp=True)
    assert "shows what it does; or bus.host, bus.port or bus.keys differ" in told
    assert "bus.keys" not in why_absent(tmp_path)


def test_only_the_error_of_the_last_start_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "data.log"
    assert last_error(log) == ""
    log.write_text(
        "x INFO p: data starts, pid 1, run r\n"
        "x ERROR p: data ends with an error\n"
        "Traceback (most recent call last):\n"
        "bus.errors.StoreError: run.db: database or disk is full; free space\n"
    )
    assert last_error(log) == "StoreError: run.db: database or disk is full; free space"
    with log.open("a") as file:
        file.write("x INFO p: data starts, pid 2, run r\n")
    assert last_error(log) == ""
