"""`dart env check` finds each kind of mistake in a suite, and nothing in one without."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bus.errors import UserError
from dart_cli.cli.main import main
from dart_cli.config.schema import EnvConfig
from dart_cli.suite_check import CheckOptions
from dart_cli.suite_check.check_suite import Check, run_check
from tests.env.scored_suite import SUITE as SCORED
from tests.env.unruly_suite import SUITE as UNRULY
from tests.stopping import signal_in

SUITE = f"{Path(__file__).with_name('lax_suite.py')}:LaxSuite"


def check(suite: str, capsys: pytest.CaptureFixture[str], **wanted: Any) -> tuple[int, Any]:
    code = run_check(CheckOptions(suite, **wanted, as_json=True))
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_kind_of_mistake_is_found_where_it_is_and_nowhere_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, result = check(SUITE, capsys, seeds=6)
    assert code == 1
    assert not result["ok"]
    assert result["broken_files"] == ["tasks/x.json: id is missing"]
    tasks = result["per_task"]
    sound = {"lax/sound", "lax/infeasible", "lax/wide"}
    assert set(result["wrong"]) == set(tasks) - sound
    assert len(tasks["lax/true"]["true_at_reset"]) == 6
    assert tasks["lax/true"]["errors"] == []
    passes = {
        task: {found.split(": ")[1] for found in report["false_passes"]}
        for task, report in tasks.items()
        if report["false_passes"]
    }
    assert passes == {
        "lax/waits": {"by waiting until the steps are used up"},
        "lax/believes": {"by saying at once that it is done"},
        "lax/gives-up": {"by saying at once that it cannot be done"},
    }
    assert len(tasks["lax/bad-oracle"]["oracle_failures"]) == 6
    assert [task for task, report in tasks.items() if report["flaky"]] == [
        *("lax/other-words", "lax/other-pixels")
    ]
    assert "100.00% of the first" in tasks["lax/other-pixels"]["flaky"][0]
    assert "cannot be decoded" in tasks["lax/half-image"]["errors"][0]
    assert "is no PNG, JPEG or WebP image" in tasks["lax/no-image"]["errors"][0]
    assert "'click {what}'; fill in its fields" in tasks["lax/no-words"]["errors"][0]
    assert tasks["lax/infeasible"]["oracle"] == [6, 6], "saying so is its solution"
    assert result["unproven"] == []
    assert "lax/wide" in result["guessable"]
    assert tasks["lax/wide"]["random"] == [6, 6]
    assert {"lax/sound", "lax/wide"} <= set(result["fixed"])
    assert not {"lax/other-words", "lax/other-pixels"} & set(result["fixed"])


def test_a_sound_suite_has_nothing_to_fix(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = check("mini", capsys, seeds=2, tasks=["mini/popup*"], slots=2)
    assert code == 0
    assert result["ok"]
    assert result["episodes"] == result["tasks"] * 2 * 5
    assert all(report["oracle"] == [2, 2] for report in result["per_task"].values())


def test_tasks_whose_seeds_begin_alike_are_named_from_three_seeds_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = {"tasks": ["scored/0.4", "scored/1.0"], "probes": "random"}
    assert check(SCORED, capsys, seeds=3, **wanted)[1]["fixed"] == ["scored/0.4", "scored/1.0"]
    assert check(SCORED, capsys, seeds=2, **wanted)[1]["fixed"] == []
    assert check("mini", capsys, tasks=["mini/click"], probes="done")[1]["fixed"] == []
    run_check(CheckOptions(SCORED, **wanted))
    printed = " ".join(capsys.readouterr().out.split())
    assert "one fixed instance (all 3 seeds begin alike" in printed
    assert "env.heldout): all 2 tasks" in printed


def test_what_breaks_or_hangs_is_reported_and_the_others_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = EnvConfig(suite=UNRULY, reset_deadline_s=0.3)
    monkeypatch.setattr("dart_cli.suite_check.check_suite.env_of", lambda _: env)
    patterns = [f"unruly/{kind}" for kind in ("step-exit", "reset-hang", "evaluate-none", "well")]
    probes = "done,oracle"
    expected = {"seeds": 1, "tasks": patterns, "probes": probes}
    code, result = check(UNRULY, capsys, **expected)
    assert code == 1
    assert result["wrong"] == patterns[:-1]
    assert result["errors"] == 3
    assert "no answer to reset in 0.3 s" in result["per_task"]["unruly/reset-hang"]["errors"][0]
    assert result["per_task"]["unruly/well"]["oracle"] == [1, 1]


@pytest.mark.parametrize(
    ("number", "isolate"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        (signal.SIGTERM, True),
    ],
)
def test_stopped_by_a_signal_it_reports_what_it_has_and_names_the_call_that_hangs(
    number: signal.Signals,
    isolate: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signal_in(monkeypatch, "reset unruly/reset-hang", number)
    tasks = [f"unruly/{kind}" for kind in ("well", "reset-hang", "true")]
    expected = CheckOptions(
        UNRULY, tasks, seeds=1, probes="done,fail", isolate=isolate, as_json=True
    )
    code = run_check(expected)
    printed, text = capsys.readouterr()
    result = json.loads(printed)
    assert code == 128 + number
    assert (result["stopped"], result["ok"], list(result["per_task"])) == (True, False, tasks[:1])
    [wait] = result["waits"]
    assert wait.endswith(
        "s for check/0 to reset unruly/reset-hang, seed 0, probe done (at most 60 s)"
    )
    assert f"stopped by {number.name}; it had waited {wait}" in text


def test_a_task_that_is_under_way_at_the_stop_is_reported_as_far_as_it_was_played(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(check: Check, *given: Any) -> None:
        keep_before(check, *given)
        os.kill(os.getpid(), signal.SIGTERM)

    keep_before = Check._add
    monkeypatch.setattr(Check, "_add", kept)
    assert run_check(CheckOptions("mini", ["mini/click"], seeds=4, probes="done,fail")) == 143
    printed = capsys.readouterr().out
    assert "stopped: 0 of 1 task played to the end" in printed
    assert printed.splitlines()[-1] == "1 task, 1 episode: nothing to fix so far"


NEVER_READY = """
import sys
from pathlib import Path
from envs.contract.base import Task
from tests.env.unruly_suite import Unruly

class NeverEnv(Unruly):
    def reset(self, *, seed=None, options=None):
        said = Path(__file__).with_name("said.txt")
        if options["task"].id == "never/b" and not said.exists():
            said.write_text(sys.stderr.getvalue())
        if options["task"].id != "never/b":
            raise RuntimeError("the page is not idle")
        return super().reset(seed=seed, options=options)

class NeverSuite:
    name = "never"
    tasks = {f"never/{each}": Task(f"never/{each}", "never", "click", 3) for each in "abc"}

    def make_env(self):
        return NeverEnv()
"""


def test_a_task_whose_first_episode_breaks_is_played_no_further_and_that_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "never.py").write_text(NEVER_READY)
    with contextlib.redirect_stderr(io.StringIO()):
        assert run_check(CheckOptions(f"{file}:NeverSuite", out=tmp_path / "found.json")) == 1
    result = json.loads((tmp_path / "found.json").read_text())
    assert {task: each["episodes"] for task, each in result["per_task"].items()} == {
        "never/a": 1,
        "never/b": 15,
        "never/c": 1,
    }
    assert [each["left_out"] for each in result["per_task"].values()] == [14, 0, 14]
    breaks = "RuntimeError: the page is not idle"
    assert f"never/a breaks: seed 0, nothing: check/0: reset: {breaks}" in (
        (tmp_path / "said.txt").read_text()
    ), "before the next task began"
    printed = capsys.readouterr().out
    assert f"breaks: reset: {breaks} (2 episodes of 2 tasks, first never/a, seed 0" in printed
    assert "not played: 28 episodes of 2 tasks, whose first one broke" in printed


def test_slow_tasks_are_reported_and_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"slow_step": 0.0, "slow_reset": 0.0}
    code, result = check("mini", capsys, seeds=1, tasks=["mini/click"], **slow)
    assert code == 0
    assert result["slow"] == ["mini/click"]
    assert "95th percentile), bound 0 s" in result["per_task"]["mini/click"]["slow"][0]


def test_the_verb_prints_a_table_keeps_json_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "probes.json"
    with pytest.raises(SystemExit) as exit_:
        main(["env", "check", SUITE, "--seeds", "1", "--out", str(out), "--task", "!lax/other*"])
    assert exit_.value.code == 1
    printed = capsys.readouterr().out
    assert "lax/waits passes without doing it: seed 0: by waiting until" in printed
    assert "cannot be read: tasks/x.json: id is missing" in printed
    assert json.loads(out.read_text())["tasks"] == 11


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["minni"], "did you mean 'mini'"),
        (["mini", "--task", "mini/poppup"], "did you mean 'mini/popup'"),
        (["mini", "--option", "size"], "want KEY=VALUE"),
        (["mini", "--option", "sise=3"], "did you mean 'size'"),
        (["mini", "--option", "size=3x3"], "size must be 32 to 4096"),
        (
            ["miniwob", "--option", "chromium=/no", "--option", "scale=99"],
            "scale must be less than or equal to 8",
        ),
        (["miniwob", "--option", "chromium=/no/chromium"], "apt install chromium-headless-shell"),
        (["mini", "--probes", "lazy"], "there are nothing, done"),
        (["mini", "--task", "mini/click", "--out", "/no/such/x.json"], "is no folder /no/such;"),
        (["mini", "--task", "mini/click", "--out", "/"], "--out /: a folder; name a file"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["env", "check", *arguments])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert said in error.splitlines()[-1]
    assert "Traceback" not in error


RAISES = """
from envs.contract.base import Task
from tests.env.unruly_suite import Unruly

class RaisingEnv(Unruly):
    def reset(self, *, seed=None, options=None):
        if seed == 0:
            return super().reset(seed=seed, options=options)
        if seed == 2:
            raise ValueError("no such window")
        return [][1]

    def close(self):
        pass

class RaisingSuite:
    name = "raising"
    tasks = {each: Task(each, "raising", "click", 3) for each in ("raising/a", "raising/b")}

    def make_env(self):
        return RaisingEnv()
"""


@pytest.mark.parametrize("carrier", [(), ("--isolate", "--slots", "2")], ids=["thread", "process"])
def test_an_environment_that_always_raises_is_one_line_with_a_count_and_one_traceback(
    carrier: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / f"raises_{len(carrier)}.py"
    file.write_text(RAISES)
    with pytest.raises(SystemExit) as exit_:
        main(["env", "check", f"{file}:RaisingSuite", "--probes", "done,random", *carrier])
    assert exit_.value.code == 1
    output = capfd.readouterr()
    broken = [line for line in output.out.splitlines() if line.startswith("breaks: ")]
    assert len(broken) == 2
    assert "IndexError: list index out of range (4 episodes of 2 tasks, first" in broken[0]
    assert "ValueError: no such window (4 episodes of 2 tasks, first" in broken[1]
    assert "tracebacks are above, on standard error" in output.out
    assert caplog.text.count("Traceback (most recent call last)") == 2  # places that raise
    assert caplog.text.count("return [][1]") == 1
    assert output.out.splitlines()[-1] == "2 tasks, 12 episodes: 2 to fix"


def test_what_was_found_is_printed_though_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    out = tmp_path / "x.json"
    expected = CheckOptions("mini", ["mini/click"], seeds=1, probes="done", out=out)
    with pytest.raises(UserError, match=r"cannot be written: No space left"):
        run_check(expected)
    assert "1 task, 1 episode: nothing to fix" in capsys.readouterr().out


@pytest.mark.parametrize("raised", ["RuntimeError('4')", "SystemExit(4)"])
def test_a_make_env_that_breaks_is_one_line(raised: str, tmp_path: Path) -> None:
    path = tmp_path / "own_suite.py"
    path.write_text(
        "from envs.suites.embedded.suites import MiniSuite\n\n"
        f"class Own(MiniSuite):\n    def make_env(self, **_):\n        raise {raised}\n"
    )
    kind = raised.partition("(")[0]
    with pytest.raises(UserError, match=f"Own makes no environment: {kind}: 4"):
        run_check(CheckOptions(f"{path}:Own", seeds=1))
