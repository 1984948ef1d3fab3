"""A process that waits for another says so, in one wording, whichever was started first."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.heartbeat import awaited
from bus.messages import Role
from dart_cli.data.workers import WORKING
from dart_cli.runtime import waits
from dart_cli.runtime.waits import OpenWaits, announced_waits
from tests.simulated import QUICK
from tests.waiting import PATIENCE_S, until, wait_until

RUN = """
[run]
dir = "{dir}/run"
[env]
suite = "mini"
tasks = ["mini/popup"]
[rollout]
engine = "scripted"
[train]
learner = "{learner}"
updates = 1000000
[data]
group_size = 2
groups_per_batch = 1
"""
AWAITED: dict[Role, tuple[Role, ...]] = {
    "data": WORKING,
    "train": ("env", "rollout"),
    "rollout": ("train",),
    "env": ("rollout",),
}
"""Process -> those without which it has nothing to do; all of them need data."""


class Started:
    """A process of the run, started as a person starts it; `lines` are what it has printed."""

    def __init__(self, role: Role, config: Path) -> None:
        self.role = role
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dart_cli", role, str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines.extend(line.rstrip() for line in stream)

    def says(self, text: str) -> None:
        """Wait until it has said `text`; it must live until then."""
        wait_until(
            lambda: any(text in line for line in self.lines) or self.process.poll() is not None,
            f"{self.role} to say {text!r}, not {self.lines}",
        )
        self._reader.join(0 if self.process.poll() is None else PATIENCE_S)
        assert any(text in line for line in self.lines), (self.role, self.lines)

    def ends(self) -> int:
        """Its exit code, and all its lines are there."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(dir=tmp_path, learner=QUICK))
    return path


@pytest.fixture
def started(config: Path) -> Iterator[dict[str, Started]]:
    """The processes of a test by role; those that live are ended with it."""
    running: dict[str, Started] = {}
    yield running
    for each in running.values():
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
        each.ends()


@pytest.mark.parametrize(
    "order",
    [("env", "rollout", "data", "train"), ("train", "data", "env", "rollout")],
    ids="-".join,
)
def test_in_any_order_each_process_names_the_one_it_waits_for_and_how_to_start_it(
    order: tuple[Role, ...], config: Path, started: dict[str, Started]
) -> None:
    """Between them, the two orders have each process wait for each of those that it needs."""
    for role in order:
        started[role] = Started(role, config)
        if "data" not in started:
            started[role].says("waits for dart data at ipc://")
            started[role].says("start `dart data CONFIG`")
            continue
        absent = [each for each in WORKING if each not in started]
        for waiting in started.values():
            if missing := [each for each in absent if each in AWAITED[waiting.role]]:
                waiting.says(f"waits for {awaited(*missing)}")
    for each in started.values():
        if any("waits for" in line for line in each.lines):
            each.says("no longer waits for")
        warnings = [line for line in each.lines if "WARNING" in line]
        assert all("was paused for" in line for line in warnings), warnings  # a busy machine
    for role in ("env", "rollout", "train", "data"):
        started[role].process.send_signal(signal.SIGINT)
        assert started[role].ends() == 0


def test_data_alone_names_all_three_and_its_log_has_the_line(
    config: Path, started: dict[str, Started]
) -> None:
    data = started["data"] = Started("data", config)
    line = f"waits for {awaited('env', 'rollout', 'train')}"
    data.says(line)
    assert line in (config.parent / "run" / "logs" / "data.log").read_text()


async def test_a_wait_is_told_once_again_after_long_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.01)
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.02)
    text: list[str] = []
    wait = awaited("data", at="ipc:///a/b")
    async with announced_waits(lambda: wait, text.append):
        await until(lambda: text)
        await asyncio.sleep(0.1)
        assert text == ["waits for dart data at ipc:///a/b: start `dart data CONFIG`"]
        monkeypatch.setattr(waits, "AGAIN_S", 0.05)
        await until(lambda: len(text) > 1)
        assert "has waited" in text[1]
        monkeypatch.setattr(waits, "AGAIN_S", 600.0)
        number = len(text)
        wait = awaited("rollout")
        await until(lambda: len(text) > number)
        wait = ""
        await until(lambda: len(text) > number + 1)
    assert text[number:] == [
        "waits for dart rollout: start `dart rollout CONFIG`",
        "no longer waits for dart rollout",
    ]


async def test_a_short_wait_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.001)
    text: list[str] = []
    looks: list[str] = []

    def what() -> str:
        looks.append("dart data: start it" if len(looks) % 100 else "")
        return looks[-1]

    async with announced_waits(what, text.append):
        await until(lambda: len(looks) > 500)
    assert text == []


def test_open_waits_are_told_with_their_time_the_longest_first() -> None:
    now = [100.0]
    open_waits = OpenWaits(lambda: now[0])
    with open_waits.waiting("a reset", 60.0, since=90.0):
        now[0] = 104.0
        with open_waits.waiting("an answer"):
            now[0] = 107.0
            assert open_waits.lines() == ["17 s for a reset (at most 60 s)", "3 s for an answer"]
            assert open_waits.lines(after_s=5.0) == ["17 s for a reset (at most 60 s)"]
    assert open_waits.lines() == []


async def test_a_wait_that_lasts_is_a_line_of_progress_and_again_ever_more_rarely(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.0)
    now = [0.0]
    text: list[str] = []

    def clock() -> float:
        text.extend(capsys.readouterr().err.splitlines())
        return now[0]

    open_waits = OpenWaits(clock)
    async with open_waits.show():
        await asyncio.sleep(0)  # it begins to look
        with open_waits.waiting("a reset"), open_waits.waiting("another"):
            for second in range(1, 41):
                now[0] = float(second)
                for _ in range(4):  # it looks at each second
                    await asyncio.sleep(0)
    assert [line.split(" s for ")[0] for line in text] == [
        f"progress: has waited {seconds}" for seconds in (5, 15, 35)
    ]
    assert text[0].endswith("5 s for another, and for 1 other")
