"""Promises about the programs of bundles: what they get, and what they are refused."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError
from envs.suites.cuagym.programs import ProgramResult, Programs, check_python
from tests.waiting import lives

DEADLINE_S = 60.0


@pytest.fixture
def programs() -> Iterator[Programs]:
    programs = Programs(sys.executable)
    yield programs
    programs.close()


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def run(
    programs: Programs, source: str, port: int = 1, deadline_s: float = DEADLINE_S
) -> ProgramResult:
    address = [("127.0.0.1", port)]
    return programs.run("reward.py", source, address, deadline_s=deadline_s, skip_sleep=False)


def test_a_program_prints_and_ends_with_its_status(programs: Programs) -> None:
    result = run(programs, "print('REWARD: 1.0'); raise SystemExit(3)")
    assert result.out == "REWARD: 1.0\n"
    assert result.status == 3
    assert "exit status 3" in result.why_failed


def test_each_program_begins_anew(programs: Programs) -> None:
    first = run(
        programs, "import builtins, json; builtins.left = json.left = 1; open('mine', 'w').close()"
    )
    assert first.why_failed == ""
    programs.empty()
    second = run(
        programs,
        "import builtins, json, os; print(hasattr(builtins, 'left'), hasattr(json, 'left'), os.listdir())",
    )
    assert second.out.startswith("False False [")
    assert "mine" not in second.out


def test_a_program_reaches_its_mock_and_nothing_else(programs: Programs, port: int) -> None:
    reaches = "import socket; socket.create_connection(('{host}', {port})).close()"
    assert run(programs, reaches.format(host="127.0.0.1", port=port), port).why_failed == ""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        elsewhere = other.getsockname()[1]
        assert (
            "a connection to"
            in run(programs, reaches.format(host="127.0.0.1", port=elsewhere), port).why_failed
        )
    assert (
        "the host example.com"
        in run(programs, reaches.format(host="example.com", port=port), port).why_failed
    )
    assert (
        "a port of its own"
        in run(programs, "import socket; socket.socket().bind(('', 0))", port).why_failed
    )


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("open('{elsewhere}', 'w')", "writing"),
        ("import os; os.remove('{elsewhere}')", "remove"),
        ("import os; os.rename('mine', '{elsewhere}')", "rename"),
        ("import subprocess; subprocess.run(['ls'])", "the program ls"),
        ("import os; os.system('ls')", "the program ls"),
        ("import os; os.execv('/bin/ls', ['ls'])", "the program /bin/ls"),
        ("import os; os.kill(os.getpid(), 0)", "a signal to process"),
        ("from reward_judge import call_llm_judge", "a model as a judge"),
        ("import ctypes; ctypes.CDLL('libc.so.6')", "a library"),
    ],
)
def test_what_a_program_may_not_have_is_refused_and_reported(
    programs: Programs, tmp_path: Path, source: str, what: str
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept", encoding="utf-8")
    text = source.replace("{elsewhere}", str(kept))
    # A program that catches the refusal is no better for it.
    hidden = f"try:\n    {text}\nexcept Exception: pass\nprint('REWARD: 1.0')"
    for program in (text, hidden):
        result = run(programs, program)
        assert what in " ".join(result.refused)
        assert result.why_failed
    assert kept.read_text(encoding="utf-8") == "kept"


def test_a_browser_is_noted_and_not_started(programs: Programs) -> None:
    result = run(
        programs,
        "import os, subprocess\n"
        "with subprocess.Popen(['google-chrome', '--new-window', 'http://a/?sid=1']) as process:\n"
        "    assert process.wait() == 0\n"
        "subprocess.run('nohup chromium \"http://b/\" &', shell=True)\n"
        "subprocess.run(['bash', '-c', 'DISPLAY=:0 google-chrome http://c/'])\n"
        "subprocess.run(['pkill', 'chrome'])",
    )
    assert result.why_failed == ""
    assert result.opened == ("http://a/?sid=1", "http://b/", "http://c/")


def test_a_program_that_hangs_is_killed_with_its_group(programs: Programs) -> None:
    result = run(
        programs, "import os, time; print(os.getpid(), flush=True); time.sleep(600)", deadline_s=5.0
    )
    assert result.status is None
    assert result.why_failed == "it did not end in time"
    assert not lives(int(result.out))


def test_a_program_sees_no_keys(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hush")
    assert "hush" not in run(programs, "import os; print(dict(os.environ))").out


def test_closing_leaves_nothing(programs: Programs) -> None:
    run(programs, "open('mine', 'w').close()")
    pid, folder = programs.pid, programs.folder
    assert pid is not None
    programs.close()
    assert not lives(pid)
    assert not folder.exists()


def test_an_interpreter_without_requests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check = "import json, sys\nsys.stdin.readline()\nprint(json.dumps({'requests': False}), flush=True)\nsys.stdin.readline()"
    monkeypatch.setattr("envs.suites.cuagym.programs._CHECK", check)
    with pytest.raises(MissingPartError, match="pip install requests"):
        check_python(sys.executable)
