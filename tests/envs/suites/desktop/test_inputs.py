"""Promises of mouse and keyboard in suite `desktop`: what is held in a real application's window.

Where Xvfb or Mousepad is not installed, these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.errors import MissingPartError
from envs.contract.actions import (
    Action,
    Click,
    Done,
    Drag,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    TripleClick,
    Type,
    Wait,
)
from envs.contract.registry import check_parts

try:
    check_parts("desktop", {})
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from envs.suites.desktop.env import DesktopEnv
from envs.suites.desktop.suite import DesktopSuite

NOTE = "Documents/note.txt"
HOME_KEY = KeyPress(keys=["home"])
SAVE: dict[str, Any] = {"type": "press", "parameters": {"keys": ["ctrl", "s"]}}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DesktopEnv]:
    """One line of text in Mousepad. It is saved before it is judged: it must be `changed`."""
    folder = tmp_path_factory.mktemp("tasks")
    task = {
        "id": "note",
        "instruction": "Change the note.",
        "max_steps": 99,
        "config": [
            {"type": "text", "parameters": {"path": NOTE, "lines": ["alpha beta gamma"]}},
            {"type": "open", "parameters": {"path": NOTE}},
        ],
        "evaluator": {
            "func": "same_text",
            "result": {"type": "text_file", "path": NOTE},
            "expected": {"type": "rule", "rules": {"expected": "changed"}},
            "postconfig": [SAVE],
        },
    }
    (folder / "note.json").write_text(json.dumps(task))
    env = DesktopSuite(folder).make_env()
    yield env
    env.close()


@pytest.fixture
def left_after(env: DesktopEnv) -> Callable[..., str]:
    """The text in the window after actions that began with `alpha beta gamma`."""
    if env._session is None or env._over:
        env.reset(seed=1, options={"task": "desktop/note"})

    def play(*actions: Action) -> str:
        fresh = [KeyPress(keys=["ctrl", "a"]), Type(text="alpha beta gamma"), HOME_KEY]
        for action in (*fresh, *actions, KeyPress(keys=["ctrl", "s"])):
            env.step(action)
        assert env._session is not None
        return Path(env._session.desktop.home / NOTE).read_text().rstrip("\n")

    return play


def test_three_clicks_select_the_line(left_after: Callable[..., str]) -> None:
    assert left_after(TripleClick(x=60, y=57), Type(text="new")) == "new"


def test_a_click_with_shift_selects_up_to_it(left_after: Callable[..., str]) -> None:
    actions = Click(x=400, y=57, modifiers=("shift",))
    assert left_after(actions, Type(text="new")) == "new"
    assert left_after(Click(x=400, y=57), Type(text=" end")) == "alpha beta gamma end"


def test_press_move_and_release_select_what_they_pass(left_after: Callable[..., str]) -> None:
    pressed = MouseDown(x=400, y=57), Move(x=200, y=57), Move(x=2, y=57), MouseUp()
    assert left_after(*pressed, Type(text="new")) == "new"


def test_a_key_is_held_for_the_actions_that_follow(left_after: Callable[..., str]) -> None:
    actions = KeyDown(key="shift"), KeyPress(keys=["shift", "right"]), KeyPress(keys=["end"])
    assert left_after(*actions, Type(text="ab1"), KeyUp(key="shift"), Type(text="c")) == "AB!c"


def test_a_key_that_is_held_writes_once_however_long(left_after: Callable[..., str]) -> None:
    actions = KeyDown(key="x"), Wait(seconds=1.5), KeyUp(key="x")
    assert left_after(*actions) == "xalpha beta gamma"


def test_a_drag_with_the_middle_button_selects_nothing(left_after: Callable[..., str]) -> None:
    dragged = Drag(path=[(2, 57), (400, 57)], button="middle")
    assert left_after(dragged, KeyPress(keys=["delete"])) != ""


def test_what_is_held_is_released_before_the_evaluator_presses_its_keys(env: DesktopEnv) -> None:
    env.reset(seed=1, options={"task": "desktop/note"})
    select_all = KeyPress(keys=["ctrl", "a"])
    for action in (select_all, Type(text="changed"), KeyDown(key="shift"), MouseDown(x=400, y=300)):
        env.step(action)
    assert env.step(Done())[1] == 1.0
    assert env.evaluate().outcome == "pass"
