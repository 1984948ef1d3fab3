"""Promises of the action space: every suite performs what its documentation says, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from bus.errors import ActionError
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
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
    action_from_dict,
    action_to_dict,
)
from envs.contract.base import Solvable
from envs.contract.registry import make_env
from envs.suites.android.actions import finger_after, scripts_of
from envs.suites.browsergym.calls import CallWriter
from envs.suites.osworld.actions import GuestWriter
from envs.tools.browser.inputs import PageInput

PAGE = Path(__file__).parents[3] / "docs" / "environments" / "index.md"
SIZE = (200, 100)
BROWSER = "`web`, `miniwob`"
PATH = [(1, 2), (30, 40), (5, 6)]
POINTING = Click(x=5, y=6), DoubleClick(x=5, y=6), TripleClick(x=5, y=6)
HELD = [each.model_copy(update={"modifiers": ("ctrl", "shift")}) for each in POINTING]
ROWS: dict[str, list[Action]] = {
    "`click`, `double_click`, `triple_click`": [*POINTING, Click(x=5, y=6, button="right")],
    "these with `modifiers`: ctrl, shift, alt, meta": HELD,
    "`drag` along a path of points": [Drag(path=PATH[:2]), Drag(path=PATH)],
    "`drag` with another `button`": [Drag(path=PATH, button="right")],
    "`move`": [Move(x=5, y=6)],
    "`mouse_down`, `mouse_up`": [MouseDown(x=5, y=6), MouseUp()],
    "`scroll`, `type`, `keypress`": [
        Scroll(x=5, y=6, dy=1),
        Type(text="a"),
        KeyPress(keys=["ctrl", "a"]),
    ],
    "`key_down`, `key_up`": [KeyDown(key="shift"), KeyUp(key="shift")],
    "`goto`": [Goto(url="http://a.b/")],
}
WITHOUT_INPUT = Wait(), Done(), Fail(), Answer(text="x")


def table() -> dict[str, dict[str, str]]:
    """Row -> suite -> cell, of the page's table of what each suite performs."""
    section = "| action |" + PAGE.read_text().split("\n| action |")[1].split("\n\n")[0]
    lines = section.splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def performed(suite: str, actions: list[Action]) -> list[bool]:
    """Whether each of the actions, in turn, is anything there."""
    browser, writer, guest = PageInput(1.0), CallWriter(), GuestWriter()
    finger, did = None, []
    for action in actions:
        if suite == BROWSER:
            did.append(bool(browser.commands_of(action)))
        elif suite == "`browsergym`":
            did.append(bool(writer.calls_of(action)))
        elif suite == "`osworld`":
            did.append(bool(guest.commands_of(action, SIZE)))
        else:
            did.append(bool(scripts_of(action, SIZE, finger, adb_keyboard=False)))
            finger = finger_after(action, SIZE, finger)
    return did


def test_the_table_has_every_action() -> None:
    union, _ = get_args(Action)
    kinds = {each.model_fields["kind"].default for each in get_args(union)}
    listed = {action.kind for actions in ROWS.values() for action in actions}
    assert table().keys() == ROWS.keys()
    assert listed | {action.kind for action in WITHOUT_INPUT} == kinds


@pytest.mark.parametrize("suite", [BROWSER, "`browsergym`", "`osworld`", "`android`"])
def test_a_suite_performs_the_actions_that_the_table_says(suite: str) -> None:
    for row, actions in ROWS.items():
        cell = table()[row][suite]
        if "while a finger is down" in cell:
            assert performed(suite, actions) == [False]
            actions = [MouseDown(x=1, y=1), *actions]
        # The address is the page's own in `web`; no input goes to the page.
        assert performed(suite, actions) == [cell not in ("-", "in `web`")] * len(actions), row
    if suite != "`browsergym`":  # there they are time, or messages to its tasks
        assert not any(performed(suite, list(WITHOUT_INPUT)))


def test_the_embedded_suites_begin_an_episode_with_nothing_held() -> None:
    env = make_env("desk")
    assert isinstance(env, Solvable)

    def begin() -> bytes:
        return env.reset(seed=1, options={"task": "desk/login"})[0].screenshot

    first = begin()
    for action in (KeyDown(key="ctrl"), MouseDown(x=5, y=5)):
        env.step(action)
    assert begin() == first
    outcome = ""
    while not outcome:  # it types into fields: with ctrl held it would not
        over = env.step(env.oracle_action())[2]
        outcome = env.evaluate().outcome if over else ""
    assert outcome == "pass"


def test_an_action_is_stored_as_it_was_before_there_were_modifiers() -> None:
    click = {"kind": "click", "x": 1, "y": 2, "button": "left"}
    assert action_to_dict(Click(x=1, y=2)) == click
    assert action_from_dict(click) == Click(x=1, y=2)
    assert action_from_dict({"kind": "drag", "path": [[1, 2], [3, 4]]}) == Drag(
        path=[(1, 2), (3, 4)]
    )


@pytest.mark.parametrize("action", [each for actions in ROWS.values() for each in actions])
def test_every_action_comes_back_from_the_wire(action: Action) -> None:
    assert action_from_dict(action_to_dict(action)) == action


def test_half_a_point_and_an_unknown_modifier_are_refused() -> None:
    with pytest.raises(ActionError, match="both or not at all"):
        action_from_dict({"kind": "mouse_up", "x": 3})
    with pytest.raises(ActionError, match="modifiers"):
        action_from_dict({"kind": "click", "x": 3, "y": 4, "modifiers": ["fn"]})
