"""scripts/gpu-check without a GPU: each check runs here on a small model, and none can stop the others."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check import (
    CHECKS,
    RESERVE_S,
    RESULT,
    ROOT,
    Check,
    Outcome,
    Run,
    allowance,
    place,
    requirements,
    result_file,
)
from benchmarks.gpu.kernels import judged
from benchmarks.gpu.settings import BrokenError, MissedError, Settings
from tests.waiting import PATIENCE_S, lives, wait_until

LONG_S = 1000.0
SHARED = [check for check in CHECKS if not check.is_spare]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("cpu", True, tmp_path)


def run_of(checks: list[Check], scratch: Path, limit_s: float = LONG_S) -> Run:
    return Run(checks, scratch / "gpu.json", scratch, time.monotonic(), limit_s)


def outcome(
    run: Callable[[Settings], dict[str, Any]],
    settings: Settings,
    seconds: float = 100.0,
    share: float = 30.0,
) -> Outcome:
    check = Check("it", run, share)
    return run_of([check], settings.scratch).one(check, settings, seconds)


def test_what_a_check_found_is_recorded(settings: Settings) -> None:
    done = outcome(lambda _: {"tokens_s": 12.5}, settings)
    assert (done.state, done.measured, done.why) == ("ok", {"tokens_s": 12.5}, "")


def test_a_check_that_fails_says_why_and_what_it_had_measured(settings: Settings) -> None:
    def broken(_: Settings) -> dict[str, Any]:
        raise BrokenError("gradients differ", {"difference": 0.5})

    def faulty(_: Settings) -> dict[str, Any]:
        return {"ratio": 1 / int("0")}

    done = outcome(broken, settings)
    assert (done.state, done.measured) == ("failed", {"difference": 0.5})
    assert "gradients differ" in done.why
    done = outcome(faulty, settings)
    assert done.state == "failed"
    assert "ZeroDivisionError" in done.why
    assert "test_gpu_check.py" in done.why


def test_a_check_that_these_packages_cannot_run_is_missed_by_name(settings: Settings) -> None:
    def needs(_: Settings) -> dict[str, Any]:
        import surely_not_installed  # type: ignore[import-not-found]

        return dict(surely_not_installed.figures)

    def missed(_: Settings) -> dict[str, Any]:
        raise MissedError("torch sees no CUDA device")

    assert (outcome(needs, settings).state, outcome(missed, settings).state) == ("missed",) * 2
    assert "surely_not_installed" in outcome(needs, settings).why
    assert outcome(missed, settings).why == "torch sees no CUDA device"


def hangs(_: Settings) -> dict[str, Any]:
    threading.Event().wait()
    return {}


def test_a_check_that_dies_or_hangs_ends_and_is_recorded(settings: Settings) -> None:
    def dies(_: Settings) -> dict[str, Any]:
        os._exit(9)

    assert "ended with 9" in outcome(dies, settings).why
    done = outcome(hangs, settings, seconds=0.2, share=0.1)
    assert done.state == "failed"
    assert done.why.startswith("not over after 0 s")


def test_a_check_that_is_not_over_says_where_it_is(tmp_path: Path) -> None:
    stack = tmp_path / "stack.txt"
    assert place(stack) == ""
    with stack.open("w") as file:
        faulthandler.dump_traceback(file)
    found = re.fullmatch(
        r"; in test_gpu_check\.py:\d+ test_a_check_that_is_not_over_says_where_it_is.*",
        place(stack),
    )
    assert found, stack.read_text()


def test_a_check_that_had_less_than_its_share_is_left_out_and_has_not_failed(
    settings: Settings,
) -> None:
    done = outcome(hangs, settings, seconds=0.2, share=30.0)
    assert done.state == "left_out"
    assert done.why.startswith("not over in the 0 s left to it")


def test_what_a_check_has_started_ends_with_it(settings: Settings) -> None:
    note = settings.scratch / "pid"

    def leaves(_: Settings) -> dict[str, Any]:
        note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        return {}

    assert outcome(leaves, settings).state == "ok"
    wait_until(lambda: not lives(int(note.read_text())), "the process that the check had started")


# --- the time they share --------------------------------------------------------------------------


@pytest.mark.parametrize("total", [20.0, 300.0, 525.0, 2000.0])
def test_checks_that_use_all_they_may_leave_each_later_one_its_share(total: float) -> None:
    left, shares = total, sum(check.seconds for check in SHARED)
    for number, check in enumerate(CHECKS):
        taken = allowance(check, CHECKS[number + 1 :], left)
        if check.is_spare:
            assert taken == pytest.approx(max(0.0, total - shares), abs=1e-6) or taken == 0.0
        else:
            assert taken >= check.seconds * min(1.0, total / shares) - 1e-6
        left -= taken
        assert left >= -1e-6
    assert left == pytest.approx(0.0, abs=1e-6)


def test_what_a_check_does_not_use_the_next_one_may() -> None:
    first, second, third = (Check(name, hangs, 10.0) for name in "abc")
    assert allowance(first, [second, third], 30.0) == 10.0
    assert allowance(second, [third], 30.0 - 1.0) == 19.0


def test_nine_minutes_hold_every_share_and_a_minute_of_imports() -> None:
    assert sum(check.seconds for check in SHARED) + RESERVE_S + 60 <= 540


def test_without_vllm_and_a_second_gpu_nine_minutes_hold_a_spare_check_in_whole() -> None:
    at = next(number for number, check in enumerate(CHECKS) if check.is_spare)
    used = sum(each.seconds for each in CHECKS[:at] if each.name not in ("vllm", "two_gpus"))
    left = 540 - RESERVE_S - 60 - used
    assert allowance(CHECKS[at], CHECKS[at + 1 :], left) >= CHECKS[at].seconds


def test_a_spare_check_runs_in_what_the_others_leave_or_not_at_all(settings: Settings) -> None:
    spare, other = Check("spare", lambda _: {}, 10.0, is_spare=True), Check("other", hangs, 90.0)
    assert allowance(spare, [other], 97.0) == 7.0
    assert allowance(other, [spare], 97.0) == 97.0
    run = run_of([spare, Check("other", lambda _: {}, 90.0)], settings.scratch, RESERVE_S + 92.0)
    run.all(settings)
    assert [(each.name, each.state) for each in run.outcomes] == [
        ("spare", "left_out"),
        ("other", "ok"),
    ]
    assert run.outcomes[0].why == "the other checks need the time"


def test_what_the_time_does_not_suffice_for_is_listed_and_has_not_failed(
    settings: Settings,
) -> None:
    checks = [Check("first", lambda _: {}, 1.0), Check("second", lambda _: {}, 1.0)]
    run = run_of(checks, settings.scratch, RESERVE_S + 1.0)
    run.all(settings)
    found = json.loads(run.out.read_text())
    assert found["left_out"] == {"first": "no time was left", "second": "no time was left"}
    assert (run.finish(), found["failed"]) == (0, [])


HANGING = """
import ctypes, multiprocessing.connection, os, pathlib, signal, sys, threading, time
from benchmarks.gpu.check import Check, Run
from benchmarks.gpu.settings import Settings
scratch, how = pathlib.Path(sys.argv[1]), sys.argv[2]

def waits(_):
    (scratch / "pid").write_text(str(os.getpid()))
    (scratch / "pid").rename(scratch / "begun")
    if how == "check":
        os.kill(os.getppid(), signal.SIGALRM)  # as at the end of the time
    threading.Event().wait()

def hangs_in_c(_receiver, _seconds):
    "In place of waiting for the check: no handler of Python's can run."
    while not (scratch / "begun").exists():
        time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    run.limit_s = time.monotonic() - run.began + 0.1
    run.watch()
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock

if how == "interpreter":
    multiprocessing.connection.Connection.poll = hangs_in_c
checks = [Check(name, waits, 600) for name in ("waits", "later")]
files = scratch / "files"
files.mkdir()
run = Run(checks, scratch / "gpu.json", files, time.monotonic(), 2000)
run.watch()
run.all(Settings("cpu", True, files))
"""


@pytest.mark.parametrize("how", ["check", "interpreter"])
def test_the_command_ends_in_time_whatever_hangs(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, tmp_path, how],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == (0 if how == "check" else 1), done.stderr
    pid = int((tmp_path / "begun").read_text())
    wait_until(lambda: not lives(pid), "the check that was running")
    if how == "check":
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["left_out"] == {"waits": "not over", "later": "not over"}
        assert json.loads((tmp_path / "gpu.json").read_text())["left_out"] == found["left_out"]


# --- the report -----------------------------------------------------------------------------------


def test_the_report_names_what_failed_what_was_missed_and_what_was_left_out(tmp_path: Path) -> None:
    run = run_of([Check(name, hangs, 1.0) for name in "abcd"], tmp_path)
    run.outcomes = [
        Outcome("a", "ok", 1.0, {"gb": 15.2, "seconds": 7.5}),
        Outcome("b", "failed", 2.0, {}, "it broke"),
        Outcome("c", "missed", 0.0, {}, "no peft"),
    ]
    made = run.report()
    assert made["failed"] == ["b"]
    assert made["missed"] == {"c": "no peft"}
    assert made["left_out"] == {"d": "not over"}
    assert made["checks"]["b"]["why"] == "it broke"
    assert made["versions"]["torch"]
    # Seconds that a check measured are not those that it took.
    assert made["checks"]["a"]["seconds"] == 1.0
    assert made["checks"]["a"]["measured"] == {"gb": 15.2, "seconds": 7.5}


def test_a_trial_or_a_part_of_the_checks_replaces_no_result() -> None:
    assert result_file("cuda", tiny=False, only=[]) == RESULT
    assert result_file("cuda:1", tiny=False, only=[]) == RESULT
    for device, tiny, only in (("cpu", True, []), ("cpu", False, []), ("cuda", True, [])):
        assert not result_file(device, tiny=tiny, only=only).is_relative_to(ROOT)
    assert not result_file("cuda", tiny=False, only=["attention"]).is_relative_to(ROOT)


def test_the_tests_of_the_gpu_are_counted_and_none_run_is_no_success() -> None:
    found = judged(0, "...\n3 passed, 1 skipped, 42 deselected in 4.2s\n", on_gpu=True)
    assert (found["passed"], found["skipped"], found["deselected"]) == (3, 1, 42)
    for code, output in (
        (5, "42 deselected in 1.0s"),
        (5, "no tests ran in 0.1s"),
        (0, "24 skipped, 42 deselected in 1.0s"),
        (1, "1 failed, 3 passed in 1.0s"),
        (1, "1 failed, 3 passed in 1.0s\nE  No module named 'zmq'\n1 failed, 3 passed in 1.0s"),
        (2, "INTERNALERROR"),
    ):
        with pytest.raises(BrokenError):
            judged(code, output, on_gpu=True)


def test_tests_that_need_what_is_not_installed_are_missed_and_the_others_count() -> None:
    lacks = "E   ModuleNotFoundError: No module named 'zmq'\n"
    with pytest.raises(MissedError, match="zmq"):
        judged(2, f"{lacks}1 error in 3.0s", on_gpu=True)
    found = judged(1, f"{lacks}16 passed, 42 deselected, 1 error in 3.0s", on_gpu=True)
    assert (found["passed"], found["errors"], found["not_installed"]) == (16, 1, ["zmq"])


def test_without_a_gpu_its_tests_are_missed_with_their_number() -> None:
    with pytest.raises(MissedError, match="24 collected, none run"):
        judged(0, "24/178 tests collected (154 deselected) in 5.5s", on_gpu=False)
    with pytest.raises(BrokenError):
        judged(5, "no tests collected (178 deselected) in 5.5s", on_gpu=False)


def test_nothing_that_the_project_needs_is_missing_here() -> None:
    assert requirements() == []


# --- the command ----------------------------------------------------------------------------------

BARE = '''
"""As on a machine that lacks the packages named in LACKING."""
import importlib.metadata, os, sys
lacking = set(os.environ["LACKING"].split())
names = {"zmq": "pyzmq", "sqlite_utils": "sqlite-utils"}
class Lacking:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in lacking else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Lacking, sys.meta_path)
version = importlib.metadata.version
def installed(name):
    if name in {names.get(each, each) for each in lacking}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = installed
'''


def gpu_check(tmp_path: Path, *lacking: str, only: str = "") -> dict[str, Any]:
    """The command's last line, of a machine without these packages; of one check and what it needs, or of all."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    out = tmp_path / "results" / "gpu.json"
    checking = subprocess.Popen(
        [
            *(
                ROOT / "scripts/gpu-check",
                "--device",
                "cpu",
                "--tiny",
                "--minutes",
                "20",
                "--out",
                out,
            ),
            *(("--only", *only.split()) if only else ()),
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "LACKING": " ".join(lacking)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out_text, err_text = checking.communicate(timeout=PATIENCE_S)
    assert checking.returncode == 0, out_text[-3000:] + err_text[-3000:]
    assert "Traceback" not in err_text
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        assert not list(folder.glob(f"gpu-check-{checking.pid}-*")), "it left its scratch behind"
    found: dict[str, Any] = json.loads(out_text.splitlines()[-1])
    assert json.loads(out.read_text())["checks"] == found["checks"]
    return found


@pytest.mark.slow
def test_on_a_bare_machine_each_check_says_what_it_lacks(tmp_path: Path) -> None:
    found = gpu_check(tmp_path, "pydantic", "zmq", "lark", "sqlite_utils", "typer", "msgpack")
    assert {line.partition(">")[0] for line in found["not_installed"]} == {
        *("pydantic", "pyzmq", "lark", "sqlite-utils", "typer", "msgpack")
    }
    ran = {name for name, each in found["checks"].items() if each["state"] == "ok"}
    assert ran == {"machine", "attention"}
    assert set(found["missed"]) == {check.name for check in CHECKS} - ran
    assert all("pydantic" in found["missed"][name] for name in ("model", "update", "parity"))


@pytest.mark.slow
def test_every_check_runs_on_a_cpu_with_a_small_model_and_without_the_bus(tmp_path: Path) -> None:
    found = gpu_check(tmp_path, "zmq", "lark", "sqlite_utils", "typer", "tensorboard")
    checks = found["checks"]
    assert list(checks) == [check.name for check in CHECKS]
    assert set(found["missed"]) == {"parity", "vllm", "two_gpus", "tests", "loop"}
    for name in ("parity", "two_gpus"):
        assert "zmq" in found["missed"][name]
    assert {each["state"] for each in checks.values()} == {"ok", "missed"}
    update = checks["update"]["measured"]
    assert [row["layers"] for row in update["depths"]] == [1, 2]
    assert update["chains"] == 4  # of 8 samples: an eviction in each trajectory
    assert update["tokens"] < update["tokens_one_by_one"]
    assert checks["one_by_one"]["measured"]["relative_difference"] < 0.02
    assert checks["lora"]["measured"]["seconds"] < checks["lora"]["seconds"]


@pytest.mark.slow
def test_parity_and_two_ranks_run_on_a_cpu_with_a_small_model(tmp_path: Path) -> None:
    """Beside them, `vllm` and the last two, all ran above."""
    found = gpu_check(tmp_path, only="parity two_gpus")
    assert found["not_installed"] == []
    assert found["missed"] == {}
    parity, ranks = (found["checks"][name] for name in ("parity", "two_gpus"))
    assert (parity["state"], ranks["state"]) == ("ok", "ok")
    assert any("224x168, up to 5 in a prompt" in line for line in parity["measured"]["findings"])
    assert ranks["measured"]["moved"] > 0


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_vllm_runs_on_a_cpu_with_a_small_model(settings: Settings) -> None:
    """Its weights: for another start, with adapters, there is no time here."""
    from benchmarks.gpu import serving, training

    training.model(settings)
    found = serving.vllm(replace(settings, seconds=1.0))
    assert found["adapters"].startswith("not begun: the weights took")
    weights = found["weights"]
    assert any("run's screens" in line for line in weights["before"])
    assert weights["longest_prompt"] > 3 * serving.CHUNK
    assert weights["after"]["tokens"] > 500
    assert weights["after"]["mean"] < 0.01 < weights["moved"]


# --- what a machine lacks -------------------------------------------------------------------------


def test_without_vllm_or_a_second_gpu_their_checks_are_missed_by_name(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import ranks, serving

    monkeypatch.setattr("dart_cli.config.devices.vllm_installed", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    on_one = replace(settings, device="cuda")
    for check, why in (
        (serving.vllm, "vLLM is not installed"),
        (ranks.two_gpus, "two GPUs are needed, torch sees 1"),
    ):
        done = outcome(check, on_one)
        assert done.state == "missed"
        assert why in done.why
