"""Promises of the actions as calls: pure."""

from __future__ import annotations

import pytest

from envs.contract.actions import (
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
    KeyDown,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    Type,
    Wait,
)
from envs.suites.browsergym import program
from envs.suites.browsergym.calls import MEANINGS, CallWriter
from envs.suites.browsergym.env import opened


def test_a_click_with_modifiers_holds_them_for_the_click_alone() -> None:
    calls = CallWriter().calls_of(Click(x=3, y=4, button="right", modifiers=("ctrl", "shift")))
    assert calls == [
        ("key_down", "Control"),
        ("key_down", "Shift"),
        ("move", 3, 4, 1),
        ("button_down", "right", 1),
        ("button_up", "right", 1),
        ("key_up", "Shift"),
        ("key_up", "Control"),
    ]


def test_a_double_click_counts_its_presses() -> None:
    calls = CallWriter().calls_of(DoubleClick(x=3, y=4))
    assert [call for call in calls if call[0] == "button_down"] == [
        ("button_down", "left", 1),
        ("button_down", "left", 2),
    ]


def test_a_drag_moves_in_strides_and_a_press_that_is_held_does_too() -> None:
    writer = CallWriter()
    calls = writer.calls_of(Drag(path=[(0, 0), (30, 40), (30, 48)]))
    assert calls == [
        ("move", 0, 0, 1),
        ("button_down", "left", 1),
        ("move", 30, 40, 7),  # 50 pixels
        ("move", 30, 48, 2),
        ("button_up", "left", 1),
    ]
    assert writer.calls_of(MouseDown()) == [("move", 30, 48, 1), ("button_down", "left", 1)]
    assert writer.calls_of(Move(x=30, y=64)) == [("move", 30, 64, 2)]
    assert writer.calls_of(MouseDown()) == []  # it is down
    assert writer.calls_of(MouseUp()) == [("button_up", "left", 1)]
    assert writer.calls_of(MouseUp()) == []


def test_a_key_that_is_held_stays_so_and_an_unknown_one_does_nothing() -> None:
    writer = CallWriter()
    assert writer.calls_of(KeyDown(key="ctrl")) == [("key_down", "Control")]
    assert writer.calls_of(KeyDown(key="control")) == []
    assert writer.calls_of(KeyPress(keys=["ctrl", "a"])) == [("key_down", "a"), ("key_up", "a")]
    assert writer.calls_of(KeyPress(keys=["ctrl", "hyper"])) == []


def test_a_text_s_lines_and_tabs_are_keys() -> None:
    assert CallWriter().calls_of(Type(text="a'b\r\nc\t")) == [
        ("type", "a'b"),
        ("key_down", "Enter"),
        ("key_up", "Enter"),
        ("type", "c"),
        ("key_down", "Tab"),
        ("key_up", "Tab"),
    ]


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (KeyPress(keys=["alt", "left"]), ("back",)),
        (KeyPress(keys=["ctrl", "2"]), ("tab", 1)),
        (Answer(text="42"), ("message", "42")),
        (Done(), ("message", "")),
        (Fail(), ("infeasible", "")),
        (Wait(seconds=2), ("wait", 2.0)),
    ],
)
def test_what_is_no_input_is_a_call_of_its_own(action: object, call: tuple[object, ...]) -> None:
    assert CallWriter().calls_of(action) == [call]  # type: ignore[arg-type]


def test_the_wheel_turns_a_bounded_number_of_notches() -> None:
    assert CallWriter().calls_of(Scroll(x=1, y=2, dy=-3)) == [("move", 1, 2, 1), ("wheel", 0, -300)]
    assert CallWriter().calls_of(Scroll(x=1, y=2, dy=10**9))[1] == ("wheel", 0, 100_000)


def test_every_call_is_one_that_the_program_has() -> None:
    writer = CallWriter()
    actions = [
        *(Click(x=1, y=1), MouseDown(), MouseUp(), Scroll(x=1, y=1), Type(text="a\n")),
        *(Goto(url="a"), Wait(), Done(), Fail()),
    ]
    names = {call[0] for action in actions for call in writer.calls_of(action)}
    assert names | {call[0] for call in MEANINGS.values()} == program.CALLS


@pytest.mark.parametrize(
    ("url", "result"),
    [
        ("https://a.b/c", Goto(url="https://a.b/c")),
        (" a.b:8080/c ", Goto(url="http://a.b:8080/c")),
        ("about:blank", Goto(url="about:blank")),
        *(
            (url, Wait(seconds=0))
            for url in ("file:///etc/passwd", "chrome://version", "http://[a")
        ),
    ],
)
def test_goto_opens_web_addresses_alone(url: str, result: object) -> None:
    assert opened(Goto(url=url)) == result
    assert opened(Goto(url="javascript:alert(1)")) == Goto(url="http://javascript:alert(1)")
