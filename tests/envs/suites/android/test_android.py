"""Promises of suite `android`: the commands that reach a device, by a real program and a real shell.

The device is a folder (fake_adb.py): its shell, quoting and the rules of `input text` are real.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import (
    Action,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)
from envs.contract.base import GuiEnv
from envs.contract.registry import check_parts, load_suite, make_env
from envs.suites.android.actions import MOST_POINTS, TEXT_CHUNK, scripts_of, unwritten
from envs.suites.android.adb import AdbTransport
from envs.suites.android.env import AndroidEnv, AndroidSuite

SIZE = (90, 160)


def _install(folder: Path) -> str:
    path = Path(__file__).with_name("fake_adb.py")
    spec = importlib.util.spec_from_file_location("fake_adb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.install(folder))


class Device:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adb = _install(folder)
        screen = io.BytesIO()
        Image.new("RGB", SIZE, "navy").save(screen, "PNG")
        self.png = screen.getvalue()
        (folder / "screen").write_bytes(self.png)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "device")


@pytest.fixture
def env(device: Device) -> Iterator[AndroidEnv]:
    env = make_env("android", adb=device.adb, serial="R58M", pause_s=0, deadline_s=20)
    assert isinstance(env, AndroidEnv)
    yield env
    env.close()
    env.close()  # a second close is harmless


def begin(env: AndroidEnv, name: str) -> Any:
    return env.reset(seed=1, options={"task": f"android/{name}"})


# --- an episode --------------------------------------------------------------------------------


def test_an_episode_is_judged_by_the_devices_settings(env: AndroidEnv, device: Device) -> None:
    assert isinstance(env, GuiEnv)
    screen, info = begin(env, "brightness")
    assert (screen.width, screen.height, screen.media_type) == (*SIZE, "image/png")
    assert "brightness" in info["instruction"]
    assert env.evaluate().outcome == "fail"
    assert env.step(Click(x=10, y=20))[1:3] == (0.0, False)
    assert device.read("inputs").endswith("tap 10 20\n")
    (device.folder / "setting-system-screen_brightness").write_text("255")
    assert env.step(Done())[1:3] == (1.0, True)
    with pytest.raises(EnvError, match="over"):
        env.step(Done())


def test_an_episode_whose_task_is_done_at_reset_is_refused(env: AndroidEnv, device: Device) -> None:
    (device.folder / "setting-global-airplane_mode_on").write_text("1")
    with pytest.raises(EnvError, match="already done at reset"):
        begin(env, "airplane")
    assert env.evaluate().outcome == "invalid"


def test_fail_does_not_pass_what_can_be_done(env: AndroidEnv, device: Device) -> None:
    begin(env, "brightness")
    (device.folder / "setting-system-screen_brightness").write_text("255")
    assert env.step(Fail())[1:3] == (0.0, True)


def test_every_command_names_its_device(env: AndroidEnv, device: Device) -> None:
    begin(env, "airplane")
    env.step(Click(x=1, y=1))
    told = [line for line in device.read("log").split("\n") if line]
    assert told
    assert all(line.startswith("['-s', 'R58M', ") for line in told)


def test_a_state_is_judged_once_and_another_one_again(tmp_path: Path, device: Device) -> None:
    note = {"type": "adb_shell", "parameters": {"command": "echo judged >> $DEVICE/judged"}}
    told = {"type": "adb_shell", "command": "wc -l < $DEVICE/judged"}
    task = {
        "id": "counts",
        "instruction": "Be judged.",
        "evaluator": {
            "postconfig": [note],
            "func": "exact_match",
            "result": told,
            "expected": {"type": "rule", "rules": {"expected": "1"}},
        },
    }
    (tmp_path / "counts.json").write_text(json.dumps(task))
    env = AndroidSuite(tmp_path).make_env(adb=device.adb, serial="R58M", pause_s=0)
    try:
        begin(env, "counts")
        assert env.step(Done())[1:3] == (1.0, True)
        assert [env.evaluate().outcome for _ in range(3)] == ["pass"] * 3
        assert device.read("judged") == "judged\n"
        begin(env, "counts")
        assert env.evaluate().outcome == "fail"
        env.step(Click(x=1, y=1))
        assert "exact_match" in env.evaluate().reason
        assert device.read("judged") == "judged\n" * 3
    finally:
        env.close()


def test_a_device_that_went_away_is_invalid(env: AndroidEnv, device: Device) -> None:
    begin(env, "airplane")
    (device.folder / "devices").write_text("emulator-5554")
    with pytest.raises(EnvError, match=r"R58M: adb .*device 'R58M' not found"):
        env.step(Click(x=1, y=1))
    assert env.evaluate().outcome == "invalid"


def test_an_evaluator_that_breaks_is_invalid(env: AndroidEnv, device: Device) -> None:
    begin(env, "airplane")
    (device.folder / "bin" / "settings").write_text("#!/bin/sh\necho no service >&2\nexit 20\n")
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert "exit code 20: no service" in verdict.reason


def test_a_hung_adb_costs_its_deadline_and_leaves_no_process(device: Device) -> None:
    transport = AdbTransport(device.adb, deadline_s=1.0)
    (device.folder / "hangs").touch()
    with pytest.raises(EnvError, match="the device: adb shell true: no answer in 1 s"):
        transport.shell("true")
    assert not _running(str(device.folder))


def _running(word: str) -> list[str]:
    """Processes with `word` on their command line."""
    results = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if word in line and each.parent.name != str(os.getpid()):
            results.append(line)
    return results


def test_a_device_that_never_boots_costs_its_deadline(device: Device) -> None:
    (device.folder / "booting").touch()
    with pytest.raises(EnvError, match=r"was not ready in 0\.3 s: (it is booting|.* no answer in)"):
        AdbTransport(device.adb).wait_ready(0.3)


def test_a_snapshot_is_loaded_at_reset(device: Device) -> None:
    env = AndroidSuite().make_env(adb=device.adb, snapshot="clean", pause_s=0, encoding="jpeg")
    screen, _ = begin(env, "airplane")
    assert Image.open(io.BytesIO(screen.screenshot)).format == "JPEG"
    assert "['emu', 'avd', 'snapshot', 'load', 'clean']" in device.read("log")
    env.close()


def test_warnings_before_a_screenshot_are_left_out(device: Device) -> None:
    (device.folder / "screen").write_bytes(b"[Warning] Multiple displays were found\n" + device.png)
    assert AdbTransport(device.adb).screenshot() == device.png
    (device.folder / "screen").write_bytes(b"error: closed")
    with pytest.raises(EnvError, match="gave no PNG: error: closed"):
        AdbTransport(device.adb).screenshot()


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "two words  and three",
        'it\'s "quoted" `x` $(touch owned) $HOME \\ \\n',
        "100%s 50% s %%s %s%s %",
        "a;b|c&d>e<f*g?h[i]j{k}l~m#n!o(p)^q=r",
        "line one\nline two\tend\n",
        "-d --help",
        " lead and trail ",
        "x" * (TEXT_CHUNK - 1) + "%s" + "y" * TEXT_CHUNK,
    ],
)
def test_text_arrives_unchanged(env: AndroidEnv, device: Device, text: str) -> None:
    begin(env, "airplane")
    assert env.step(Type(text=text))[4]["unwritten"] == ""
    assert device.read("typed") == text
    assert not list(device.folder.rglob("owned"))


def test_characters_without_a_key_are_left_out_and_named(env: AndroidEnv, device: Device) -> None:
    begin(env, "airplane")
    assert env.step(Type(text="naïve 北京 ok"))[4]["unwritten"] == "ï北京"
    assert device.read("typed") == "nave  ok"


def test_the_adb_keyboard_writes_everything(env: AndroidEnv, device: Device) -> None:
    keyboard = device.folder / "setting-secure-default_input_method"
    keyboard.write_text("com.android.adbkeyboard/.AdbIME")
    begin(env, "airplane")
    text = "naïve 北京 %s 'x'\n€"
    assert env.step(Type(text=text))[4]["unwritten"] == ""
    assert device.read("typed") == text


# --- other actions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "scripts"),
    [
        (Click(x=5, y=6), ["input tap 5 6"]),
        (Click(x=-5, y=10**20), ["input tap 0 159"]),
        (Click(x=5, y=6, button="right"), ["input swipe 5 6 5 6 800"]),
        (DoubleClick(x=5, y=6), ["input tap 5 6 & sleep 0.1; input tap 5 6; wait"]),
        (Drag(path=[(1, 2), (30, 40)]), ["input swipe 1 2 30 40 400"]),
        (
            Drag(path=[(1, 2), (3, 4), (5, 6)]),
            [
                "; ".join(
                    f"input motionevent {each}"
                    for each in ("DOWN 1 2", "MOVE 3 4", "MOVE 5 6", "UP 5 6")
                )
            ],
        ),
        (Scroll(x=45, y=80, dy=2), ["input swipe 45 80 45 54 400"]),
        (Scroll(x=45, y=80, dy=-2), ["input swipe 45 80 45 106 400"]),
        (Scroll(x=45, y=5, dy=10**9), ["input swipe 45 143 45 16 400"]),
        (Scroll(x=45, y=80), []),
        (KeyPress(keys=["enter"]), ["input keyevent 66"]),
        (KeyPress(keys=["Home"]), ["input keyevent 3"]),
        (KeyPress(keys=["ctrl", "a"]), ["input keycombination 113 29"]),
        (KeyPress(keys=["A"]), ["input keycombination 59 29"]),
        (KeyPress(keys=["shift", "A"]), ["input keycombination 59 29"]),
        (KeyPress(keys=["ctrl", "; reboot"]), []),
        (Move(x=1, y=1), []),
        (
            TripleClick(x=5, y=6),
            ["input tap 5 6 & sleep 0.1; input tap 5 6 & sleep 0.1; input tap 5 6; wait"],
        ),
        (Click(x=5, y=6, modifiers=("ctrl",)), []),
        (Drag(path=[(1, 2), (30, 40)], button="right"), []),
        (KeyDown(key="shift"), []),
        (KeyUp(key="shift"), []),
        (MouseDown(), []),
        (MouseUp(x=5, y=6), []),
        (Wait(), []),
        (Done(), []),
    ],
)  # fmt: skip
def test_an_action_gives_these_commands(action: Action, scripts: list[str]) -> None:
    assert scripts_of(action, SIZE, adb_keyboard=False) == scripts


def test_a_held_button_is_a_finger_on_the_screen(env: AndroidEnv, device: Device) -> None:
    begin(env, "airplane")
    for action in (MouseDown(x=5, y=6), Move(x=7, y=8), MouseUp()):
        env.step(action)
    env.step(MouseDown(x=9, y=9))
    begin(env, "airplane")  # the finger of an episode is lifted at the next
    events = [line for line in device.read("inputs").splitlines() if "motionevent" in line]
    assert events == [
        f"motionevent {each}" for each in ("DOWN 5 6", "MOVE 7 8", "UP 7 8", "DOWN 9 9", "UP 9 9")
    ]


def test_a_long_drag_is_thinned() -> None:
    (script,) = scripts_of(
        Drag(path=[(n % 80, n % 150) for n in range(999)]), SIZE, adb_keyboard=False
    )
    assert script.count("motionevent") <= MOST_POINTS + 2


def test_unwritten_names_each_character_once() -> None:
    assert unwritten("aéé\n€\0") == "é€\0"


# --- mistakes ------------------------------------------------------------------------------------


def test_a_missing_adb_names_the_install_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingPartError, match="apt install adb"):
        check_parts("android", {})
    env = make_env("android", adb="/no/adb")
    with pytest.raises(MissingPartError, match="apt install adb"):
        env.reset(options={"task": next(iter(load_suite("android").tasks))})


def test_more_slots_than_devices_are_refused(device: Device) -> None:
    suite = AndroidSuite()
    slots = [suite.make_env(adb=device.adb, serial=["R58M"], pause_s=0) for _ in range(2)]
    begin(slots[0], "airplane")
    with pytest.raises(EnvError, match=r"all 1 of env\.options\.serial are in use"):
        begin(slots[1], "airplane")
    for env in slots:
        env.close()


@pytest.mark.parametrize(
    "options",
    [{"encoding": "gif"}, {"pause_s": -1}, {"deadline_s": 0}, {"serial": ["a", "a"]}],
)
def test_a_wrong_option_is_named(device: Device, options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=next(iter(options))):
        make_env("android", adb=device.adb, **options)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"config": [{"type": "download", "parameters": {}}]}, "set-up step 'download'"),
        ({"config": [{"type": "sleep", "parameters": {}}]}, r"sleep \(seconds\)"),
        ({"evaluator": {"func": "compare_table"}}, "'compare_table' must be one of exact_match"),
        ({"evaluator": {"func": "exact_match", "result": {"type": "adb_shell"}}}, "'command'"),
    ],
)
def test_a_file_that_no_device_can_play_is_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], told: str
) -> None:
    good = {"id": "good", "instruction": "Do.", "evaluator": {"func": "infeasible"}}
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "bad.json").write_text(json.dumps({**good, "id": "bad", **change}))
    assert list(AndroidSuite(tmp_path).tasks) == ["android/good"]
    assert re.search(told, caplog.text)
