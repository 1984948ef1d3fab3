"""A role's process: its name is its own, signals end it, errors are one line."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bus.errors import EngineError, ModelError
from dart_cli.config.schema import Config, UpConfig
from dart_cli.runtime import run_dir
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import logging_to
from dart_cli.runtime.role import run_role, stop_signals
from dart_cli.runtime.run_dir import claim
from dart_cli.status.host_processes import last_error
from dart_cli.weights.storage import atomic_directory
from tests.waiting import PATIENCE_S, lives, wait_until


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run of its own."""
    (tmp_path / "run").mkdir(mode=0o700)
    return Config.model_validate({"run": {"dir": tmp_path / "run"}})


@pytest.fixture(autouse=True)
def _restore_process_state() -> Iterator[None]:
    handlers = {each: signal.getsignal(each) for each in stop_signals()}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("no such model; fetch it"), 2, "error: no such model; fetch it\n"),
        (EngineError("out of memory"), 1, "error: out of memory\n"),
        (ZeroDivisionError("oh"), 1, "error: env-0 broke: ZeroDivisionError: oh; the traceback"),
    ],
)
def test_an_error_is_one_line_and_a_traceback_in_the_log(
    config: Config, capfd: pytest.CaptureFixture[str], error: Exception, code: int, text: str
) -> None:
    async def fail(_name: str, _stop: asyncio.Event) -> None:
        raise error

    assert run_role("env", config, fail) == code
    messages = [
        line for line in capfd.readouterr().err.splitlines(True) if line.startswith("error")
    ]
    assert len(messages) == 1
    assert messages[0].startswith(text)
    log = (config.run.dir / "logs" / "env-0.log").read_text()
    assert "Traceback" in log
    assert type(error).__name__ in log


def test_a_refused_configuration_is_in_the_log_too(config: Config) -> None:
    async def never(_name: str, _stop: asyncio.Event) -> None:
        pytest.fail("it was started")

    (config.run.dir / "config.json").write_text("{}}")
    assert run_role("data", config, never) == 2
    assert "no readable config.json" in last_error(config.run.dir / "logs" / "data.log")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_for_a_clean_end_which_the_log_tells(
    config: Config, number: signal.Signals
) -> None:
    async def wait(_name: str, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), PATIENCE_S)

    assert run_role("env", config, wait) == 0
    log = (config.run.dir / "logs" / "env-0.log").read_text()
    assert re.search(rf"env-0 was asked to end by .*{number.name}.*\n.*env-0 ended", log)


def test_a_process_under_nohup_outlives_its_terminal(config: Config) -> None:
    async def work(_name: str, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run_role("env", config, work) == 0
    assert "was asked to end" not in (config.run.dir / "logs" / "env-0.log").read_text()


BUSY = """
import asyncio, sys, time
from pathlib import Path
from dart_cli.runtime import role
from dart_cli.config.schema import Config
role.GRACE_S = float(sys.argv[2])

async def never_ends(name, stop):
    print("ready", flush=True)
    while True:
        time.sleep(0.05)  # the loop is never free

config = Config.model_validate({"run": {"dir": Path(sys.argv[1])}})
sys.exit(role.run_role("env", config, never_ends))
"""


def _busy(config: Config, grace_s: float) -> AbstractContextManager[subprocess.Popen[str]]:
    return _running(BUSY, config, grace_s)


@contextlib.contextmanager
def _running(script: str, config: Config, seconds: float) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(config.run.dir), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_does_not_end_in_time_is_killed(config: Config) -> None:
    with _busy(config, 0.2) as child:
        child.terminate()
        _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1
    assert "did not end within" in err
    assert workers_of(config.run.dir)[0].error.startswith("did not end within")


FINISHING = """
import asyncio, sys, time
from pathlib import Path
from dart_cli.runtime import role
from dart_cli.config.schema import Config
role.GRACE_S = 2
role.LAST_WORK_S = float(sys.argv[2])

async def finishes(name, stop):
    with role.finishing("writing a checkpoint"):
        print("ready", flush=True)
        await stop.wait()
        time.sleep(3 if role.LAST_WORK_S else 60)
    print("written", flush=True)

config = Config.model_validate({"run": {"dir": Path(sys.argv[1])}})
sys.exit(role.run_role("env", config, finishes))
"""


@pytest.mark.parametrize(("last_work_s", "code"), [(600.0, 0), (0.0, 1)])
def test_what_would_be_lost_is_finished(config: Config, last_work_s: float, code: int) -> None:
    with _running(FINISHING, config, last_work_s) as child:
        child.terminate()
        out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code
    assert ("written" in out) == (code == 0)
    assert ("progress: env-0 is still writing a checkpoint" in err) == (code == 0)
    assert ("did not end within 2 s, and is still writing a checkpoint" in err) == (code == 1)


OVER = """
import asyncio, sys
from pathlib import Path
from dart_cli.runtime import role
from dart_cli.config.schema import Config
role.GRACE_S = float(sys.argv[2])

async def hears_the_end(name, stop):
    stop.set()  # data has said that the run is over
    print("ready", flush=True)
    if await asyncio.to_thread(sys.stdin.readline) == "":
        await asyncio.sleep(1e6)

config = Config.model_validate({"run": {"dir": Path(sys.argv[1])}})
sys.exit(role.run_role("env", config, hears_the_end))
"""


def test_a_process_ends_in_time_when_the_run_is_over_too(config: Config) -> None:
    with _running(OVER, config, 0.2) as child:
        _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1
    assert "did not end within" in err


def test_the_first_signal_after_the_end_of_the_run_cuts_nothing_off(config: Config) -> None:
    with _running(OVER, config, 600) as child:
        child.terminate()
        assert child.stderr is not None
        while "second signal" not in child.stderr.readline():
            pass
        child.communicate("done\n", timeout=PATIENCE_S)
    assert child.returncode == 0


def test_it_is_ended_though_its_output_is_not_read(config: Config) -> None:
    with _busy(config, 0.2) as child:
        assert child.stderr is not None
        child.stderr.close()
        child.terminate()
        assert child.wait(timeout=PATIENCE_S) == 1


def test_the_second_signal_ends_at_once(config: Config) -> None:
    with _busy(config, 600) as child:
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        while "second signal" not in child.stderr.readline():
            pass
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=PATIENCE_S) == 128 + signal.SIGINT


def test_a_child_of_dart_up_does_not_hang_when_its_parent_is_gone(config: Config) -> None:
    script = (
        "import os, subprocess, sys\n"
        "os.environ['DART_PARENT_PID'] = str(os.getpid())\n"
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nos._exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, BUSY, str(config.run.dir), "0.2"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    pid = int(ended.stdout)
    try:
        wait_until(lambda: not lives(pid), "the orphan's end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with claim(config, "env", "env-0") as name:
        assert name == "env-0"  # free again


def test_names_that_are_no_utf_8_are_logged(tmp_path: Path) -> None:
    with logging_to(tmp_path, "env-0", terminal=False) as path:
        logging.getLogger("dart_cli.env").error("no file %s", "na\udcefve.txt")
    assert path.read_text(encoding="utf-8").endswith("no file na\\udcefve.txt\n")


def told_of(capfd: pytest.CaptureFixture[str]) -> str:
    output = capfd.readouterr().err
    assert "Traceback" not in output
    assert "Logging error" not in output
    return output


def test_a_full_disk_is_one_line_and_stays_in_the_lock_file_until_the_next_start(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    full = config.run.dir / "checkpoints" / "c000001"

    async def fail(_name: str, _stop: asyncio.Event) -> None:
        logging.getLogger("x").error("lost", exc_info=OSError(errno.ENOSPC, "no", "here"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(full))

    async def work(_name: str, _stop: asyncio.Event) -> None:
        assert workers_of(config.run.dir)[0].error == ""

    assert run_role("train", config, fail) == 1
    why = f"{full} cannot be written: No space left on device; free space on its disk"
    assert f"error: {why}" in told_of(capfd)
    [train] = workers_of(config.run.dir)
    assert train.error.startswith(why)
    assert run_role("train", config, work) == 0


def test_a_log_that_cannot_be_written_is_told_once_and_ends_nothing(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(_name: str, _stop: asyncio.Event) -> None:
        for number in range(3):
            logging.getLogger("x").warning("line %d", number)

    (config.run.dir / "logs").mkdir()
    (config.run.dir / "logs" / "env-0.log").symlink_to("/dev/full")
    assert run_role("env", config, work) == 0
    output = told_of(capfd)
    assert output.count("No space left on device; log lines are lost") == 1
    assert "line 2" in output


@pytest.mark.parametrize(
    ("place", "target", "code", "why"),
    [
        ("workers/env-0.lock", "/dev/full", 1, "No space left on device; free space"),
        ("logs", "/proc/nothing", 2, "cannot be"),
        ("logs/env-0.log", "/proc/nothing", 2, "cannot be written"),
    ],
)
def test_a_directory_that_cannot_be_written_is_one_line_before_anything_starts(
    config: Config,
    capfd: pytest.CaptureFixture[str],
    place: str,
    target: str,
    code: int,
    why: str,
) -> None:
    async def never(_name: str, _stop: asyncio.Event) -> None:
        pytest.fail("it was started")

    link = config.run.dir / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    assert run_role("env", config, never) == code
    output = told_of(capfd).splitlines()
    assert len(output) == 1
    assert output[0].startswith("error: ")
    assert why in output[0]


@pytest.mark.parametrize("removed", [False, True])
def test_a_moved_run_directory_ends_its_processes_and_nothing_is_made_at_the_old_place(
    config: Config,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    removed: bool,
) -> None:
    monkeypatch.setattr(run_dir, "PLACE_S", 0.02)
    old, new = config.run.dir, config.run.dir.with_name("moved")

    async def work(_name: str, _stop: asyncio.Event) -> None:
        old.rename(new)
        if removed:
            shutil.rmtree(new)
        try:
            await asyncio.sleep(60)
        finally:
            with contextlib.suppress(OSError), atomic_directory(old / "weights" / "v000001"):
                pass

    assert run_role("train", config, work) == 2
    assert f"error: {old} was moved or removed while the run used it; start again" in told_of(capfd)
    assert not old.exists()
    if not removed:
        assert "was moved or removed" in last_error(new / "logs" / "train.log")


def test_an_error_that_comes_of_a_move_names_the_move(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(_name: str, _stop: asyncio.Event) -> None:
        config.run.dir.rename(config.run.dir.with_name("moved"))
        raise EngineError("no such file; is the disk full?")

    assert run_role("train", config, work) == 2
    assert "was moved or removed while the run used it" in told_of(capfd)


def test_a_process_that_does_not_end_when_its_directory_is_gone_is_ended(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from dart_cli.config.schema import Config, UpConfig\n"
        "from dart_cli.runtime import role, run_dir\n"
        "role.GRACE_S = run_dir.PLACE_S = 0.1\n"
        "here = Path(sys.argv[1])\n"
        "async def work(name, stop):\n"
        "    here.rename(here.with_name('moved'))\n"
        "    try:\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        time.sleep(60)\n"
        "config = Config.model_validate({'run': {'dir': here}})\n"
        "sys.exit(role.run_role('train', config, work))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "was moved or removed while the run used it" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "sees", "order"),
    [(None, "3", "PCI_BUS_ID"), ("4,5,6,7", "7", None), ("5", "5", None)],
)
def test_a_process_sees_the_gpus_that_the_run_gives_it(
    config: Config,
    chosen: str | None,
    sees: str,
    order: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name it takes decides which; a list of as many as it takes is its user's own choice for it."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # both are put back after the test
        monkeypatch.delenv(name)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    given = config.model_copy(update={"up": UpConfig(train_gpus=[0], rollout_gpus=[2, 3])})
    seen = []

    async def look(_name: str, _stop: asyncio.Event) -> None:
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER")))

    assert run_role("rollout", given, look, worker="rollout-1") == 0
    assert seen == [(sees, order)]  # the order is ours where the numbers are
