"""Promises of suite `osworld`: an episode on a real guest server, and correct verdicts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import Click, Done, Fail, KeyDown, MouseDown, Type, Wait
from envs.contract.base import GuiEnv, Solvable
from envs.contract.registry import check_parts, load_suite, make_env
from envs.suites.osworld.env import OsworldEnv
from envs.suites.osworld.guest import Address, Guest, read_address
from envs.suites.osworld.provider import Restart
from envs.suites.osworld.suite import OsworldSuite
from tests.waiting import wait_until

HERE = Path(__file__).parent
CLICKED = "import sys; print('\"button\", 120, 120, 1' in open(sys.argv[1]).read())"


def rule(expected: object) -> dict[str, Any]:
    return {"type": "rule", "rules": {"expected": expected}}


def task(task_id: str, **fields: Any) -> dict[str, Any]:
    return {"id": task_id, "instruction": f"Do {task_id}.", "max_steps": 5, **fields}


@pytest.fixture
def folder(tmp_path: Path, xguest: Any) -> Path:
    """Task files for the guest on Xvfb."""
    log = xguest.home / f"{tmp_path.name}.log"
    log.touch()
    step = {"command": ["python", "-c", "print(1)"], "stdout": "said.txt"}
    reads = {"type": "vm_command_line", "command": ["python", "-c", CLICKED, str(log)]}
    upload = tmp_path / "note.txt"
    upload.write_text("pears")
    tasks = [
        task(
            "square",
            config=[
                {"type": "upload_file", "parameters": {"files": [
                    {"local_path": str(upload), "path": str(xguest.home / "in" / "note.txt")}
                ]}},
                {"type": "execute", "parameters": step},
                {"type": "launch", "parameters": {
                    "command": ["python", str(HERE / "x_window.py"), str(log)]
                }},
                {"type": "execute", "parameters": {
                    "command": ["grep", "ready", str(log)], "until": {"returncode": 0}
                }},
            ],
            evaluator={
                "func": "exact_match",
                "result": reads,
                "expected": rule("True\n"),
                "postconfig": [
                    {"type": "activate_window", "parameters": {"window_name": "closed by now"}},
                    {"type": "sleep", "parameters": {"seconds": 0.2}},
                ],
            },
            solution=[{"kind": "click", "x": 120, "y": 120}, {"kind": "done"}],
        ),
        task("impossible", evaluator={"func": "infeasible"}),
        task("joined", evaluator={
            "func": ["exact_match", "check_include_exclude"],
            "conj": "or",
            "result": [
                {"type": "vm_command_line", "command": f"cat {log}", "shell": True},
                {"type": "vm_command_error", "command": ["python", "-c", f"open('{log}').x"]},
            ],
            "expected": [
                rule("done\n"),
                {"type": "rule", "rules": {"include": ["no such error"], "exclude": ["Attr"]}},
            ],
        }),
        task("solved", evaluator={
            "func": "check_include_exclude",
            "result": {"type": "vm_command_error", "command": ["python", "-c", "1 / 0"]},
            "expected": {"type": "rule", "rules": {"include": ["ZeroDivisionError"]}},
        }),
        task("broken-setup", config=[{"type": "open", "parameters": {"path": "/no"}}],
             evaluator={"func": "infeasible"}),
        task("wrong-setup", config=[{"type": "launch", "parameters": {"comand": "x"}}],
             evaluator={"func": "infeasible"}),
        task("refused-command", evaluator={
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": ["no-such-program"]},
            "expected": rule("x"),
        }),
        task("broken-rule", evaluator={
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": ["true"]},
            "expected": {"type": "rule", "rules": {}},
            "postconfig": [{"type": "sleep", "parameters": {"seconds": 0}}],
        }),
        task("foreign", evaluator={
            "func": "compare_table", "result": {"type": "vm_file", "path": "/a", "dest": "a"},
        }),
    ]  # fmt: skip
    made = tmp_path / "tasks"
    made.mkdir()
    for each in tasks:
        (made / f"{each['id']}.json").write_text(json.dumps(each))
    (made / "malformed.json").write_text("{")
    return made


@pytest.fixture
def play(folder: Path, xguest: Any) -> Iterator[Callable[..., OsworldEnv]]:
    """Makes environments of the suite on the guest, and closes them."""
    made: list[OsworldEnv] = []

    def make(**options: Any) -> OsworldEnv:
        suite = OsworldSuite(folder, name="own")
        options = {"url": xguest.url, "pause_s": 0.1, **options}
        made.append(suite.make_env(**options))
        return made[-1]

    yield make
    for env in made:
        env.close()
        env.close()  # a second close is harmless


def begin(env: OsworldEnv, name: str) -> Any:
    return env.reset(seed=1, options={"task": f"own/{name}"})


# --- an episode --------------------------------------------------------------------------------


def test_a_guests_tree_and_terminal_are_beside_the_screenshot_where_they_are_asked_for(
    play: Callable[..., OsworldEnv], xguest: Any
) -> None:
    at = "xmlns:cp='uri:deskat:component.at-spi.gnome.org' cp:screencoord='(10, 20)' cp:size='(6, 8)'"
    tree, terminal = xguest.home / "tree.xml", xguest.home / "terminal.txt"
    tree.write_text(f"<desktop-frame><push-button name='OK' {at}/></desktop-frame>")
    terminal.write_text("$ ls")
    try:
        env = play(observe=("accessibility", "terminal"))
        screen, _ = begin(env, "square")
        assert screen.texts == {"accessibility": 'push-button "OK" @(13,24)', "terminal": "$ ls"}
        assert {each.role for each in env.elements()} == {"cell", "screen"}, "no window is told"
        assert env.state() == env.state()
        terminal.write_text("$ ls\nnote.txt")
        assert env.step(Wait(seconds=0))[0].texts["terminal"] == "$ ls\nnote.txt"
        assert begin(play(), "square")[0].texts == {}
    finally:
        tree.unlink()
        terminal.unlink()


def test_a_click_in_the_guest_passes_the_task_that_asks_for_it(
    play: Callable[..., OsworldEnv], xguest: Any
) -> None:
    env = play()
    assert isinstance(env, GuiEnv)
    assert isinstance(env, Solvable)
    screen, info = begin(env, "square")
    assert (info["instruction"], info["max_steps"]) == ("Do square.", 5)
    assert (screen.width, screen.height, screen.media_type) == (800, 600, "image/png")
    assert (xguest.home / "in" / "note.txt").read_text() == "pears"
    assert env.evaluate().outcome == "fail"

    def at_square() -> object:
        return Image.open(io.BytesIO(screen.screenshot)).convert("RGB").getpixel((350, 350))

    assert at_square() == (255, 255, 255)
    screen, reward, over, _, _ = env.step(env.oracle_action())

    def is_drawn() -> bool:
        nonlocal screen
        screen = env.step(Wait(seconds=0))[0]
        return at_square() == (0, 255, 0)

    wait_until(is_drawn, "the square that the click draws")
    assert (reward, over) == (0.0, False)
    assert env.step(Done())[1:3] == (1.0, True)
    assert env.evaluate().outcome == "pass"
    with pytest.raises(EnvError, match="over"):
        env.step(Done())


def test_done_alone_passes_no_task(play: Callable[..., OsworldEnv]) -> None:
    env = play(encoding="jpeg")
    screen, _ = begin(env, "square")
    assert Image.open(io.BytesIO(screen.screenshot)).format == "JPEG"
    assert env.step(Click(x=300, y=300))[1:3] == (0.0, False)
    assert env.step(Done())[1:3] == (0.0, True)


def test_only_fail_passes_a_task_that_cannot_be_done(play: Callable[..., OsworldEnv]) -> None:
    env = play()
    for action, outcome in ((None, "fail"), (Wait(seconds=0), "fail"), (Done(), "fail")):
        begin(env, "impossible")
        if action is not None:
            env.step(action)
        assert env.evaluate().outcome == outcome
    begin(env, "impossible")
    assert env.step(Fail())[1:3] == (1.0, True)
    begin(env, "square")
    assert env.step(Fail())[1:3] == (0.0, True)
    assert "cannot be done" in env.evaluate().reason


def down(xguest: Any) -> tuple[bool, bool]:
    """Whether keys, and whether buttons, are down in the guest."""
    from Xlib import X, display

    screen = display.Display(xguest.display)
    try:
        buttons = screen.screen().root.query_pointer().mask & X.Button1Mask
        return any(screen.query_keymap()), bool(buttons)
    finally:
        screen.close()


@pytest.mark.parametrize("release", ["before the judge", "at the next reset", "of another process"])
def test_what_an_episode_left_down_is_released(
    play: Callable[..., OsworldEnv], xguest: Any, release: str
) -> None:
    env = play()
    begin(env, "impossible")
    env.step(KeyDown(key="ctrl"))
    env.step(MouseDown(x=700, y=500))
    assert down(xguest) == (True, True)
    if release == "before the judge":
        env.step(Done())
    else:
        if release == "of another process":
            env.close()
            env = play()
        begin(env, "impossible")
    assert down(xguest) == (False, False)


def test_checks_are_joined_by_the_files_conj(
    play: Callable[..., OsworldEnv], xguest: Any, tmp_path: Path
) -> None:
    env = play()
    begin(env, "joined")
    assert env.evaluate().outcome == "fail"
    (xguest.home / f"{tmp_path.name}.log").write_text("done\n")
    env.step(Wait(seconds=0))
    assert env.evaluate().outcome == "pass"


# --- what breaks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["broken-setup", "wrong-setup"])
def test_a_set_up_that_fails_names_its_step(play: Callable[..., OsworldEnv], name: str) -> None:
    env = play()
    with pytest.raises(EnvError, match=r"set-up step 0 \((open|launch)\)"):
        begin(env, name)
    assert env.evaluate().outcome == "invalid"


def test_an_episode_whose_task_is_done_at_reset_is_refused(play: Callable[..., OsworldEnv]) -> None:
    env = play()
    with pytest.raises(EnvError, match="already done at reset"):
        begin(env, "solved")
    assert env.evaluate().outcome == "invalid"


def test_an_evaluator_that_breaks_is_invalid(play: Callable[..., OsworldEnv]) -> None:
    env = play()
    begin(env, "broken-rule")
    env.step(Done())
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert "KeyError" in verdict.reason


def test_a_command_that_the_guest_refuses_is_a_failure_as_in_osworld(
    play: Callable[..., OsworldEnv],
) -> None:
    env = play()
    begin(env, "refused-command")  # the check whether it is solved already meets the refusal, too
    env.step(Done())
    verdict = env.evaluate()
    assert verdict.outcome == "fail"
    assert "refused the command" in verdict.reason


def test_a_guest_that_went_away_is_invalid(folder: Path, xguest: Any) -> None:
    server = type(xguest)(xguest.home)
    env = OsworldSuite(folder, name="own").make_env(url=server.url, pause_s=0, deadline_s=5)
    try:
        begin(env, "impossible")
        server.end()
        with pytest.raises(EnvError, match="guest http"):
            env.step(Wait(seconds=0))
        assert env.evaluate().outcome == "invalid"
    finally:
        env.close()
        server.end()


def test_a_malformed_file_is_left_out_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    suite = OsworldSuite(folder, name="own")
    assert len(suite.tasks) == 9
    assert "malformed.json" in caplog.text


def test_more_slots_than_guests_are_refused(folder: Path, xguest: Any) -> None:
    suite = OsworldSuite(folder, name="own")
    slots = [suite.make_env(url=[xguest.url], pause_s=0) for _ in range(2)]
    try:
        begin(slots[0], "impossible")
        with pytest.raises(EnvError, match=r"all 1 of env\.options\.url are in use"):
            begin(slots[1], "impossible")
        slots[0].close()
        begin(slots[1], "impossible")
    finally:
        for env in slots:
            env.close()


# --- the suite that ships, and mistakes --------------------------------------------------------


def test_the_shipped_tasks_are_judged_by_the_guests_files(xguest: Any) -> None:
    env = make_env("osworld", url=xguest.url, pause_s=0)
    try:
        env.reset(options={"task": "osworld/folder"})
        assert env.evaluate().outcome == "fail"
        (xguest.home / "receipts").mkdir()
        assert env.step(Done())[1] == 1.0
        env.reset(options={"task": "osworld/note"})
        assert env.evaluate().outcome == "fail"
        (xguest.home / "shopping.txt").write_text("3 pears & 2 apples")
        assert env.step(Done())[1] == 1.0
    finally:
        env.close()


@pytest.mark.parametrize(
    "options",
    [{"encoding": "gif"}, {"pause_s": -1}, {"url": "https://x"}, {"url": ["http://a"] * 2},
     {"ram_gb": 0}, {"boot_s": "long"}, {"url": "http://a:b"}],
)  # fmt: skip
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=next(iter(options))):
        make_env("osworld", **options)


def test_a_task_that_needs_osworlds_evaluators_names_the_install_step(
    play: Callable[..., OsworldEnv], folder: Path, xguest: Any
) -> None:
    with pytest.raises(MissingPartError, match="pip install -e OSWorld"):
        OsworldSuite(folder, name="own").check_parts(url=xguest.url)
    with pytest.raises(EnvError, match="pip install -e OSWorld"):
        begin(play(), "foreign")
    with pytest.raises(MissingPartError, match="no interpreter at"):
        make_env("osworld", evaluator_python="/no/python")
    check_parts("osworld", {"url": xguest.url})


def test_a_folder_of_your_own_is_a_suite_in_three_lines(folder: Path, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "from envs.suites.osworld.suite import OsworldSuite\n"
        f"suite = OsworldSuite({str(folder)!r}, name='mine')\n"
    )
    suite = load_suite(f"{module}:suite")
    assert suite.tasks["mine/impossible"].suite == suite.name == "mine"


def test_a_suite_takes_lists_of_ids_as_osworld_has_them(folder: Path, tmp_path: Path) -> None:
    listed = tmp_path / "test_small.json"
    listed.write_text(json.dumps({"os": ["square"], "chrome": ["joined"]}))
    suite = OsworldSuite(folder, name="own", only=listed, heldout=["square"])
    assert {task_id: task.split for task_id, task in suite.tasks.items()} == {
        "own/square": "heldout",
        "own/joined": "train",
    }
    with pytest.raises(TaskError, match="no task 'sqare'"):
        OsworldSuite(folder, only=["sqare"])


def test_the_suite_names_its_tasks() -> None:
    assert set(load_suite("osworld").tasks) == {
        "osworld/folder",
        "osworld/note",
        "osworld/undo-boot",
    }


def test_typing_reaches_the_guest_through_an_episode(play: Callable[..., OsworldEnv]) -> None:
    env = play()
    begin(env, "impossible")
    assert env.step(Type(text="~/x $(y) 'z'"))[2] is False


def test_a_guest_whose_display_is_full_is_restarted_where_a_command_is_named(
    xguest: Any, tmp_path: Path
) -> None:
    """The command ends the guest's server; a new one, on a display that leaks no more, takes its port."""
    leaking = type(xguest)(tmp_path, leaks=True)
    log = tmp_path / "restarted"
    script = tmp_path / "restart.py"
    script.write_text(
        "import subprocess, sys, os, signal\n"
        f"os.killpg({leaking.processes[-1].pid}, signal.SIGKILL)\n"
        f"os.killpg({leaking.processes[0].pid}, signal.SIGKILL)\n"
        f"open({str(log)!r}, 'a').write(sys.argv[1] + '\\n')\n"
        f"new = subprocess.Popen([sys.executable, {str(HERE / 'guest_server.py')!r}, {xguest.display!r}, "
        f"{str(tmp_path)!r}, '--port', sys.argv[2]], stdin=-3, stdout=-3, stderr=-3, start_new_session=True)\n"
        f"open({str(log)!r} + '.pid', 'w').write(str(new.pid))\n"
    )
    env = make_env(
        "osworld",
        url=leaking.url,
        pause_s=0,
        restart=f"{shlex.join([sys.executable, str(script)])} {{host}} {{port}}",
    )
    clients = contextlib.ExitStack()
    try:
        for _ in range(80):  # more clients than the display takes
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(f"/tmp/.X11-unix/X{leaking.display[1:]}")
            client.sendall(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
        _, info = env.reset(options={"task": "osworld/undo-boot"})
        assert info["instruction"]
        assert log.read_text() == "127.0.0.1\n"
    finally:
        clients.close()
        env.close()
        leaking.end()
        with contextlib.suppress(OSError):
            os.killpg(int(Path(f"{log}.pid").read_text()), signal.SIGKILL)


def test_the_pointer_of_a_guest_that_keeps_its_state_begins_in_the_middle(xguest: Any) -> None:
    env = make_env("osworld", url=xguest.url, pause_s=0)
    guest = Guest(read_address(xguest.url))
    try:
        for _ in range(2):
            env.reset(options={"task": "osworld/undo-boot"})
            assert guest.cursor_position() == (400, 300)
            env.step(Click(x=7, y=9))
    finally:
        guest.close()
        env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restart": "true"}, "restart needs a guest that runs already"),
        ({"url": "http://host:5000", "restart": "  "}, "is blank"),
        ({"url": "http://host:5000", "restart": "a 'b"}, "No closing quotation"),
        ({"boots": 0}, "boots"),
    ],
)
def test_options_of_starts_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_env("osworld", **options)


def test_a_restart_that_fails_is_told_with_its_last_line() -> None:
    address = Address("127.0.0.1", 9)
    for command, message in (
        ("sh -c 'echo no such service {port} >&2; exit 3'", "exit code 3: no such service 9"),
        ("/no/such/program", "No such file"),
    ):
        with pytest.raises(EnvError, match=message):
            Restart(command, 30.0).run(address)
    with pytest.raises(EnvError, match=r"not done in 0\.05 s"):
        Restart("sleep 60", 0.05).run(address)
