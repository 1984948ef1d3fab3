"""Promises of actions in a guest: real input on a real display, and text that is never executed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envs.contract.actions import (
    Action,
    Answer,
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
from envs.suites.osworld.actions import RELEASE, TEXT_CHUNK, GuestWriter
from envs.suites.osworld.guest import Guest, read_address
from envs.tools.inputs import MOST_NOTCHES, MOST_POINTS, MOST_STRIDES

SIZE = (800, 600)
SHIFT, CTRL = 0xFFE1, 0xFFE3  # keysyms

HOSTILE = [
    "'; import os; os.system('touch ~/owned'); '",
    '"); __import__("os").system("touch ~/owned") #',
    "$(touch ~/owned) `touch ~/owned` && touch ~/owned ; | > <",
    "~/owned",
    "{command} %s %(x)s {0} \\n \\u003c \\",
    "--help -c",
]


def keysyms(events: list[list[Any]]) -> str:
    """What the key events of a window spell."""
    symbols = [event[1] for event in events if event[0] == "key"]
    rows = [
        "\n" if symbol == 0xFF0D else "\t" if symbol == 0xFF09 else chr(symbol & 0xFFFFFF)
        for symbol in symbols
        if symbol not in (0xFFE1, 0xFFE3)
    ]
    return "".join(rows)


@pytest.fixture
def act(xguest: Any) -> Any:
    guest, writer = Guest(read_address(xguest.url)), GuestWriter()

    def perform(action: Action) -> None:
        for command in writer.commands_of(action, SIZE):
            result = guest.execute(command, deadline_s=60)
            assert (result.returncode, result.error) == (0, "")

    yield perform
    guest.close()


def test_clicks_arrive_where_they_are_aimed_and_with_their_button(window: Any, act: Any) -> None:
    for button, number in (("left", 1), ("middle", 2), ("right", 3)):
        act(Click(x=120, y=60, button=button))
        events = window.wait_for(lambda events: any(each[0] == "release" for each in events))
        assert [each for each in events if each[0] == "button"] == [["button", 120, 60, number]]


def test_a_double_click_is_two_presses(window: Any, act: Any) -> None:
    act(DoubleClick(x=10, y=10))
    window.wait_for(lambda events: sum(each[0] == "release" for each in events) == 2)


def test_a_triple_click_is_three_presses(window: Any, act: Any) -> None:
    act(TripleClick(x=10, y=10))
    window.wait_for(lambda events: sum(each[0] == "release" for each in events) == 3)


def test_a_click_holds_its_modifiers(window: Any, act: Any) -> None:
    act(Click(x=30, y=30, modifiers=("ctrl", "shift")))
    events = window.wait_for(lambda events: sum(each[0] == "keyup" for each in events) == 2)
    assert [each for each in events if each[0] != "move"] == [
        ["key", CTRL, 0],
        ["key", SHIFT, 4],
        ["held", 5],
        ["button", 30, 30, 1],
        ["release", 30, 30, 1],
        ["keyup", SHIFT],
        ["keyup", CTRL],
    ]


def test_a_key_stays_down_for_the_actions_that_follow(window: Any, act: Any) -> None:
    for action in (
        KeyDown(key="ctrl"),
        Click(x=30, y=30),
        KeyPress(keys=["ctrl", "a"]),
        Click(x=40, y=30, modifiers=("ctrl",)),
        KeyUp(key="ctrl"),
        Click(x=50, y=30),
    ):
        act(action)
    events = window.wait_for(lambda events: ["release", 50, 30, 1] in events)
    assert [each for each in events if each[0] in ("held", "button", "keyup")] == [
        *(["held", 4], ["button", 30, 30, 1], ["keyup", ord("a")]),
        *(["held", 4], ["button", 40, 30, 1], ["keyup", CTRL]),
        ["button", 50, 30, 1],
    ]


def test_a_button_is_held_from_its_press_to_its_release(window: Any, act: Any) -> None:
    for action in (
        MouseDown(x=20, y=20, button="right"),
        Move(x=80, y=20),
        MouseUp(button="right"),
    ):
        act(action)
    events = window.wait_for(lambda events: any(each[0] == "release" for each in events))
    kinds = [each[0] for each in events]
    chord = events[kinds.index("button") :]
    assert (chord[0], chord[-1]) == (["button", 20, 20, 3], ["release", 80, 20, 3])
    assert kinds.count("move") > 10


def test_a_drag_with_another_button_holds_that_one(window: Any, act: Any) -> None:
    act(Drag(path=[(20, 20), (80, 20)], button="middle"))
    events = window.wait_for(lambda events: any(each[0] == "release" for each in events))
    assert ["button", 20, 20, 2] in events
    assert events[-1] == ["release", 80, 20, 2]


def test_everything_that_is_down_is_released(window: Any, act: Any, xguest: Any) -> None:
    act(MouseDown(x=20, y=20))
    act(KeyDown(key="shift"))
    act(KeyDown(key="a"))
    guest = Guest(read_address(xguest.url))
    assert guest.execute(RELEASE, deadline_s=60).returncode == 0
    guest.close()
    events = window.wait_for(lambda events: sum(each[0] == "keyup" for each in events) >= 2)
    assert ["release", 20, 20, 1] in events
    assert {each[1] for each in events if each[0] == "keyup"} == {SHIFT, ord("a")}


def test_a_drag_holds_the_button_along_its_path(window: Any, act: Any) -> None:
    act(Drag(path=[(20, 20), (80, 20), (80, 200)]))
    events = window.wait_for(lambda events: any(each[0] == "release" for each in events))
    kinds = [each[0] for each in events]
    chord = events[kinds.index("button") : kinds.index("release")]
    assert ["move", 80, 20] in chord
    assert len(chord) > 10
    assert events[-1] == ["release", 80, 200, 1]


def test_the_wheel_turns_as_many_notches_as_given(window: Any, act: Any) -> None:
    act(Scroll(x=50, y=50, dy=3))
    act(Scroll(x=50, y=50, dy=-1, dx=2))
    events = window.wait_for(lambda events: sum(each[0] == "release" for each in events) == 6)
    assert [each[3] for each in events if each[0] == "button"] == [5, 5, 5, 4, 7, 7]


def test_a_move_hovers(window: Any, act: Any) -> None:
    act(Move(x=33, y=44))
    events = window.wait_for(lambda events: ["move", 33, 44] in events)
    assert all(each[0] == "move" for each in events)


def test_a_chord_holds_its_modifiers(window: Any, act: Any) -> None:
    act(KeyPress(keys=["ctrl", "shift", "s"]))
    events = window.wait_for(lambda events: sum(each[0] == "key" for each in events) == 3)
    assert [each[2] & 5 for each in events if each[0] == "key"] == [0, 4, 5]


def test_a_chord_with_an_unknown_key_does_nothing(window: Any, act: Any) -> None:
    act(KeyPress(keys=["ctrl", "any_key"]))
    act(KeyPress(keys=["enter"]))
    events = window.wait_for(lambda events: bool([each for each in events if each[0] == "key"]))
    assert keysyms(events) == "\n"


@pytest.mark.parametrize("text", ["aZ 09 <>~\"|'\\@#\n\tend", "naïve — 北京 Привет €", *HOSTILE])
def test_text_arrives_unchanged(window: Any, act: Any, xguest: Any, text: str) -> None:
    act(Type(text=text))
    events = window.wait_for(lambda events: len(keysyms(events)) >= len(text))
    assert keysyms(events) == text
    assert not (xguest.home / "owned").exists()


def test_more_strange_characters_than_spare_keys_all_arrive(window: Any, act: Any) -> None:
    text = "".join(chr(number) for number in range(0x4E00, 0x4E00 + 40))
    act(Type(text=text))
    assert keysyms(window.wait_for(lambda events: len(keysyms(events)) >= 40)) == text


def test_text_is_one_json_argument_and_never_code() -> None:
    plain = GuestWriter().commands_of(Type(text="x"), SIZE)[0]
    for text in [*HOSTILE, "nul \0 and \ud800"]:
        (command,) = GuestWriter().commands_of(Type(text=text), SIZE)
        assert command[:-1] == plain[:-1]  # the program is the same, whatever the text
        assert command[-1].isascii()
        assert command[-1].isprintable()
        assert command[-1].startswith("[")  # which the server expands to no home folder


@pytest.mark.parametrize("action", [Wait(), Done(), Fail(), Answer(text="x")])
def test_an_action_without_input_gives_no_command(action: Action) -> None:
    assert GuestWriter().commands_of(action, SIZE) == []


def events_of(action: Action) -> list[list[Any]]:
    """The events of an action's commands."""
    commands = GuestWriter().commands_of(action, SIZE)
    return [event for command in commands for event in json.loads(command[-1])]


def test_numbers_of_any_size_are_clamped_to_the_screen() -> None:
    huge = 10**30
    assert events_of(Click(x=-huge, y=huge))[0] == ["button", "left", True, 0, 599]
    assert events_of(Scroll(x=1, y=1, dy=huge, dx=-huge)) == [
        ["wheel", 1, 1, -MOST_NOTCHES, MOST_NOTCHES]
    ]
    first, *moves, last = events_of(Drag(path=[(n, 0) for n in range(5000)]))
    assert sum(len(points) for _, points in moves) <= MOST_POINTS * MOST_STRIDES
    assert (first[3:], last[3:]) == ([0, 0], [799, 0])


def test_a_long_text_is_several_commands() -> None:
    text = "ab\r\n" * TEXT_CHUNK
    chunks = [event[1] for event in events_of(Type(text=text))]
    assert "".join(chunks) == "ab\n" * TEXT_CHUNK
    assert max(map(len, chunks)) == TEXT_CHUNK
    assert len(GuestWriter().commands_of(Type(text=text), SIZE)) == len(chunks)
