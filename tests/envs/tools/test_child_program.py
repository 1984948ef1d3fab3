"""Promises of a program in another interpreter: its answers, its blobs, its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import EnvError
from envs.tools.child_program import ChildProgram, find_named
from tests.waiting import lives, wait_until

ECHO = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "end":
        sys.exit("the last words")
    if asked["do"] == "hang":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(asked["file"], "w").write(f"{child.pid}\\n")
        time.sleep(1000)
    blobs = [b"\\n" * 70_000, b"", b"b"]
    print(json.dumps({"pid": os.getpid(), "blobs": [len(each) for each in blobs]}), flush=True)
    sys.stdout.buffer.write(b"".join(blobs))
    sys.stdout.buffer.flush()
"""


OWNER = """
import sys, time
from envs.suites.browsergym.tasks import source
from envs.tools.child_program import ChildProgram
program = ChildProgram(sys.executable, source())
program.start()
print(program.pid, flush=True)
time.sleep(1000)
"""


def ask(program: ChildProgram, **request: str) -> tuple[dict[str, int], list[bytes]]:
    return program.ask(request, 60.0, "the test")


def test_an_answer_comes_with_its_blobs_and_one_process_gives_them_all() -> None:
    program = ChildProgram(sys.executable, ECHO)
    first, blobs = ask(program, do="say")
    again, _ = ask(program, do="say")
    assert blobs == [b"\n" * 70_000, b"", b"b"]
    assert first == again == {"pid": program.pid}
    program.close()
    assert not lives(first["pid"])


def test_one_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    program, file = ChildProgram(sys.executable, ECHO), tmp_path / "pid"
    pid = ask(program, do="say")[0]["pid"]
    with pytest.raises(EnvError, match="the test: no answer in 1 s"):
        program.ask({"do": "hang", "file": str(file)}, 1.0, "the test")
    assert not lives(pid)
    if file.exists() and file.read_text():
        child = int(file.read_text())
        wait_until(lambda: not lives(child), "the end of what it started")
    assert ask(program, do="say")[0]["pid"] != pid  # a new one
    program.close()


def test_one_that_ends_says_its_last_line() -> None:
    program = ChildProgram(sys.executable, ECHO)
    with pytest.raises(EnvError, match="the test: its process ended: the last words"):
        ask(program, do="end")
    program.close()


@pytest.mark.parametrize(
    "line",
    ['{"blobs": [-1]}', '{"blobs": [99999999999]}', "[]", "no json", '{"error": "so it is"}'],
)
def test_a_wrong_answer_is_an_error_and_an_error_is_told(line: str) -> None:
    program = ChildProgram(sys.executable, f"input(); print({line!r}, flush=True); input()")
    with pytest.raises(EnvError, match="the test: so it is" if "error" in line else "its process"):
        ask(program, do="say")
    program.close()


def test_an_interpreter_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    program = ChildProgram(str(tmp_path / "python"), "")
    with pytest.raises(EnvError, match=r"cannot start .*: No such file"):
        ask(program, do="say")
    program.close()
    assert find_named(str(tmp_path / "python")) is None
    assert find_named(sys.executable) == sys.executable


def test_browsergym_s_program_ends_with_the_process_that_started_it() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OWNER,
        ],
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not lives(pid), "the end of the program", every_s=0.05)
