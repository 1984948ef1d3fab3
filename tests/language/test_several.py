"""Completions of several actions: each language writes them, reads them back, and takes them whole or not at all."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import ActionError, ConfigError
from dart_cli.config.families import FAMILIES
from dart_cli.config.model_folder import Screens
from dart_cli.config.schema import ACTION_PARSERS, SPLIT_PARSERS
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map, pointer_after
from dart_cli.language.parsers import make_action_parser, point_parser
from dart_cli.language.parsers.base import SplitParser, summary_of
from dart_cli.language.parsers.several import SeveralActions, read_actions, write_actions
from envs.contract.actions import (
    Action,
    Click,
    Done,
    DoubleClick,
    Drag,
    KeyPress,
    Move,
    Scroll,
    Type,
    Wait,
)

HERE = make_coordinate_map("thousandths", 500, 400)
MOST = 32
PARSERS = {name: make_action_parser(name, MOST) for name in SPLIT_PARSERS}
STRINGS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "family_strings.toml").read_text(encoding="utf-8")
)["string"]
PLACES = st.tuples(st.integers(0, 499), st.integers(0, 399))
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\r"), max_size=12
) | st.sampled_from(
    [
        "a)\nclick(1,2)",
        "')\n\nwait()",
        "</tool_call>\n<tool_call>",
        "```\npyautogui.press('a')\n```",
        "</action><action>",
        "Action: finished()",
        "it's (so)",
        "x\n\ny",
        "日本",
    ]
)
ACTIONS: st.SearchStrategy[Action] = st.one_of(
    PLACES.map(lambda at: Click(x=at[0], y=at[1])),
    PLACES.map(lambda at: DoubleClick(x=at[0], y=at[1])),
    PLACES.map(lambda at: Move(x=at[0], y=at[1])),
    st.tuples(PLACES, PLACES).map(lambda path: Drag(path=list(path))),
    st.tuples(PLACES, st.sampled_from([3, 5, -3])).map(
        lambda turn: Scroll(x=turn[0][0], y=turn[0][1], dy=turn[1])
    ),
    TEXTS.map(lambda text: Type(text=text)),
    st.sampled_from([["ctrl", "a"], ["enter"], ["escape"]]).map(lambda keys: KeyPress(keys=keys)),
    st.sampled_from([Wait(seconds=1.0), Wait(seconds=5.0), Done()]),
)


def writable(name: str, actions: list[Action]) -> list[Action]:
    """Those of the actions that the language can write one by one, after the others."""
    language, at, kept = make_action_parser(name), HERE, []
    for action in actions:
        try:
            language.format(action, at)
        except ActionError:
            continue
        kept.append(action)
        at = replace(at, pointer=pointer_after(action, at.pointer))
    return kept


def test_the_languages_with_several_actions_are_those_that_the_rules_name() -> None:
    able = [name for name in ACTION_PARSERS if isinstance(make_action_parser(name), SplitParser)]
    assert able == list(SPLIT_PARSERS)
    for name in set(ACTION_PARSERS) - set(able):
        with pytest.raises(ConfigError, match=f"policy.max_actions: {name} lacks split and join"):
            make_action_parser(name, 2)


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_one_action_a_completion_is_the_language_itself(name: str) -> None:
    assert not isinstance(make_action_parser(name, 1), SeveralActions)
    assert make_action_parser(name, 1) is make_action_parser(name, 1)


@pytest.mark.parametrize("name", SPLIT_PARSERS)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=6))
def test_what_is_written_is_read_as_the_same_actions_or_is_refused(
    name: str, actions: list[Action]
) -> None:
    actions = writable(name, actions)
    if not actions:
        return
    try:
        text = write_actions(PARSERS[name], actions, HERE, "So.")
    except ActionError as error:
        assert "its text means other actions" in str(error)  # noqa: PT017 - it may be written
        assert any(isinstance(action, Type) for action in actions)
        return
    read = read_actions(PARSERS[name], text, HERE)
    again = write_actions(PARSERS[name], read, HERE, "So.")
    assert (len(read), again) == (len(actions), text)
    assert [action.kind for action in read] == [action.kind for action in actions]
    typed = [action.text for action in actions if isinstance(action, Type)]
    assert [action.text for action in read if isinstance(action, Type)] == typed


@pytest.mark.parametrize("name", SPLIT_PARSERS)
@given(actions=st.lists(ACTIONS, min_size=2, max_size=4))
def test_points_of_all_actions_are_where_they_are_written(name: str, actions: list[Action]) -> None:
    actions = writable(name, [action for action in actions if not isinstance(action, Type)])
    if not actions:
        return
    parser = point_parser(name, MOST)
    text = write_actions(parser, actions, HERE, "So.")
    read, points = read_actions(parser, text, HERE), parser.find_points(text)
    assert [point.start for point in points] == sorted(point.start for point in points)
    for point in reversed(points):
        text = text[: point.start] + parser.write_point(point.x, point.y) + text[point.end :]
    assert read_actions(parser, text, HERE) == read
    # Clicks and moves name their places in order; a drag or a scroll may be where the pointer is.
    pixels = iter([HERE.to_screen(point.x, point.y) for point in points])
    places = [(a.x, a.y) for a in read if isinstance(a, Click | Move | DoubleClick)]
    assert all(place in pixels for place in places)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if FAMILIES[name].action_parser in PARSERS]
)
def test_a_published_text_of_one_action_means_the_same_however_many_are_allowed(
    family: str,
) -> None:
    its = FAMILIES[family]
    one, several = make_action_parser(its.action_parser), PARSERS[its.action_parser]
    screens = its.bounds or Screens(28, 3136, 12_845_056)
    for each in (each for each in STRINGS if each["family"] == family):
        pointer = tuple(each["pointer"]) if "pointer" in each else None
        coordinates = make_coordinate_map(its.coordinates, 1920, 1080, screens)  # type: ignore[arg-type]
        at = replace(coordinates, pointer=pointer)
        assert read_actions(several, each["text"], at) == [one.parse(each["text"], at)]
        assert several.as_history(each["text"]) == one.as_history(each["text"])
        assert summary_of(several, each["text"]) == summary_of(one, each["text"])


def test_the_forms_that_makers_document_are_read() -> None:
    click, typed = Click(x=250, y=20), Type(text="a b")
    uitars = "Thought: So.\nAction: click(start_box='(500,50)')\n\ntype(content='a b')"
    call = '<tool_call>\n{{"name": "computer_use", "arguments": {}}}\n</tool_call>'
    qwen = "\n".join(
        call.format(each)
        for each in (
            '{"action": "left_click", "coordinate": [500, 50]}',
            '{"action": "type", "text": "a b"}',
        )
    )
    venus = "<think>So.</think>\n<action>Sequence(actions=[Click(box=(500, 50)), Type(content='a b')])</action>"
    scalecua = "<action>\nclick(x=500, y=50)\nwrite(message='a b')\n</action>"
    compact = "click(500,50)\ntype(a b)"
    texts = {
        "uitars": uitars,
        "toolcall": qwen,
        "venus": venus,
        "scalecua": scalecua,
        "compact": compact,
    }
    for name, text in texts.items():
        assert read_actions(PARSERS[name], text, HERE) == [click, typed], name


@pytest.mark.parametrize("name", SPLIT_PARSERS)
def test_several_are_malformed_where_one_is_allowed_and_too_many_elsewhere(name: str) -> None:
    text = write_actions(PARSERS[name], [Click(x=9, y=9), Click(x=99, y=9), Done()], HERE)
    with pytest.raises(ActionError, match=r"3 actions, but policy\.max_actions = 2"):
        read_actions(make_action_parser(name, 2), text, HERE)
    one = make_action_parser(name)
    if name == "compact":
        assert one.parse("click(9,9)", HERE) == Click(x=4, y=3)
    with pytest.raises(ActionError):
        one.parse(text, HERE)
    with pytest.raises(ActionError, match=r"2 actions, but policy\.max_actions = 1"):
        write_actions(one, [Click(x=9, y=9), Done()], HERE)
    with pytest.raises(ActionError, match="3 actions"):
        PARSERS[name].parse(text, HERE)


def test_a_tail_that_is_no_action_makes_the_whole_completion_malformed() -> None:
    call = '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [5, 5]}}'
    tails = {
        "compact": "click(5,5)\nclick(5,",
        "uitars": "Action: click(start_box='(5,5)')\n\nclick(start_box='(5,'",
        "toolcall": f"{call}</tool_call>\n{call}",
        "venus": "<action>Sequence(actions=[Click(box=(5, 5)), Clik(box=(5, 5))])</action>",
        "pyautogui": "```python\npyautogui.click(x=5, y=5)\n\npyautogui.clik(x=5, y=5)\n```",
    }
    for name, text in tails.items():
        with pytest.raises(ActionError, match="action 2 of 2: "):
            read_actions(PARSERS[name], text, HERE)
        assert point_parser(name, MOST).find_points(text) == []
    nested = "<action>Sequence(actions=[Sequence(actions=[Click(box=(5, 5))]), Wait()])</action>"
    with pytest.raises(ActionError, match="action 1 of 2: a Sequence is several actions"):
        read_actions(PARSERS["venus"], nested, HERE)


def test_a_call_without_a_place_acts_where_the_actions_before_it_leave_the_pointer() -> None:
    call = '<tool_call>{{"name": "computer_use", "arguments": {}}}</tool_call>'
    text = call.format('{"action": "mouse_move", "coordinate": [500, 500]}') + call.format(
        '{"action": "left_click_drag", "coordinate": [0, 0]}'
    )
    assert read_actions(PARSERS["toolcall"], text, HERE) == [
        Move(x=250, y=200),
        Drag(path=[(250, 200), (0, 0)]),
    ]


def test_a_typed_text_that_looks_like_calls_is_one_action() -> None:
    inner = json_call = (
        '<tool_call>{"name": "computer_use", "arguments": {"action": "wait"}}</tool_call>'
    )
    text = (
        '<tool_call>{"name": "computer_use", "arguments": {"action": "type", "text": '
        '"' + inner.replace('"', '\\"') + '"}}</tool_call>'
    )
    assert read_actions(PARSERS["toolcall"], text, HERE) == [Type(text=json_call)]
    typed = "Action: type(content='see\nclick(start_box=1)\n\nwait()')"
    assert read_actions(PARSERS["uitars"], typed, HERE) == [
        Type(text="see\nclick(start_box=1)\n\nwait()")
    ]
    with pytest.raises(ActionError, match="its text means other actions"):
        write_actions(PARSERS["compact"], [Type(text="a)\nclick(1,2")], HERE)


def test_histories_show_every_action_as_the_model_writes_it() -> None:
    text = "Thought: So.\nAction: click(start_box='(5,6)')\n\nleft_double(start_box='(7,8)')"
    assert PARSERS["uitars"].as_history(text) == (
        "Thought: So.\nAction: click(start_box='<|box_start|>(5,6)<|box_end|>')\n\n"
        "left_double(start_box='<|box_start|>(7,8)<|box_end|>')"
    )
    code = "## Action:\nClick twice.\n\n## Code:\n```python\npyautogui.click(x=5, y=5)\n\npyautogui.click(x=6, y=5)\n```"
    assert PARSERS["pyautogui"].as_history(code) == "## Action:\nClick twice.\n"
    assert summary_of(PARSERS["pyautogui"], code) == "Click twice."
    actions: list[Action] = [Click(x=5, y=5), Type(text="a")]
    calls = write_actions(PARSERS["toolcall"], actions, HERE)
    assert summary_of(PARSERS["toolcall"], calls) == (
        "Performing left_click action; Performing type action"
    )
    said = write_actions(PARSERS["toolcall"], actions, HERE, "Open it.")
    assert summary_of(PARSERS["toolcall"], said) == "Open it."


def test_pixels_of_several_actions_are_exact_on_a_grid_as_fine_as_the_screen() -> None:
    fine = CoordinateMap(1920, 1080, 1932, 1092)
    actions: list[Action] = [Click(x=1919, y=1079), Click(x=0, y=0), Click(x=960, y=541)]
    for name in ("uitars", "toolcall", "pyautogui", "venus"):
        assert (
            read_actions(PARSERS[name], write_actions(PARSERS[name], actions, fine), fine)
            == actions
        )
