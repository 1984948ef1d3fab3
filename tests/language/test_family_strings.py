"""Published texts of each family of models: what each means, by its action parser and its numbers."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ActionError
from dart_cli.config.families import FAMILIES, values_of
from dart_cli.config.model_folder import Screens
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap, make_coordinate_map
from dart_cli.language.parsers import make_action_parser, point_parser
from dart_cli.language.parsers.base import summary_of
from dart_cli.language.parsers.fara import FARA_BROWSER
from dart_cli.language.parsers.tools import COMPUTER_USE, Tool
from envs.contract.actions import action_from_dict

STRINGS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "family_strings.toml").read_text(encoding="utf-8")
)["string"]


def coordinates_of(family: str) -> CoordinateMap:
    its = FAMILIES[family]
    screens = its.bounds or Screens(28, 3136, 12_845_056)
    return make_coordinate_map(its.coordinates, 1920, 1080, screens)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_published_texts_mean_these_actions_and_are_written_again(family: str) -> None:
    action_parser = make_action_parser(FAMILIES[family].action_parser)
    strings = [each for each in STRINGS if each["family"] == family]
    assert len(strings) >= 5
    for each in strings:
        pointer = tuple(each["pointer"]) if "pointer" in each else None
        coordinates = replace(coordinates_of(family), pointer=pointer)
        action = action_parser.parse(each["text"], coordinates)
        assert action == action_from_dict(each["action"]), each["text"]
        try:
            written = action_parser.format(action, coordinates, "Do it.")
        except ActionError:
            assert action.kind in action_parser.limits
        else:
            again = action_parser.parse(written, coordinates)
            assert again.kind == action.kind
            assert action_parser.format(again, coordinates, "Do it.") == written


def test_a_points_place_is_found_in_published_texts() -> None:
    places = Counter(
        FAMILIES[each["family"]].action_parser
        for each in STRINGS
        if point_parser(FAMILIES[each["family"]].action_parser).find_points(each["text"])
    )
    assert set(places) == {its.action_parser for its in FAMILIES.values()}
    assert min(places.values()) >= 2, places


def system_of(family: str) -> str:
    return str(values_of(family)["system_prompt"][0])


@pytest.mark.parametrize(
    ("family", "tool", "unread"),
    [
        ("qwen3.5", COMPUTER_USE, set()),
        ("qwen3.8", COMPUTER_USE, set()),
        ("fara-1.5", FARA_BROWSER, {"read_page_answer_question"}),
    ],
)
def test_each_action_of_a_prompts_tool_is_read_with_the_arguments_that_the_prompt_names(
    family: str, tool: Tool, unread: set[str]
) -> None:
    text = system_of(family)
    function = json.loads(text.partition("<tools>\n")[2].partition("\n</tools>")[0])["function"]
    assert function["name"] == tool.name
    assert "resolution is 1000x1000" in function["description"]
    properties = function["parameters"]["properties"]
    names = properties["action"]["enum"]
    assert set(names) <= tool.others.keys()
    arguments = {key for name in names for key in (*tool.points.get(name, ()), *tool.others[name])}
    assert properties.keys() - {"action"} <= arguments
    filled = {"coordinate": [5, 6], "keys": ["a"], "pixels": 3, "time": 1, "status": "failure"}
    for name in names:
        keys = (*tool.points.get(name, ()), *tool.others[name])
        call = {"action": name} | {
            key: filled.get(key, "ctrl") for key in keys if key in properties
        }
        if name in unread:
            with pytest.raises(ActionError):
                tool.read(call, AS_IT_IS)
        else:
            tool.read(call, AS_IT_IS)


def test_each_call_of_ui_venus_prompt_is_read_with_its_arguments() -> None:
    text = system_of("ui-venus-2")
    rows = re.findall(r"^- (\w+)\((.*?)\)(?:, or|$)", text.partition("### Instr")[0], re.MULTILINE)
    assert len(rows) == 18
    for name, arguments in rows:
        if name == "Sequence":
            continue
        code = re.sub(r"\b[xy][12]\b", "5", f"{name}({arguments})")
        action = make_action_parser("venus").parse(f"<action>{code}</action>", AS_IT_IS)
        assert action.kind


@pytest.mark.parametrize(
    ("family", "calls", "unread"),
    [
        ("ui-venus-1.5", 16, {"PressHome", "PressRecent"}),
        ("ui-venus-1.5-mobile", 13, {"Launch"}),
    ],
)
def test_each_call_of_a_prompt_of_ui_venus_1_5_is_read_with_its_arguments(
    family: str, calls: int, unread: set[str]
) -> None:
    text = str(values_of(family)["template"][0])
    rows = re.findall(r"^- (\w+)\((.*)\)(?: #.*)?$", text.partition("### User")[0], re.MULTILINE)
    assert len(rows) == calls
    refused = set()
    for name, arguments in rows:
        code = f"{name}({arguments})".replace("down or up", "down").replace("url=''", "url='a.b'")
        code = re.sub(r"\b[xy][12]\b", "5", code.replace(" or ", ", "))
        try:
            make_action_parser(FAMILIES[family].action_parser).parse(
                f"<action>{code}</action>", AS_IT_IS
            )
        except ActionError:
            refused.add(name)
    assert refused == unread


def test_a_prompt_of_ui_venus_1_5_is_what_its_makers_published_but_for_one_sentence() -> None:
    enter = " The system automatically presses `ENTER` afterward."
    web = str(values_of("ui-venus-1.5")["template"][0])
    whole = web.replace("`Type(content='...')`.", f"`Type(content='...')`.{enter}")
    assert len(whole) == len(web) + len(enter)
    mobile = str(values_of("ui-venus-1.5-mobile")["template"][0])
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (whole, mobile)]
    assert digests == ["4aad8487cfc9deca", "01038fc9fd51187d"]


def test_each_tool_of_holos_prompt_is_read_with_its_arguments() -> None:
    text = system_of("holo-3.1")
    schema = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    tools = schema["properties"]["tool_call"]["anyOf"]
    assert len(tools) == 13
    filled = {"integer": 5, "number": 5, "string": "a", "array": ["a"], "boolean": True}
    for tool in tools:
        properties = tool["properties"]
        name = properties.pop("tool_name")["const"]
        call = {
            key: its["enum"][0] if "enum" in its else filled[its["type"]]
            for key, its in properties.items()
        }
        step = {"note": None, "thought": "", "tool_call": {"tool_name": name, **call}}
        assert make_action_parser("holo").parse(json.dumps(step), AS_IT_IS).kind


@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ("qwen3.5", "15cb5468ada9c375"),
        ("qwen3.8", "38369f566ba96e55"),
        ("fara-1.5", "74c9b10b72cc7aba"),
        ("ui-venus-2", "08ac3d51eabda475"),
    ],
)
def test_a_prompt_is_the_text_that_its_makers_published(family: str, digest: str) -> None:
    """With {date} and {instruction} in their places: no editor changed a character since it was read."""
    assert hashlib.sha256(system_of(family).encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_mean_what_the_familys_own_agent_makes_of_them(family: str) -> None:
    """Within three pixels of 1920x1080; an agent divides by 999, 1000 or the resized width."""
    coordinates = coordinates_of(family)
    divisor = {
        "thousand": (1000.0, 1000.0),
        "thousandths": (999.0, 999.0),
        "unit": (1.0, 1.0),
        "resized": (float(coordinates.grid_width), float(coordinates.grid_height)),
    }[FAMILIES[family].coordinates]
    scale = 10**coordinates.decimals
    for part in range(1, 100):
        x, y = divisor[0] * part / 100, divisor[1] * part / 100
        seen = coordinates.to_screen(int(x * scale), int(y * scale))
        own = int(x) / divisor[0] * 1920, int(y) / divisor[1] * 1080
        if coordinates.decimals:
            own = x * 1920, y * 1080
        assert abs(seen[0] - own[0]) <= 3
        assert abs(seen[1] - own[1]) <= 3


@pytest.mark.parametrize(
    ("action_parser", "text", "said"),
    [
        ("toolcall", "Action: Click it. \n<tool_call>\n{}\n</tool_call>", "Click it."),
        ("toolcall", "<tool_call>\n{}\n</tool_call>", ""),
        (
            "toolcall",
            '<tool_call>{"name": "computer_use", "arguments": {"action": "wait"}}</tool_call>',
            "Performing wait action",
        ),
        (
            "scalecua",
            "<operation>\nOpen it.\n</operation>\n<action>\nwait()\n</action>",
            "Open it.",
        ),
        ("pyautogui", "## Action:\nOpen it.\n\n## Code:\n```python\n```", "Open it."),
        (
            "glm",
            "<think>a</think>I wait. <|begin_of_box|>WAIT()<|end_of_box|>\nMemory:\n[]",
            "Thought: I wait.\nAction: WAIT()",
        ),
        ("uitars", "Thought: a\nAction: wait()", "Thought: a Action: wait()"),
        (
            "venus-web",
            "<think>\nIt is there.\n</think>\n<action>\nWait()\n</action>\n<conclusion>Wait.</conclusion>",
            "<think>It is there.</think><action>Wait()</action>",
        ),
        (
            "venus-mobile",  # after a prompt that has the opening tag
            "It is there.\n</think>\n\n<action>Go()</action>",
            "<think>It is there.</think><action>Go()</action>",
        ),
        (
            "venus-web",
            "<action>Type(content='</think>')</action>",
            "<think></think><action>Type(content='</think>')</action>",
        ),
        ("venus-web", "<think>It is there.</think>\nWait()", ""),
    ],
)
def test_what_a_completion_says_of_its_action_is_one_line(
    action_parser: str, text: str, said: str
) -> None:
    assert summary_of(make_action_parser(action_parser), text) == said


def test_a_past_turn_of_opencua_keeps_its_number_and_its_action_alone() -> None:
    text = (
        "# Step 3:\n## Thought:\nIt is there.\n\n## Action:\nClick it.\n\n## Code:\n"
        "```python\npyautogui.click(x=1, y=2)\n```\n"
    )
    action_parser = make_action_parser("pyautogui")
    assert action_parser.as_history(text) == "# Step 3:\n## Action:\nClick it.\n"
    assert action_parser.as_history("pyautogui.click(x=1, y=2)") == "pyautogui.click(x=1, y=2)"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pyautogui.click(x=1, y=2)\npyautogui.write('a')", "2 actions in one step"),
        ("pyautogui.press('down', presses=3)", "press in several steps"),
        ("pyautogui.press(['a', 'b'])", "press in several steps"),
        ("pyautogui.dragTo(x=1, y=2)", "a moveTo or an earlier action"),
        ("pyautogui.click(1, 2, 2)", "write clicks by its name"),
        ("pyautogui.click(x=1)", "both x and y"),
        ("pyautogui.click(x='1', y=2)", "x and y are numbers"),
        ("pyautogui.click(x=f(), y=2)", "an argument is a text, a number"),
        ("pyautogui.click(**{'x': 1})", "unpacks no arguments"),
        ("pyautogui.click(x=1, y=2, modifiers=['ctrl'])", "no argument 'modifiers'"),
        ("pyautogui.hotkey()", "keys are texts"),
        ("__import__('os').system('true')", "there is no call '__import__'|MODULE.NAME"),
        ("os.system('true')", "there is no call 'os.system'"),
        ("open('/etc/passwd')", "there is no call 'open'"),
        ("x = 1", "line 1 is no call"),
        ("for i in range(9): pyautogui.click()", "line 1 is no call"),
        ("pyautogui.scroll(10 ** 9)", "an argument is a text"),
        ("pyautogui.scroll(1000000)", "notches"),
        ("pyautogui.write('\\ud800')", "not understood"),
        ("pyautogui.click(x=1e999, y=1)", "not understood|beyond"),
        ("import pyautogui", "the code has no call"),
        ("computer.terminate(status='perhaps')", "status must be"),
    ],
)
def test_code_that_is_no_action_of_the_closed_set_names_the_cause(code: str, said: str) -> None:
    with pytest.raises(ActionError, match=said):
        make_action_parser("pyautogui").parse(f"```python\n{code}\n```", coordinates_of("opencua"))


@pytest.mark.parametrize(
    ("code", "action"),
    [
        ("pyautogui.moveTo(x=10, y=20)\npyautogui.click()", {"kind": "click", "x": 10, "y": 20}),
        (
            "pyautogui.keyDown('ctrl')\npyautogui.click(x=10, y=20)\npyautogui.keyUp('ctrl')",
            {"kind": "click", "x": 10, "y": 20, "modifiers": ("ctrl",)},
        ),
        (
            "pyautogui.keyDown('ctrl'); pyautogui.press('c'); pyautogui.keyUp('ctrl')",
            {"kind": "keypress", "keys": ["ctrl", "c"]},
        ),
        (
            "import pyautogui\npyautogui.click(10, 20, duration=0.5)\ntime.sleep(1)",
            {"kind": "click", "x": 10, "y": 20},
        ),
        (
            "pyautogui.mouseDown(10, 20)\npyautogui.moveTo(30, 40, 0.5)\npyautogui.mouseUp()",
            {"kind": "drag", "path": [(10, 20), (30, 40)]},
        ),
    ],
)
def test_lines_that_are_one_action_together_are_read_as_it(
    code: str, action: dict[str, Any]
) -> None:
    read = make_action_parser("pyautogui").parse(
        f"```python\n{code}\n```", coordinates_of("opencua")
    )
    assert read == action_from_dict(action)
