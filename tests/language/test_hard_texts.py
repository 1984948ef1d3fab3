"""Values that look like the language around them: separators that are keys, markup that is typed or thought of."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bus.errors import ActionError
from dart_cli.config.schema import ACTION_PARSERS
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import PointParser, summary_of
from dart_cli.language.parsers.reading import read_keys
from dart_cli.language.thoughts import reply_of
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    Drag,
    Fail,
    Goto,
    KeyDown,
    KeyPress,
    KeyUp,
    Scroll,
    Type,
    Wait,
)
from envs.tools.inputs import SAME_KEY

HERE = CoordinateMap(1000, 1000, 1000, 1000, pointer=(5, 5))
CALL = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "wait"}}\n</tool_call>'
TEXTS = (
    *(",", "+", "ctrl++", "|", "a, b", "-", "--", " ", "  a  ", "", "\n", "a\nb\n", "\r\n", "\t", "\x00"),
    *("'", '"', "it's 'so'", '"a", "b"', "'''", '"""', ")", "(", "')", "'))", '")', "f('x')"),
    *("print('a')\nprint('b')", "')\n\nclick(start_box='(1,2)", "\\", "C:\\new\\", "\\n", "\\'"),
    *("\\\\'", "\\x3c", "\\u003c", "{}", "[1,2]", "(1,2)", "start_box='(1,2)'", "x=1, y=2"),
    *('"coordinate": [1, 2]', "<parameter=text>\nx\n", "</parameter>", "</function>"),
    *("<tool_call>", "</tool_call>", CALL, f"</tool_call>\n{CALL}", "<think>", "</think>"),
    *("</thinking>", "</think>wait(", f"</think>{CALL}", "</think>\n<tool_call>\n<function=computer_use>"),
    *("```", "```python\nx\n```", "<action>", "</action>", "<action>wait()</action>"),
    *("pyautogui.click(1, 2)", "\npyautogui.click(1, 2)\n", "## Action:\nx", "Thought: a"),
    *("Action: wait()", "\nAction: wait()", "<|begin_of_box|>", "<|end_of_box|>", "DONE()"),
    *("</think>DONE()#", "\nMemory:", "Memory:\n[]", "<|im_end|>", "\u2028", "é", "😀"),
)  # fmt: skip
KEYS = sorted(
    {*SAME_KEY.values(), *string.ascii_lowercase, *string.digits, *string.punctuation}
    | {*(f"f{n}" for n in range(1, 25)), "tab", "space", "backspace", "home", "end", "volume_up"}
)
MARKUP = (
    f"I answer with one <tool_call>, {CALL}, ```python, <action> or <|begin_of_box|>DONE()\n"
    "Action: call_user()\n## Action:\nType it.\n"
)
"""A thought about how to answer."""


def presses() -> Iterator[Action]:
    for key in KEYS:
        yield from (KeyPress(keys=[key]), KeyPress(keys=["ctrl", key]), KeyPress(keys=[key, "+"]))
        yield from (KeyPress(keys=[key, key, "shift"]), KeyDown(key=key), KeyUp(key=key))


def words() -> Iterator[Action]:
    for text in TEXTS:
        yield from (Type(text=text), Answer(text=text), *([Goto(url=text)] if text else []))


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_every_key_and_every_text_is_read_as_it_was_written(name: str) -> None:
    action_parser = make_action_parser(name)
    count = 0
    for action in (*presses(), *words()):
        try:
            text = action_parser.format(action, HERE)
        except ActionError:
            assert action.kind in action_parser.limits, action
        else:
            count += 1
            assert action_parser.parse(text, HERE) == action, text
    assert count > 100


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_no_thought_changes_the_action_behind_it(name: str) -> None:
    """Whether the action parser writes it, the model in tags, or the prompt has begun it."""
    action_parser = make_action_parser(name)
    assert isinstance(action_parser, PointParser)
    for thought in (*TEXTS, MARKUP):
        for action in (Click(x=5, y=6), Type(text="x</think>y"), Done()):
            text = action_parser.format(action, HERE, thought)
            assert action_parser.parse(text, HERE) == action, text
    for action in (Click(x=5, y=6), Type(text="x</think>y")):
        text = action_parser.format(action, HERE)
        leads = ("a</think>", f"{MARKUP}</think>\n\n", f"<think>\n{MARKUP}</think>\n\n")
        for lead in (*leads, f"<think>a</think>\n<think>{MARKUP}</think>"):
            assert action_parser.parse(lead + text, HERE) == action, lead + text
            points = action_parser.find_points(lead + text)
            assert [(point.x, point.y) for point in points] == [(5, 6)] * (action.kind == "click")
            for point in points:
                written = (lead + text)[point.start : point.end]
                assert action_parser.write_point(5, 6).replace(" ", "") in written.replace(" ", "")


@pytest.mark.parametrize("name", ["toolcall", "toolcall-mobile", "pyautogui", "scalecua", "glm"])
def test_what_is_typed_never_ends_a_thought(name: str) -> None:
    """Where a language has escapes: another program may look for the end of a thought, too."""
    text = make_action_parser(name).format(Type(text="a</think>b</thinking>"), HERE)
    assert reply_of(text) == text
    assert "</think" not in text


@pytest.mark.parametrize("name", ACTION_PARSERS)
def test_a_thought_without_an_end_is_no_action(name: str) -> None:
    action_parser = make_action_parser(name)
    text = f"<think>\n{action_parser.format(Click(x=5, y=6), HERE)}"
    with pytest.raises(ActionError, match="the thought that begins the completion does not end"):
        action_parser.parse(text, HERE)
    assert action_parser.find_points(text) == []  # type: ignore[attr-defined]
    assert isinstance(action_parser.as_history(text), str)
    assert isinstance(summary_of(action_parser, text), str)


def test_the_reply_begins_behind_the_first_end_of_a_thought() -> None:
    assert reply_of("<think>a</think>\n\nb</think>c") == "b</think>c"
    assert reply_of("a\n</think>\nb") == "b"
    assert reply_of("b") == "b"


def test_what_a_completion_says_of_its_action_is_not_in_its_thought() -> None:
    said = "<think>Action: Wait.\n## Action:\nWait.\n</think>\n"
    for name, reply in (
        ("toolcall", f"Action: Open it.\n{CALL}"),
        ("pyautogui", "## Action:\nOpen it.\n\n## Code:\n```python\ncomputer.wait()\n```"),
        ("scalecua", "<operation>\nOpen it.\n</operation>\n<action>\nwait()\n</action>"),
    ):
        assert summary_of(make_action_parser(name), said + reply) == "Open it."
    typed = "Thought: a\nAction: type(content='start_box=\"(1,2)\"')"
    assert make_action_parser("uitars").as_history(typed) == typed


# --- as others write ---------------------------------------------------------------------------


def tool_call(tool: str = "computer_use", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def xml_call(**arguments: str) -> str:
    each = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()
    )
    return f"<tool_call>\n<function=computer_use>\n{each}</function>\n</tool_call>"


def holo_step(tool_name: str, **arguments: Any) -> str:
    call = {"tool_name": tool_name, **arguments}
    return json.dumps({"note": None, "thought": "", "tool_call": call})


READ: list[tuple[str, str, Action]] = [
    ("compact", "key(+)", KeyPress(keys=["+"])),
    ("compact", "key(ctrl+-)", KeyPress(keys=["ctrl", "-"])),
    ("compact", "key(,)", KeyPress(keys=[","])),
    ("compact", "key(G)", KeyPress(keys=["shift", "g"])),
    ("uitars", "Action: hotkey(key='ctrl +')", KeyPress(keys=["ctrl", "+"])),
    ("uitars", "Action: hotkey(key='ctrl++')", KeyPress(keys=["ctrl", "+"])),
    ("uitars", "Action: hotkey(key='ctrl + c')", KeyPress(keys=["ctrl", "c"])),
    ("uitars", "Action: hotkey(key='+')", KeyPress(keys=["+"])),
    ("uitars", "Action: hotkey(key=' ')", KeyPress(keys=["space"])),
    ("uitars", "Action: hotkey(key='G')", KeyPress(keys=["shift", "g"])),
    ("uitars", "Action: hotkey(key='page down')", KeyPress(keys=["pagedown"])),
    ("uitars", "Action: type(content='say 'hi', now')", Type(text="say 'hi', now")),
    ("uitars", "Action: type(content='f('x')')", Type(text="f('x')")),
    ("uitars", "Action: type(content='C:\\dir\\a')", Type(text="C:\\dir\\a")),
    ("uitars", 'Action: finished(content="the "best" one")', Answer(text='the "best" one')),
    (
        "uitars",
        "Thought: a\nAction: type(content='b\nAction: c')",
        Type(text="b\nAction: c"),
    ),
    ("toolcall", tool_call(action="key", keys=["G"]), KeyPress(keys=["shift", "g"])),
    ("toolcall", tool_call(action="key", keys=["ctrl++"]), KeyPress(keys=["ctrl", "+"])),
    ("toolcall", tool_call(action="key", keys=["\n"]), KeyPress(keys=["enter"])),
    ("toolcall", tool_call(action="key", keys=["Page Down"]), KeyPress(keys=["pagedown"])),
    ("toolcall", f"I write one <tool_call> now.\n{CALL}", Wait()),
    ("toolcall", tool_call(action="type", text="</tool_call>"), Type(text="</tool_call>")),
    ("toolcall", tool_call(action="type", text=CALL), Type(text=CALL)),
    (
        "toolcall-mobile",
        tool_call("mobile_use", action="key", text="G"),
        KeyPress(keys=["shift", "g"]),
    ),
    ("toolcall-mobile", tool_call("mobile_use", action="interact", text="log in"), Fail()),
    ("toolcall-xml", xml_call(action="key", keys="7"), KeyPress(keys=["7"])),
    ("toolcall-xml", xml_call(action="key", keys="ctrl++"), KeyPress(keys=["ctrl", "+"])),
    ("toolcall-xml", xml_call(action="type", text="7"), Type(text="7")),
    ("toolcall-fara", tool_call(action="key", keys=["Control", "ArrowLeft"]), KeyPress(keys=["ctrl", "left"])),
    ("toolcall-fara", tool_call(action="terminate", answer=""), Done()),
    ("toolcall-fara", tool_call(action="scroll", pixels=-1), Scroll(x=5, y=5, dy=1)),
    ("venus", "<think>a</think>\n<action>\nType(content='a\nb')\n</action>", Type(text="a\nb")),
    ("venus", "<action>Type(content='<action>Wait()</action>')</action>", Type(text="<action>Wait()</action>")),
    ("venus", "I write <action> now.</think>\n<action>Wait()</action>", Wait()),
    ("venus", "<action>Drag(end=(5, 6))</action>", Drag(path=[(5, 5), (5, 6)])),
    ("venus", "<action>Hotkey(keys=('ctrl', 'C'))</action>", KeyPress(keys=["ctrl", "shift", "c"])),
    ("venus-web", "<action>Type(content='it's \"so\", isn't it')</action>", Type(text="it's \"so\", isn't it")),
    ("venus-web", "<action>\nCallUser(content='it's\n\\\\ it\\'s')\n</action>", Answer(text="it's\n\\ it's")),
    ("venus-web", '<action>Type(content="a "b" c")</action>', Type(text='a "b" c')),
    ("venus-web", "<action>Launch(app='', url='a.b')</action>", Goto(url="a.b")),
    ("venus-mobile", "I write <action> now.</think>\n<action>Wait()</action>\n<conclusion>a</conclusion>", Wait()),
    ("venus-mobile", "<action>Finished()</action>", Done()),
    ("holo", holo_step("answer", content=""), Done()),
    ("holo", holo_step("write_desktop", content="a", press_enter=None), Type(text="a")),
    ("holo", "a thought\n</think>\n\n" + holo_step("wait_desktop", seconds=2), Wait(seconds=2)),
    ("pyautogui", "```python\npyautogui.press('+')\n```", KeyPress(keys=["+"])),
    ("pyautogui", "```python\npyautogui.press('\\t')\n```", KeyPress(keys=["tab"])),
    ("pyautogui", "```python\npyautogui.write('```')\n```", Type(text="```")),
    (
        "pyautogui",
        "```python\npyautogui.write('''\n```\na\n```\n''')\n```",
        Type(text="\n```\na\n```\n"),
    ),
    (
        "pyautogui",
        "```python\npyautogui.keyDown('shift'); pyautogui.press('G'); pyautogui.keyUp('shift')\n```",
        KeyPress(keys=["shift", "g"]),
    ),
    ("scalecua", "<action>\nwrite('<action>')\n</action>", Type(text="<action>")),
    ("scalecua", "<action>\nhotkey('ctrl', 'A')\n</action>", KeyPress(keys=["ctrl", "shift", "a"])),
    ("glm", "<|begin_of_box|>key(keys='ctrl++')<|end_of_box|>", KeyPress(keys=["ctrl", "+"])),
    ("glm", "<|begin_of_box|>key(keys='G')<|end_of_box|>", KeyPress(keys=["shift", "g"])),
    (
        "glm",
        "<|begin_of_box|>type(content='<|end_of_box|>')<|end_of_box|>\nMemory:\n[]",
        Type(text="<|end_of_box|>"),
    ),
    (
        "glm",
        '<|begin_of_box|>WAIT()<|end_of_box|>\nMemory:\n[{"a": "<|begin_of_box|>"}]',
        Wait(seconds=5),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "action"), READ)
def test_a_separator_is_also_a_value(name: str, text: str, action: Action) -> None:
    assert make_action_parser(name).parse(text, HERE) == action


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["Ctrl", "C"], ["ctrl", "shift", "c"]),
        (["CTRL", "c"], ["ctrl", "c"]),
        (["shift", "A"], ["shift", "a"]),
        (["A", "B"], ["shift", "a", "b"]),
        (["ctrl+shift++"], ["ctrl", "shift", "+"]),
        (["+++"], ["+", "+"]),
        (["ctrl ++"], ["ctrl", "+"]),
        (["ctrl", "!"], ["ctrl", "!"]),
        (["Return"], ["enter"]),
        ([" ", "\t", "\r\n"], ["space", "tab", "enter"]),
        (
            ["Print Screen", "arrow left", "ctrl+num lock"],
            ["printscreen", "left", "ctrl", "numlock"],
        ),
    ],
)
def test_names_of_keys_keep_what_their_case_and_their_signs_say(
    names: list[str], keys: list[str]
) -> None:
    """A capital as pyautogui presses it: with shift, while names of several letters have no case."""
    assert read_keys(names) == keys


@pytest.mark.parametrize(
    "name", ["", "  ", "ctrl+", "++", "+a", "ctrl,c", "ctrl-c", "É", "\x00", "a\u0301"]
)
def test_what_is_no_name_of_a_key_is_refused(name: str) -> None:
    with pytest.raises(ActionError):
        read_keys([name])


REFUSED = [
    ("compact", "key_down(G)", "one key is held or pressed at a time, got shift, g"),
    ("uitars", "Action: type(content='a')\n\nclick(start_box='(1,2)')", "expected the end"),
    ("toolcall", f"{CALL}\n{CALL}", "not one object of JSON"),
    ("toolcall", f"{CALL}\nor <tool_call>", "does not end with"),
    ("toolcall", tool_call(action="left_click", x=1, y=2), "no argument 'x'; it has coordinate, text"),
    ("toolcall", tool_call(action="left_click", coordinates=[1, 2]), "no argument 'coordinates'"),
    ("toolcall", tool_call(action="wait", duration=5), "no argument 'duration'; it has time"),
    ("toolcall", tool_call(action="scroll", pixels=5, text="ctrl"), "no argument 'text'"),
    ("toolcall", tool_call(action="type", text="a", coordinate=[1, 2]), "no argument 'coordinate'"),
    ("toolcall-mobile", tool_call("mobile_use", action="click", coordinate=[1, 2], x=3), "no argument 'x'"),
    ("toolcall-mai", tool_call("mobile_use", action="swipe", direction="up", distance=3), "no argument 'distance'"),
    ("toolcall-xml", xml_call(action="left_click", position="[1, 2]"), "no argument 'position'"),
    ("toolcall-fara", tool_call(action="middle_click", coordinate=[1, 2]), "Fara has no action 'middle_click'"),
    ("toolcall-fara", tool_call(action="type", text="a", press_enter=True), "no argument 'press_enter'"),
    ("toolcall-fara", tool_call(action="read_page_answer_question", question="a"), "no suite reads a page"),
    ("toolcall-fara", tool_call(action="visit_url", url=" "), "url is empty"),
    ("venus", "<action>Sequence(actions=[Wait(), Wait()])</action>", "one completion is one action"),
    ("venus", "<action>Hotkey(keys=['down'], repeat=5)</action>", "press in several steps"),
    ("venus", "<action>Click(point=(1, 2))</action>", "no argument 'point'; it has box"),
    ("venus", "<action>Click((1, 2))</action>", "want one call with named arguments"),
    ("venus", "<action>Wait()</action>\n<action>Wait()</action>", "is no Python|want one call"),
    ("venus", "<action>Swipe(amount=5000, axis='vertical')</action>", "amount must be"),
    ("venus", "Click(box=(1, 2))", "want one call in <action>"),
    ("venus", "<action>Type(content='it's')</action>", "line 1 is no Python"),
    ("venus-web", "<action>Type(content='a', content='b')</action>", "Type is given content twice"),
    ("venus-web", "<action>Type(content='a')\nType(content='b')</action>", "want one call with named"),
    ("venus-web", "<action>Type(content='a') Type(content='b')</action>", "line 1 is no Python"),
    ("venus-web", "<action>Click()</action>", "Click lacks 'box'"),
    ("venus-web", "<action>Click(box=(1000,5))</action>", "x=1000 is beyond the screen"),
    ("venus-web", "<action>Drag(end=(5,6))</action>", "Drag lacks 'start'"),
    ("venus-web", "<action>Scroll(direction='left')</action>", "direction must be down or up, got 'left'"),
    ("venus-web", "<action>Scroll(start=(1,2), end=(3,4))</action>", "no argument 'start'; it has direction"),
    ("venus-web", "<action>PressHome()</action>", "PressHome is a button of a telephone"),
    ("venus-web", "<action>Launch(app='Chrome')</action>", "no suite opens an application"),
    ("venus-web", "<action>CallUser()</action>", "CallUser lacks 'content'"),
    ("venus-web", "<action>Wait()</action>\n<action>Wait()</action>", "is no Python|want one call"),
    ("venus-web", "<action>Sequence(actions=[Wait(), Wait()])</action>", "one completion is one action"),
    ("venus-web", "Click(box=(1,2))", "want one call in <action>"),
    ("venus-web", "<action>RightClick(box=(1,2))</action>", "there is no call 'RightClick'"),
    ("venus-mobile", "<action>Scroll(direction='down')</action>", "Scroll lacks 'start'"),
    ("venus-mobile", "<action>Hover(box=(1,2))</action>", "there is no call 'Hover'"),
    ("venus-mobile", "<action>Launch(app='Clock')</action>", "no suite opens an application"),
    ("venus-mobile", "<action>Launch(url='a.b')</action>", "no argument 'url'; it has app"),
    ("holo", holo_step("write_at_desktop", x=1, y=2, content="a"), "there is no tool 'write_at_desktop'"),
    ("holo", holo_step("write_desktop", content="a", overwrite=True), "act in several steps"),
    ("holo", holo_step("hotkey_desktop", keys=["down"], repeat_count=3), "act in several steps"),
    ("holo", holo_step("click_desktop", x=1, y=2, times=2), "no argument 'times'; it has element, x"),
    ("holo", holo_step("click_desktop", x=1), "click_desktop lacks 'y'"),
    ("holo", '{"tool_name": "answer"}', "want .*tool_call"),
    ("holo", holo_step("wait_desktop", seconds=1) * 2, "not one object of JSON"),
    ("pyautogui", "```python\npyautogui.click(1, 2, modifier='ctrl')\n```", "no argument 'modifier'"),
    ("pyautogui", "```python\npyautogui.hotkey(['ctrl', ['c']])\n```", "an argument is"),
    ("pyautogui", "```python\npyautogui.press('ctrl+c')\n```", "one key is held or pressed"),
    ("scalecua", "<action>\nclick(x=1, y=2, at=3)\n</action>", "no argument 'at'"),
    ("glm", "<|begin_of_box|>left_click(start_box='[1,2]', x=3)<|end_of_box|>", "no argument 'x'; it has start_box"),
    ("glm", "<|begin_of_box|>WAIT(seconds=3)<|end_of_box|>", "no argument 'seconds'; it has none"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), REFUSED)
def test_what_a_call_does_not_have_is_named(name: str, text: str, said: str) -> None:
    with pytest.raises(ActionError, match=said):
        make_action_parser(name).parse(text, HERE)


@pytest.mark.parametrize(
    ("name", "text", "action"),
    [
        ("toolcall", tool_call(action="wait", time=2, coordinate=None, text="", keys=[]), Wait(seconds=2)),
        ("toolcall", tool_call(action="left_click", coordinate=[5, 6], text=""), Click(x=5, y=6)),
        ("toolcall", tool_call(action="scroll", coordinate=[5, 6], pixels=-3, text=None), Scroll(x=5, y=6, dy=3)),
        ("glm", "<|begin_of_box|>left_click(start_box='[5,6]', element_info='a')<|end_of_box|>", Click(x=5, y=6)),
        ("pyautogui", "```python\npyautogui.click(5, 6, duration=0.5, logScreenshot=False)\n```", Click(x=5, y=6)),
    ],
)  # fmt: skip
def test_arguments_that_say_nothing_are_passed_over(name: str, text: str, action: Action) -> None:
    assert make_action_parser(name).parse(text, HERE) == action


def test_a_place_that_no_call_names_is_none_where_none_is_assumed() -> None:
    """In measuring; a place that an earlier line of the same code named counts."""
    measured = replace(HERE, pointer=None, assumes_places=False)
    for name, text in (
        ("toolcall", tool_call(action="left_click")),
        ("toolcall", tool_call(action="scroll", pixels=3)),
        ("toolcall", tool_call(action="left_click_drag", coordinate=[1, 2])),
        ("toolcall-mai", tool_call("mobile_use", action="swipe", direction="up")),
        ("toolcall-xml", xml_call(action="left_click")),
        ("toolcall-fara", tool_call(action="scroll", pixels=3)),
        ("venus", "<action>Click()</action>"),
        ("venus", "<action>Swipe(amount=3, axis='vertical')</action>"),
        ("venus-web", "<action>Scroll(direction='down')</action>"),
        ("pyautogui", "```python\npyautogui.click()\n```"),
        ("scalecua", "<action>\nscroll(3)\n</action>"),
    ):
        with pytest.raises(ActionError):
            make_action_parser(name).parse(text, measured)
    moved = "```python\npyautogui.moveTo(5, 6)\npyautogui.click()\n```"
    assert make_action_parser("pyautogui").parse(moved, measured) == Click(x=5, y=6)
