"""How models are asked and how their texts are read: points in pixels of the screenshot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bus.errors import ConfigError
from dart_cli.config.model_folder import Screens
from dart_cli.config.schema import ACTION_PARSERS
from dart_cli.grounding.formats import format_of, grounding_config
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from scripts.small_models import FAMILIES, build


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of each class."""
    place = tmp_path_factory.mktemp("models")
    return {family: str(build(family, place / family)) for family in FAMILIES}


THOUSAND = make_coordinate_map("thousand", 200, 100)
RESIZED = make_coordinate_map("resized", 200, 100, Screens(28, 3136, 4000))
COMPACT = make_coordinate_map("thousandths", 200, 100)


@pytest.mark.parametrize(
    ("name", "coordinates", "text", "point"),
    [
        ("compact", COMPACT, "click(500,250)", (100, 25)),
        ("compact", COMPACT, "double_click(0,999)", (0, 99)),
        ("uitars", THOUSAND, "Action: click(start_box='(500,250)')", (100, 25)),
        ("uitars", THOUSAND, "Thought: it\nAction: click(start_box='(0,0,1000,500)')", (100, 25)),
        (
            "uitars",
            THOUSAND,
            "Action: drag(start_box='(500,250)', end_box='(0,0)')",
            (100, 25),
        ),
        ("point", THOUSAND, "(500, 250)", (100, 25)),
        ("point", THOUSAND, "It is at [500.9, 250].", (100, 25)),
        ("point", THOUSAND, "<|box_start|>(400,200),(600,300)<|box_end|>", (100, 25)),
        ("point", THOUSAND, "x1=500, y1=250", (100, 25)),
        ("point", THOUSAND, "(x1,y1)=(500,250)", (100, 25)),
        ("point", THOUSAND, "x: 500\ny: 250", (100, 25)),
        ("point", THOUSAND, "X: 500, Y: 250", (100, 25)),
        ("point", THOUSAND, '{"x": 500, "y": 250}', (100, 25)),
        ("point", THOUSAND, "<think>maybe 3 or 4</think>(500,250)", (100, 25)),
        ("point", THOUSAND, "maybe 3 or 4\n</think>\n(500,250)", (100, 25)),
        ("point", THOUSAND, "(5e2,2.5e2)", (100, 25)),
        ("point", THOUSAND, '{"point_2d": [500, 250], "label": "Tab 2"}', (100, 25)),
        (
            "point",
            THOUSAND,
            '```json\n[{"bbox_2d": [400, 200, 600, 300], "label": "2 of 3"}]\n```',
            (100, 25),
        ),
        ("point", THOUSAND, "xmin=400, ymin=200, xmax=600, ymax=300", (100, 25)),
        ("point", THOUSAND, "<point>500 250</point>", (100, 25)),
        ("point", THOUSAND, "The 2nd of 3 buttons: (500px, 250px).", (100, 25)),
        ("point", RESIZED, "(84, 28)", (RESIZED.to_screen(84, 28))),
        (
            "qwen",
            THOUSAND,
            '<tool_call>\n{"arguments": {"action": "left_click", "coordinate": [500, 250]}}\n</tool_call>',
            (100, 25),
        ),
        (
            "qwen",
            THOUSAND,
            '{"name": "computer_use", "arguments": {"coordinate": [400.0, 200, 600, 300]}}',
            (100, 25),
        ),
        (
            "qwen",
            THOUSAND,
            '<think>{"arguments": {"coordinate": [1, 1]}}?</think>{"arguments": {"coordinate": [500, 250]}}',
            (100, 25),
        ),
        (
            "pyautogui",
            THOUSAND,
            "```python\npyautogui.moveTo(500, 250)\npyautogui.click()\n```",
            (100, 25),
        ),
    ],
)
def test_a_point_is_read_in_pixels_of_the_screenshot(
    name: str, coordinates: CoordinateMap, text: str, point: tuple[int, int]
) -> None:
    read = format_of(name, "").read(text, coordinates)
    assert (read.point, read.refused, read.problem) == (point, False, "")


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_every_language_asks_and_is_read_again(name: str) -> None:
    answers = format_of(name, "")
    coordinates = COMPACT if name == "compact" else THOUSAND
    assert answers.action_parser == name
    assert (answers.template + answers.system).count("{instruction}") == 1
    assert "{previous}" not in answers.template
    text = answers.write((100, 25), coordinates)
    assert answers.read(text, coordinates).point == (100, 25)


def test_a_prompt_whose_calls_are_in_the_message_of_the_user_keeps_them() -> None:
    for name in ("venus-web", "venus-mobile"):
        answers = format_of(name, "")
        assert "- Click(box=(x1,y1))\n" in answers.template
        assert answers.system == "You are a helpful assistant."


def test_qwens_format_has_the_name_of_its_language() -> None:
    assert format_of("qwen", "").name == "toolcall"


def test_the_resized_screen_is_what_the_model_sees() -> None:
    """At most 4,000 pixels: 84x28 for 200x100, so that its right edge is the screenshot's."""
    assert (RESIZED.grid_width, RESIZED.grid_height) == (84, 28)
    assert RESIZED.to_screen(83, 27) == (198, 98)
    assert RESIZED.to_screen(84, 28) == (198, 98)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compact", "fail()"),
        ("uitars", "Action: call_user()"),
        ("point", "(-1,-1)"),
        ("qwen", '{"arguments": {"action": "terminate", "status": "failure"}}'),
    ],
)
def test_each_format_can_refuse(name: str, text: str) -> None:
    read = format_of(name, "").read(text, COMPACT if name == "compact" else THOUSAND)
    assert (read.point, read.refused) == (None, True)
    assert read.problem


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("compact", "click(5", "ends too early"),
        ("compact", "key(a)", "keypress has no place"),
        ("uitars", "click here", "'click here'"),
        ("point", "no idea", "0 numbers"),
        ("point", "button 12, 3rd row, x1 and y2", "1 numbers"),
        ("point", "50%, 25%", "0 numbers"),
        ("point", "from (10,20) to (30,40)", "2 points or boxes in place of one"),
        ("point", "<think>(500,250)", "does not end"),
        ("qwen", '{"arguments": {"action": "left_click"}}', "has no place|want one call"),
        (
            "qwen",
            '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click"}}\n</tool_call>',
            "the call has no place",
        ),
        ("pyautogui", "```python\npyautogui.click()\n```", "the call has no place"),
        ("scalecua", "<action>\nclick()\n</action>", "the call has no place"),
        (
            "toolcall-mai",
            '<tool_call>{"name": "mobile_use", "arguments": {"action": "swipe", "direction": "up"}}</tool_call>',
            "the call has no place",
        ),
        ("point", "(1, 2, 3)", "3 numbers"),
        ("point", "(1001, 2)", "beyond the screen"),
        ("point", f"({'9' * 400}, 2)", "beyond|large|infinity"),
        ("qwen", "no call", "want one call in <tool_call>"),
        ("qwen", "{" * 5000, "want one call in <tool_call>"),
        ("qwen", '{"arguments": {"coordinate": [1, "2"]}}', "a coordinate is of numbers"),
        ("qwen", '{"arguments": {"coordinate": 7}}', "a coordinate is 2 or 4 numbers"),
        ("qwen", '{"arguments": {"coordinate": [NaN, 2]}}', "NaN|integer"),
        ("qwen", '{"arguments": {"coordinate": [Infinity, 2]}}', "infinity|integer"),
    ],
)
def test_what_is_no_point_says_why_and_is_no_refusal(name: str, text: str, problem: str) -> None:
    read = format_of(name, "").read(text, COMPACT if name == "compact" else THOUSAND)
    assert (read.point, read.refused) == (None, False)
    assert re.search(problem, read.problem), read.problem


def test_a_model_that_shows_its_language_needs_no_action_parser(folders: dict[str, str]) -> None:
    config, answers = grounding_config("builtin:tiny", "", [], refusals=True)
    assert answers.name == "compact"
    assert (config.policy.action_parser, config.policy.coordinates) == ("compact", "thousandths")
    assert config.policy.template == "{instruction}"
    with pytest.raises(
        ConfigError, match=r"--action-parser is needed, .* there are compact, uitars, toolcall"
    ):
        grounding_config(folders["qwen3_vl"], "", [], refusals=False)


@pytest.mark.parametrize(
    ("family", "coordinates"),
    [("qwen2_vl", "thousand"), ("qwen2_5_vl", "resized"), ("qwen3_vl", "thousand")],
)
def test_the_numbers_are_those_that_the_class_writes(
    family: str, coordinates: str, folders: dict[str, str]
) -> None:
    folder = folders[family]
    for name in ("uitars", "qwen", "point"):
        config, _ = grounding_config(folder, name, [], refusals=False)
        assert config.policy.coordinates == coordinates
    changed, _ = grounding_config(
        folder, "point", ["policy.coordinates=thousandths"], refusals=False
    )
    assert changed.policy.coordinates == "thousandths"


def test_a_prompt_says_how_to_refuse_where_the_set_asks_for_it(
    folders: dict[str, str],
) -> None:
    folder = folders["qwen2_5_vl"]
    for name, words in (("uitars", "call_user"), ("qwen", "terminate"), ("point", "(-1,-1)")):
        plain, _ = grounding_config(folder, name, [], refusals=False)
        asked, _ = grounding_config(folder, name, [], refusals=True)
        assert words not in plain.policy.template
        assert words in asked.policy.template
        assert "{refusal}" not in plain.policy.template + asked.policy.template
        assert plain.policy.template.count("{instruction}") == 1


def test_mistakes_are_one_line(tmp_path: Path, folders: dict[str, str]) -> None:
    folder = folders["qwen2_5_vl"]
    for model, action_parser, overrides, problem in (
        (str(tmp_path / "none"), "point", [], "--model is no folder"),
        (folder, "uitar", [], "no such format; did you mean 'uitars'"),
        (
            "builtin:tiny",
            "point",
            [],
            "--action-parser must be compact, the only language of builtin:tiny",
        ),
        (folder, "point", ["policy.template=go"], "policy.template needs {instruction}"),
    ):
        with pytest.raises(ConfigError) as raised:
            grounding_config(model, action_parser, overrides, refusals=False)
        assert problem in str(raised.value)
        assert "\n" not in str(raised.value)
