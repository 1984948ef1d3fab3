"""Promises of action parsers that tell where a text names a place, so that a pointer can stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import ConfigError
from dart_cli.config.schema import ACTION_PARSERS as SHIPPED
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import point_parser
from dart_cli.language.parsers.base import ActionParser, PointParser
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    action_from_dict,
    action_to_dict,
)

COORDINATES = make_coordinate_map("thousandths", 1000, 1000)  # a number is a pixel
GUIDE = f"{Path(__file__).parents[2]}/docs/examples/json_parser.py:JsonParser"
ACTION_PARSERS = {name: point_parser(name) for name in (*SHIPPED, GUIDE)}
HERE, THERE = {"x": 7, "y": 512}, {"x": 44, "y": 999}

ACTIONS: list[Action] = [
    *(Click(**HERE, button=button) for button in ("left", "right", "middle")),
    Click(**HERE, modifiers=("ctrl",)),
    DoubleClick(**HERE),
    TripleClick(**HERE),
    Move(**HERE),
    Drag(path=[(7, 512), (0, 3)]),
    Drag(path=[(7, 512), (0, 3), (999, 1)], button="right"),
    MouseDown(**HERE, button="right"),
    MouseUp(**HERE),
    MouseUp(),
    Scroll(**HERE, dy=3),
    Scroll(**HERE, dy=-5),
    Type(text='click(7,512) (7,512) start_box=\'(7,512)\' "coordinate": [7, 512] "at": [7, 512]'),
    Answer(text="(7,512)"),
    KeyPress(keys=["ctrl", "a"]),
    Done(),
]


def expressible(action_parser: ActionParser) -> list[Action]:
    return [action for action in ACTIONS if written(action_parser, action)]


def written(action_parser: ActionParser, action: Action) -> str:
    try:
        return action_parser.format(action, COORDINATES, "I click (7,512), or click(7,512).")
    except Exception:  # noqa: BLE001 - not every language has every action
        return ""


def places(action: Action) -> list[tuple[int, int]]:
    fields: dict[str, Any] = action_to_dict(action)
    if "path" in fields:
        return [tuple(point) for point in fields["path"]]
    return [(fields["x"], fields["y"])] if "x" in fields else []


def elsewhere(action: Action, points: list[tuple[int, int]]) -> Action:
    fields = action_to_dict(action)
    if "path" in fields:
        fields["path"] = points
    elif "x" in fields:
        fields["x"], fields["y"] = points[0]
    return action_from_dict(fields)


def with_points(action_parser: PointParser, text: str, points: list[tuple[int, int]]) -> str:
    found = action_parser.find_points(text)
    for each, point in reversed(list(zip(found, points, strict=True))):
        text = text[: each.start] + action_parser.write_point(*point) + text[each.end :]
    return text


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_the_points_of_an_action_are_found_and_can_be_replaced(name: str) -> None:
    action_parser = ACTION_PARSERS[name]
    assert len(expressible(action_parser)) >= 5
    for action in expressible(action_parser):
        text = written(action_parser, action)
        found = action_parser.find_points(text)
        assert [(each.x, each.y) for each in found] == places(action)
        assert (
            action_parser.parse(with_points(action_parser, text, places(action)), COORDINATES)
            == action
        )
        moved = [(999 - x, 999 - y) for x, y in places(action)]
        assert action_parser.parse(
            with_points(action_parser, text, moved), COORDINATES
        ) == elsewhere(action, moved)


def test_a_box_of_ui_tars_is_a_point_with_whatever_wraps_it() -> None:
    action_parser = ACTION_PARSERS["uitars"]
    boxes = ("(40, 60)", "<|box_start|>(40,60)<|box_end|>", "(30,50,50,70)")
    for box in (*boxes, "<point>40 60</point>"):
        for quote in "'\"":
            text = f'Thought: it\'s "it"\nAction: click(start_box={quote}{box}{quote})'
            [point] = action_parser.find_points(text)
            assert (text[point.start : point.end], point.x, point.y) == (box, 40, 60)


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_points_beyond_the_screen_are_told_and_texts_that_are_no_action_have_none(
    name: str,
) -> None:
    action_parser = ACTION_PARSERS[name]
    text = written(action_parser, Click(**HERE))
    [point] = action_parser.find_points(with_points(action_parser, text, [(999, 999)]))
    assert (point.x, point.y) == (999, 999)
    [point] = action_parser.find_points(text)
    assert action_parser.find_points(text[: point.end]) == []
    assert action_parser.find_points("") == []


@given(st.text(alphabet="click()'=_boxstaren0123456789,:A \n", max_size=40))
def test_finding_points_raises_nothing(text: str) -> None:
    for action_parser in ACTION_PARSERS.values():
        action_parser.find_points(text)
        action_parser.find_points(f"Action: {text}")


def test_an_action_parser_that_does_not_tell_its_points_is_refused_with_the_cure(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    limits = {}\n"
        "    def parse(self, text, coordinates): ...\n"
        "    def format(self, action, coordinates, thought=''): ...\n"
        "    def as_history(self, text): return text\n"
    )
    with pytest.raises(
        ConfigError, match=r"lacks write_point and find_points.*pointing = \"text\""
    ):
        point_parser(f"{tmp_path}/own.py:Own")
