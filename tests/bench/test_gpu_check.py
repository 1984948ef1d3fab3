"""scripts/gpu-check without a GPU: each check runs here on a small model, and none can stop the others."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import ROOT, Outcome, report, requirements, run_check
from benchmarks.gpu_settings import BrokenError, Check, MissedError, Settings
from tests.waiting import lives, until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("cpu", True, tmp_path)


def outcome(run: Callable[[Settings], dict[str, Any]], settings: Settings) -> Outcome:
    return run_check(Check("it", run, 30.0), settings, 30.0)


def test_what_a_check_found_is_recorded(settings: Settings) -> None:
    done = outcome(lambda _: {"tokens_s": 12.5}, settings)
    assert (done.state, done.found, done.why) == ("ok", {"tokens_s": 12.5}, "")


def test_a_check_that_fails_says_why_and_what_it_had_measured(settings: Settings) -> None:
    def broken(_: Settings) -> dict[str, Any]:
        raise BrokenError("gradients differ", {"difference": 0.5})

    def faulty(_: Settings) -> dict[str, Any]:
        return {"ratio": 1 / int("0")}

    done = outcome(broken, settings)
    assert (done.state, done.found) == ("failed", {"difference": 0.5})
    assert "gradients differ" in done.why
    done = outcome(faulty, settings)
    assert done.state == "failed"
    assert "ZeroDivisionError" in done.why
    assert "test_gpu_check.py" in done.why


def test_a_check_that_these_packages_cannot_run_is_missed_by_name(settings: Settings) -> None:
    def needs(_: Settings) -> dict[str, Any]:
        import surely_not_installed  # type: ignore[import-not-found]

        return dict(surely_not_installed.found)

    def missed(_: Settings) -> dict[str, Any]:
        raise MissedError("torch sees no CUDA device")

    assert (outcome(needs, settings).state, outcome(missed, settings).state) == ("missed",) * 2
    assert "surely_not_installed" in outcome(needs, settings).why
    assert outcome(missed, settings).why == "torch sees no CUDA device"


def test_a_check_that_dies_or_hangs_ends_and_is_recorded(settings: Settings) -> None:
    def dies(_: Settings) -> dict[str, Any]:
        os._exit(9)

    def hangs(_: Settings) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    assert "ended with 9" in outcome(dies, settings).why
    done = run_check(Check("it", hangs, 0.2), settings, 0.2)
    assert (done.state, done.why) == ("failed", "not over after 0 s")


def test_what_a_check_that_hangs_has_started_ends_with_it(settings: Settings) -> None:
    note = settings.scratch / "pid"

    def hangs(_: Settings) -> dict[str, Any]:
        process = subprocess.Popen(["sleep", "600"])
        note.write_text(str(process.pid))
        process.wait()
        return {}

    run_check(Check("it", hangs, 10.0), settings, 10.0)
    asyncio.run(until(lambda: not lives(int(note.read_text()))))


def test_the_report_names_what_failed_and_what_was_missed() -> None:
    outcomes = [
        Outcome("a", "ok", 1.0, {"gb": 15.2}),
        Outcome("b", "failed", 2.0, {}, "it broke"),
        Outcome("c", "missed", 0.0, {}, "no peft"),
    ]
    made = report(outcomes, 0.0)
    assert made["failed"] == ["b"]
    assert made["missed"] == {"c": "no peft"}
    assert made["checks"]["a"] == {"state": "ok", "seconds": 1.0, "gb": 15.2}
    assert made["checks"]["b"]["why"] == "it broke"
    assert made["versions"]["torch"]


def test_nothing_that_the_project_needs_is_missing_here() -> None:
    assert requirements() == []


@pytest.mark.timeout(1300)
@pytest.mark.slow
def test_every_check_runs_on_a_cpu_with_a_small_model(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.json"
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", "--device", "cpu", "--tiny", "--minutes", "20", "--out", out],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    checks = found["checks"]
    assert {name: each["state"] for name, each in checks.items()} == dict.fromkeys(checks, "ok")
    assert list(checks) == [
        *("machine", "attention", "model", "update", "one_by_one", "plain_loop", "parity"),
        *("publication", "lora", "tests"),
    ]
    assert json.loads(out.read_text())["checks"] == checks
    assert [row["layers"] for row in checks["update"]["depths"]] == [1, 2]
    assert checks["update"]["chains"] == 4  # of 8 samples: an eviction in each trajectory
    assert checks["update"]["tokens"] < checks["update"]["tokens_one_by_one"]
    assert checks["one_by_one"]["relative_difference"] < 0.02
    assert not list(Path("/dev/shm").glob("gpu-check-*/shards/complete"))
