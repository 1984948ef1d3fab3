"""Promises about gestures: which call of the phone's input an action is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from envs.contract.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    Goto,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    Type,
    Wait,
)
from envs.suites.mobilegym.gestures import GestureWriter

SIZE, SCALE = (360, 640), 2.0


def calls_of(*actions: Action) -> list[tuple[str, list[Any]]]:
    """Return the names and arguments of the calls."""
    writer = GestureWriter(SIZE, SCALE)
    calls = []
    for action in actions:
        for expression in writer.expressions_of(action):
            match = re.fullmatch(r"window\.__SIM_INPUT__\.(\w+)\((.*)\)", expression)
            assert match
            calls.append((match[1], json.loads(f"[{match[2]}]")))
    return calls


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (Click(x=20, y=40), ("tap", [10, 20])),
        (Click(x=9999, y=9999), ("tap", [179.5, 319.5])),
        (Click(x=20, y=40, button="right"), ("longPress", [10, 20, 800])),
        (DoubleClick(x=20, y=40), ("doubleTap", [10, 20])),
        (KeyPress(keys=["back"]), ("back", [])),
        (KeyPress(keys=["home"]), ("home", [])),
        (KeyPress(keys=["recents"]), ("recent", [])),
        (KeyPress(keys=["enter"]), ("enter", [])),
        (
            Drag(path=[(20, 400), (20, 300), (20, 100)]),
            ("swipe", [{"x": 10, "y": 200}, {"x": 10, "y": 50}, {"ms": 400}]),
        ),
    ],
)
def test_an_action_is_one_call_in_css_pixels(action: Action, call: tuple[str, list[Any]]) -> None:
    assert calls_of(action) == [call]


@pytest.mark.parametrize(
    "action", [Wait(), Goto(url="http://a/"), KeyPress(keys=["ctrl", "a"]), Scroll(x=1, y=1)]
)
def test_what_a_phone_has_not_does_nothing(action: Action) -> None:
    assert calls_of(action) == []


def test_a_text_with_lines_is_typed_and_entered() -> None:
    assert [name for name, _ in calls_of(Type(text='say "hi"\nnow\n'))] == [
        "type",
        "enter",
        "type",
        "enter",
    ]
    assert calls_of(Type(text='say "hi"'))[0][1][0] == 'say "hi"'


@pytest.mark.parametrize(("dx", "dy"), [(0, 3), (0, -3), (0, 99), (2, 0), (-2, 0)])
def test_a_turn_of_the_wheel_is_a_swipe_the_other_way_within_the_screen(dx: int, dy: int) -> None:
    [(name, [first, last, _])] = calls_of(Scroll(x=180, y=320, dx=dx, dy=dy))
    assert name == "swipe"
    for axis, notches, side in (("x", dx, 180), ("y", dy, 320)):
        way = last[axis] - first[axis]
        assert (way > 0) == (notches < 0)
        assert (way < 0) == (notches > 0)
        assert 0 < first[axis] < side
        assert 0 < last[axis] < side


def test_a_finger_that_goes_down_moves_and_goes_up_drags() -> None:
    down, up = MouseDown(x=20, y=40), MouseUp()
    assert calls_of(down, Move(x=60, y=80), up) == [
        ("drag", [{"x": 10, "y": 20}, {"x": 30, "y": 40}, {"ms": 400}])
    ]
    assert calls_of(up) == []
    assert calls_of(Move(x=60, y=80)) == []
