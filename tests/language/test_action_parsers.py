"""Promises of the action languages: golden texts, round trips, and refusals that name the cause."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bus.errors import ActionError, ConfigError
from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import ACTION_PARSERS
from dart_cli.language.coordinates import CoordinateConvention, CoordinateMap, make_coordinate_map
from dart_cli.language.parsers import compact, make_action_parser, point_parser, uitars
from dart_cli.language.parsers.base import ActionParser
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
)
from tests.waiting import PATIENCE_S

WIDTH, HEIGHT = 448, 336
THOUSANDTHS = make_coordinate_map("thousandths", WIDTH, HEIGHT)
SCREEN = CoordinateMap(1920, 1080, 1932, 1092)
COMPACT, UITARS = make_action_parser("compact"), make_action_parser("uitars")
FAMILIES = {
    name: point_parser(name) for name in ACTION_PARSERS if name not in ("compact", "uitars")
}
CONVENTIONS: tuple[CoordinateConvention, ...] = ("thousandths", "resized")
OWN = make_action_parser(f"{Path(__file__).parents[2]}/docs/examples/json_parser.py:JsonParser")

COMPACT_GOLDEN = [
    ("click(63,91)", Click(x=28, y=30)),
    ("click(0,0)", Click(x=0, y=0)),
    ("click(999,999)", Click(x=447, y=335)),
    ("click(007,7)", Click(x=3, y=2)),
    ("right_click(500,500)", Click(x=224, y=168, button="right")),
    ("double_click(500,500)", DoubleClick(x=224, y=168)),
    ("move(1,2)", Move(x=0, y=0)),
    ("drag(0,0,999,999)", Drag(path=[(0, 0), (447, 335)])),
    ("scroll(500,500,up)", Scroll(x=224, y=168, dy=-3)),
    ("scroll(500,500,down)", Scroll(x=224, y=168, dy=3)),
    ("type(f(x) = (1))", Type(text="f(x) = (1)")),
    ("type()", Type(text="")),
    ("type(two\nlines)", Type(text="two\nlines")),
    ("type(click(1,2))", Type(text="click(1,2)")),
    ("key(enter)", KeyPress(keys=["enter"])),
    ("key(ctrl+shift+s)", KeyPress(keys=["ctrl", "shift", "s"])),
    ("key(ctrl+plus)", KeyPress(keys=["ctrl", "+"])),
    ("key(ctrl++)", KeyPress(keys=["ctrl", "+"])),
    ("middle_click(500,500)", Click(x=224, y=168, button="middle")),
    ("triple_click(500,500)", TripleClick(x=224, y=168)),
    ("ctrl+click(500,500)", Click(x=224, y=168, modifiers=("ctrl",))),
    (
        "shift+alt+right_click(0,0)",
        Click(x=0, y=0, button="right", modifiers=("shift", "alt")),
    ),
    ("drag(0,0,500,0,500,500)", Drag(path=[(0, 0), (224, 0), (224, 168)])),
    (
        "meta+right_drag(0,0,999,999)",
        Drag(path=[(0, 0), (447, 335)], button="right", modifiers=("meta",)),
    ),
    ("mouse_down(500,500)", MouseDown(x=224, y=168)),
    ("mouse_down(500,500,right)", MouseDown(x=224, y=168, button="right")),
    ("mouse_up()", MouseUp()),
    ("mouse_up(middle)", MouseUp(button="middle")),
    ("key_down(ctrl)", KeyDown(key="ctrl")),
    ("key_up(plus)", KeyUp(key="+")),
    ("goto(http://a.b/c?d=(e))", Goto(url="http://a.b/c?d=(e)")),
    ("wait()", Wait(seconds=1.0)),
    ("done()", Done()),
    ("fail()", Fail()),
    ("answer(42 (about))", Answer(text="42 (about)")),
]

UITARS_GOLDEN = [
    (
        "Thought: The field is empty.\nI click it.\nAction: click(start_box='(640,52)')",
        Click(x=636, y=51),
    ),
    ("Action: click(start_box='<|box_start|>(640,52)<|box_end|>')", Click(x=636, y=51)),
    ('Action: click(start_box="(640, 52)")', Click(x=636, y=51)),
    ("Action: click(start_box='(600,40,680,64)')", Click(x=636, y=51)),
    ("Thought: a\nAction: left_double(start_box='(0,0)')", DoubleClick(x=0, y=0)),
    (
        "Thought: a\nAction: right_single(start_box='(1931,1091)')",
        Click(x=1919, y=1079, button="right"),
    ),
    (
        "Thought: a\nAction: drag(start_box='(0,0)', end_box='(1931,1091)')",
        Drag(path=[(0, 0), (1919, 1079)]),
    ),
    ("Thought: a\nAction: hotkey(key='ctrl c')", KeyPress(keys=["ctrl", "c"])),
    ("Thought: a\nAction: hotkey(key='Ctrl+Return')", KeyPress(keys=["ctrl", "enter"])),
    ("Thought: a\nAction: hotkey(key='arrowdown')", KeyPress(keys=["down"])),
    ("Thought: a\nAction: type(content='hello\\n')", Type(text="hello\n")),
    ("Thought: a\nAction: type(content='it\\'s \\\"so\\\"')", Type(text='it\'s "so"')),
    ("Thought: a\nAction: type(content='don't')", Type(text="don't")),
    ("Thought: a\nAction: type(content='C:\\\\new')", Type(text="C:\\new")),
    ("Thought: a\nAction: type(content='100\\%')", Type(text="100\\%")),
    ("Thought: a\nAction: type(content='see\nAction')", Type(text="see\nAction")),
    ("Action: scroll(start_box='(0,0)', direction='up')", Scroll(x=0, y=0, dy=-5)),
    ("Action: scroll(direction='right', start_box='(0,0)')", Scroll(x=0, y=0, dx=5)),
    ("Action: left_single(start_box='(640,52)')", Click(x=636, y=51)),
    ("Thought: a\nAction: click(point='<point>640 52</point>')", Click(x=636, y=51)),
    (
        "Action: drag(start_point='<point>0 0</point>', end_point='<point>1931 1091</point>')",
        Drag(path=[(0, 0), (1919, 1079)]),
    ),
    ("Action: left_triple(start_box='(0,0)')", TripleClick(x=0, y=0)),
    ("Action: middle_click(start_box='(0,0)')", Click(x=0, y=0, button="middle")),
    ("Action: hover(start_box='(640,52)')", Move(x=636, y=51)),
    ("Action: move_to(start_box='(640,52)')", Move(x=636, y=51)),
    (
        "Action: select(start_box='(0,0)', end_box='(1931,1091)')",
        Drag(path=[(0, 0), (1919, 1079)]),
    ),
    ("Action: mouse_down(start_box='(640,52)')", MouseDown(x=636, y=51)),
    (
        "Action: mouse_down(start_box='(0,0)', button='right')",
        MouseDown(x=0, y=0, button="right"),
    ),
    ("Action: mouse_up()", MouseUp()),
    ("Action: mouse_up(button='middle')", MouseUp(button="middle")),
    ("Action: press(key='ctrl')", KeyDown(key="ctrl")),
    ("Action: keydown(key='Return')", KeyDown(key="enter")),
    ("Action: release(key='ctrl')", KeyUp(key="ctrl")),
    ("Action: keyup(key='shift')", KeyUp(key="shift")),
    ("Action: call_user(content='which one?')", Fail()),
    ("Thought: a\nAction: wait()", Wait(seconds=5.0)),
    ("Thought: a\nAction: finished()", Done()),
    ("Thought: a\nAction: finished(content='')", Done()),
    ("Thought: a\nAction: finished(content='42')", Answer(text="42")),
    ("Thought: a\nAction: call_user()", Fail()),
    (
        "Thought: first\nAction: wait()? No.\nAction: call_user()\n",
        Fail(),
    ),
]


@pytest.mark.parametrize(("text", "action"), COMPACT_GOLDEN)
def test_compact_text_means_this_action(text: str, action: Action) -> None:
    assert COMPACT.parse(text, THOUSANDTHS) == action


@pytest.mark.parametrize(("text", "action"), UITARS_GOLDEN)
def test_uitars_text_means_this_action(text: str, action: Action) -> None:
    assert UITARS.parse(text, SCREEN) == action


COMPACT_REFUSED = [
    ("", "empty"),
    ("click(1,2", "ends too early; expected )"),
    ("click(1000,2)", "beyond the screen: 0 to 999"),
    ("click(1,2) ", "expected the end"),
    (" click(1,2)", "character 0"),
    ("click(1,2)click(1,2)", "character 10"),
    ("click(-1,2)", "a number 0-999"),
    ("click(1,2,3)", "expected )"),
    ("Click(1,2)", "click("),
    ("scroll(1,2,left)", "up or down"),
    ("key()", "keys joined by +"),
    ("key(ctrl+)", "does not say which keys are pressed"),
    ("key(two words)", "keys joined by +"),
    ("type(never closed", "type(TEXT)"),
    ("ctrl+type(a)", "click("),
    ("drag(1,2)", "expected ,"),
    ("mouse_down(1,2,up)", "left, right or middle"),
    ("key_down(ctrl+c)", "one key is held or pressed at a time"),
    ("__import__('os').system('true')", "character 0"),
]
UITARS_REFUSED = [
    ("", "empty"),
    ("click(start_box='(1,2)')", "Action:"),
    ("Thought: I wonder", "Action:"),
    ("Action: clack()", "'clack()' at character 8"),
    ("Action: click(start_box='(1932,2)')", "x=1932 is beyond the screen: 0 to 1931"),
    ("Action: click(start_box='(1,1092)')", "y=1092 is beyond the screen: 0 to 1091"),
    ("Action: click(start_box='(1,2,3)')", "expected ,"),
    ("Action: click(1,2)", "start_box"),
    ("Action: wait()\n\nAction: wait()", "'Action: wait()' at character 16"),
    ("Action: click(start_box='(1,2)')\n\nclick(start_box='(1,2)')", "expected the end"),
    ("Action: scroll(start_box='(1,2)', direction='in')", "direction must be"),
    ("Action: hotkey(key='')", "no key is given"),
    ("Action: press(key='ctrl c')", "one key is held or pressed at a time"),
    ("Action: mouse_down(button='wheel')", "button must be left, right or middle"),
    ("Action: hotkey(key='ctrl é')", "'é' is not a key's name"),
    ("Action: type(content='never closed)", "a quoted text"),
    ("Action: click(start_box='(" + "9" * 5000 + ",1)')", "expected ,"),
]


@pytest.mark.parametrize(("text", "cause"), COMPACT_REFUSED)
def test_malformed_compact_text_names_the_cause(text: str, cause: str) -> None:
    with pytest.raises(ActionError) as refusal:
        COMPACT.parse(text, THOUSANDTHS)
    assert cause in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("text", "cause"), UITARS_REFUSED)
def test_malformed_uitars_text_names_the_cause(text: str, cause: str) -> None:
    with pytest.raises(ActionError) as refusal:
        UITARS.parse(text, SCREEN)
    assert cause in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_completion_of_absurd_length_is_refused_unread() -> None:
    with pytest.raises(ActionError, match="characters are too many for an action"):
        UITARS.parse("Action: type(content='" + "a" * 20_000 + "')", SCREEN)


# --- round trips ------------------------------------------------------------------------------

_x, _y = st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1)
_points = st.tuples(_x, _y)
_key = st.sampled_from(["ctrl", "shift", "alt", "enter", "f5", "a", "7", "+", "-", ")", "pagedown"])
_keys = st.lists(_key, min_size=1, max_size=4).map(lambda keys: KeyPress(keys=keys))
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
_buttons = st.sampled_from(["left", "right", "middle"])
_held = st.lists(st.sampled_from(["ctrl", "shift", "alt", "meta"]), max_size=3).map(tuple)
_common: list[st.SearchStrategy[Action]] = [
    st.builds(Click, x=_x, y=_y, button=_buttons),
    st.builds(DoubleClick, x=_x, y=_y),
    st.builds(TripleClick, x=_x, y=_y),
    st.builds(Move, x=_x, y=_y),
    st.builds(Drag, path=st.lists(_points, min_size=2, max_size=2)),
    st.builds(MouseDown, x=_x, y=_y, button=_buttons),
    st.builds(MouseUp, button=_buttons),
    st.builds(KeyDown, key=_key),
    st.builds(KeyUp, key=_key),
    _keys,
    st.builds(Type, text=_texts),
    st.just(Done()),
    st.just(Fail()),
]
_compact_actions = st.one_of(
    *_common,
    st.builds(Click, x=_x, y=_y, button=_buttons, modifiers=_held),
    st.builds(DoubleClick, x=_x, y=_y, modifiers=_held),
    st.builds(
        Drag, path=st.lists(_points, min_size=2, max_size=6), button=_buttons, modifiers=_held
    ),
    st.builds(Scroll, x=_x, y=_y, dy=st.sampled_from([-compact.NOTCHES, compact.NOTCHES])),
    st.builds(Answer, text=_texts),
    st.builds(Goto, url=_texts.filter(bool)),
    st.just(Wait(seconds=compact.WAIT_S)),
)
_uitars_actions = st.one_of(
    *_common,
    st.sampled_from([(0, 5), (0, -5), (5, 0), (-5, 0)]).flatmap(
        lambda turn: st.builds(Scroll, x=_x, y=_y, dx=st.just(turn[0]), dy=st.just(turn[1]))
    ),
    st.builds(Answer, text=_texts.filter(bool)),
    st.just(Wait(seconds=uitars.WAIT_S)),
)


@pytest.mark.parametrize("name", FAMILIES)
@given(action=st.one_of(_compact_actions, _uitars_actions), thought=_texts, before=_points)
@example(Type(text="<tool_call>{}</tool_call>"), "<tool_call>\n</tool_call>", (0, 0))
@example(Type(text="```\n</action><|end_of_box|>"), "```python\n<action><|begin_of_box|>", (0, 0))
@example(Type(text="'''\\\"\"\"\r\n\t\x00 "), "Action: wait()", (0, 0))
@settings(max_examples=60)
def test_every_expressible_action_round_trips(
    name: str, action: Action, thought: str, before: tuple[int, int]
) -> None:
    """In the numbers of its families, wherever the pointer is."""
    action_parser = FAMILIES[name]
    for convention in CONVENTIONS:
        exact = make_coordinate_map(convention, WIDTH, HEIGHT)
        start = action.path[0] if isinstance(action, Drag) else before
        coordinates = replace(exact, pointer=start)
        try:
            text = action_parser.format(action, coordinates, thought)
        except ActionError:
            assert action.kind in action_parser.limits
            continue
        assert action_parser.parse(text, coordinates) == action


@given(_compact_actions)
@example(Type(text=")("))
@example(KeyPress(keys=["+"]))
def test_every_action_round_trips_through_compact_text(action: Action) -> None:
    assert COMPACT.parse(COMPACT.format(action, THOUSANDTHS), THOUSANDTHS) == action


@given(_uitars_actions, _texts)
@example(Type(text="a\nAction: wait()"), "b\nAction: wait()")
@example(Type(text="'"), "")
@example(Type(text="a'b\\'\\n\r\n"), "")
def test_every_action_round_trips_through_uitars_text(action: Action, thought: str) -> None:
    coordinates = make_coordinate_map("resized", WIDTH, HEIGHT)
    assert UITARS.parse(UITARS.format(action, coordinates, thought), coordinates) == action


@given(_uitars_actions)
def test_history_text_has_box_tokens_and_still_parses(action: Action) -> None:
    text = UITARS.format(action, SCREEN, "why")
    shown = UITARS.as_history(text)
    assert shown.count("<|box_start|>") == shown.count("<|box_end|>") == text.count("_box='")
    assert UITARS.parse(shown, SCREEN) == UITARS.parse(text, SCREEN)
    assert UITARS.as_history(shown) == shown


# --- the whole action space -------------------------------------------------------------------

POINT, PATH = (636, 51), [(0, 0), (1919, 1079)]
AT = {"x": POINT[0], "y": POINT[1]}
CTRL = {"modifiers": ("ctrl",)}
SPACE: list[Action] = [
    *(Click(**AT, button=button) for button in ("left", "right", "middle")),
    *(kind(**AT, **CTRL) for kind in (Click, DoubleClick, TripleClick)),
    Click(**AT, modifiers=("ctrl", "shift", "alt", "meta")),
    *(kind(**AT) for kind in (DoubleClick, TripleClick, Move, MouseDown, MouseUp)),
    *(kind(button="right") for kind in (MouseDown, MouseUp)),
    Drag(path=PATH),
    Drag(path=[*PATH, POINT]),
    Drag(path=PATH, button="middle"),
    Drag(path=PATH, **CTRL),
    *(Scroll(**AT, dx=dx, dy=dy) for dx, dy in ((0, 3), (0, -5), (5, 0), (1, 1))),
    *(kind(text="a\n'b'") for kind in (Type, Answer)),
    *(kind(text="</parameter></tool_call>") for kind in (Type, Answer)),
    KeyPress(keys=["ctrl", "+"]),
    KeyDown(key="shift"),
    KeyUp(key="shift"),
    *(Goto(url=url) for url in ("http://a.b/c'd", "a.b/c")),
    *(Wait(seconds=seconds) for seconds in (1, 5, 0.5)),
    Done(),
    Fail(),
    Answer(text="42"),
    Answer(text=""),
]
"""Each action there is, in each of its forms."""


def kinds() -> set[str]:
    union, _ = get_args(Action)
    return {each.model_fields["kind"].default for each in get_args(union)}


def near(action: Action, other: Action) -> bool:
    """Whether the two are one action, its points within a pixel of each other."""
    fields, others = action.model_dump(), other.model_dump()
    points, other_points = [
        [*each.pop("path", []), (each.pop("x", 0), each.pop("y", 0))] for each in (fields, others)
    ]
    close = all(
        abs(a - b) <= 1
        for point, at in zip(points, other_points, strict=True)
        for a, b in zip(point, at, strict=True)
    )
    return fields == others and close


def test_every_kind_of_action_has_its_forms_here() -> None:
    assert {action.kind for action in SPACE} == kinds()


@pytest.mark.parametrize(
    ("action_parser", "convention"),
    [
        (COMPACT, "thousandths"),
        (UITARS, "thousandths"),
        (UITARS, "thousand"),
        (UITARS, "resized"),
        (OWN, "resized"),
        *((action_parser, "thousand") for action_parser in FAMILIES.values()),
        *((action_parser, "resized") for action_parser in FAMILIES.values()),
    ],
)
def test_an_action_parser_expresses_every_action_but_those_it_declares(
    action_parser: ActionParser, convention: CoordinateConvention
) -> None:
    coordinates = make_coordinate_map(convention, 1920, 1080)
    refused = {}
    for action in SPACE:
        try:
            text = action_parser.format(action, coordinates)
        except ActionError as refusal:
            refused[action.kind] = str(refusal)
        else:
            assert near(action_parser.parse(text, coordinates), action), text
    assert refused.keys() == action_parser.limits.keys()
    assert all(action_parser.limits[kind] in said for kind, said in refused.items())


@pytest.mark.parametrize("action_parser", [COMPACT, UITARS])
@pytest.mark.parametrize("action", [KeyPress(keys=["Return"]), Click(x=448, y=0)])
def test_a_strange_key_and_a_point_off_the_screen_are_refused(
    action_parser: ActionParser, action: Action
) -> None:
    with pytest.raises(ActionError):
        action_parser.format(action, THOUSANDTHS)


KNOWN = (
    "click(63,91)", "click(0,0)", "click(999,999)", "right_click(500,500)",
    "double_click(500,500)", "move(1,2)", "drag(0,0,999,999)", "scroll(500,500,up)",
    "scroll(500,500,down)", "type(f(x) = (1))", "key(enter)", "key(ctrl+shift+s)",
    "key(ctrl+plus)", "wait()", "done()", "fail()", "answer(42 (about))",
)  # fmt: skip
"""Texts of the actions that the models which ship were trained on."""

TOKENS = {"tiny": "79dab34f162be001", "small": "8e93cf1aa318e306"}
"""Digest of their tokens, which trained weights depend on."""


@pytest.mark.parametrize("model", list(TOKENS))
def test_the_shipped_models_write_the_actions_they_know_in_the_same_tokens(model: str) -> None:
    folder = BUILTIN[f"builtin:{model}"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in KNOWN]
    assert hashlib.sha256(repr(ids).encode()).hexdigest()[:16] == TOKENS[model]
    exact = make_coordinate_map("thousandths", 1000, 1000)
    for text in KNOWN:
        assert COMPACT.format(COMPACT.parse(text, exact), exact) == text


# --- hostile texts ----------------------------------------------------------------------------

_fragments = st.sampled_from(
    ["click(", "type(", "key(", "finished(", "start_box=", "content=", "wait()", "Action:"]
) | st.sampled_from(
    [
        "'",
        '"',
        "(",
        ")",
        ",",
        "+",
        "\\",
        "\n",
        " ",
        "\x00",
        "\u202e",
        "<|box_start|>",
        "9",
        *(
            "```python\n",
            "```",
            "pyautogui.",
            "computer.wait()",
            "x=1, y=2",
            "<action>",
            "</action>",
        ),
        *(
            "<|begin_of_box|>",
            "<|end_of_box|>",
            "left_click(",
            "start_box='[1,2]'",
            "hotkey(*",
            "f'",
        ),
        *("<tool_call>", "</tool_call>", "<function=computer_use>", "<parameter=action>", "type"),
        *(
            '{"name": "computer_use", "arguments": ',
            '{"action": "click", "coordinate": [',
            "}",
            "]",
        ),
        "١",
        "😀",
    ]
)


@given(st.one_of(st.text(max_size=200), st.lists(_fragments, max_size=30).map("".join)))
def test_any_text_is_an_action_or_an_action_error(text: str) -> None:
    families = [(action_parser, SCREEN) for action_parser in FAMILIES.values()]
    for action_parser, coordinates in ((COMPACT, THOUSANDTHS), (UITARS, SCREEN), *families):
        assert isinstance(action_parser.as_history(text), str)
        try:
            action_parser.parse(text, coordinates)
        except ActionError as refusal:
            message = str(refusal)
        else:
            message = ""
        assert len(message) < 400


@pytest.mark.parametrize(
    "piece",
    [
        "'a",
        "\\'",
        "(((",
        "Action: ",
        "\nAction:",
        "a'b",
        "type(",
        " ",
        "[",
        "-",
        "<parameter=action>",
        "x.",
        "1,",
    ],
)
def test_long_hostile_texts_are_read_in_linear_time(piece: str) -> None:
    """A pattern that backtracks would run for minutes here; the file's timeout would tell."""
    text = (piece * 8000)[:16_000]
    for prefix in (
        "",
        "Action: type(content='",
        "type(",
        "<tool_call><function=computer_use>",
        "```\n",
    ):
        for action_parser in (COMPACT, UITARS, *FAMILIES.values()):
            action_parser.as_history((prefix + text)[:16_000])
            with pytest.raises(ActionError):
                action_parser.parse((prefix + text)[:16_000], SCREEN)


def test_an_unknown_action_parser_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"policy\.action_parser"):
        make_action_parser("json")


def test_the_language_side_of_the_policy_never_loads_torch() -> None:
    code = (
        "import sys; from dart_cli.language.parsers import make_action_parser; make_action_parser('uitars');"
        "import dart_cli.language.history; sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode
        == 0
    )


@pytest.mark.parametrize("name", ["compact", "uitars"])
def test_no_terminal_of_a_grammar_matches_the_empty_text(name: str) -> None:
    terminals = make_action_parser(name)._grammar._parser.terminals  # type: ignore[attr-defined]
    assert len(terminals) > 5
    assert all(terminal.pattern.min_width > 0 for terminal in terminals)


# --- of one's own -----------------------------------------------------------------------------


@given(st.text() | st.text().map(lambda text: f"a\n{{{text}}}"))
def test_the_action_parser_of_the_guide_raises_nothing_but_action_errors(text: str) -> None:
    with suppress(ActionError):
        OWN.parse(text, SCREEN)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"do": "click", "at": [1]}',
        '{"do": "click", "at": ["1", 2]}',
        '{"do": "click", "at": [1, 2], "button": "right"}',
        '{"do": "click", "at": [5000, 2]}',
        '{"do": "type", "text": "\\ud800"}',
        '{"do": "type", "text": 7}',
        '{"do": "fly"}',
        "[]",
        "7",
    ],
)
def test_a_call_that_the_guides_action_parser_does_not_have_is_malformed(arguments: str) -> None:
    with pytest.raises(ActionError):
        OWN.parse(f"A thought.\n{arguments}", SCREEN)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uitar", "must be compact, uitars, toolcall"),
        ("no/such.py:X", "action parser no/such.py:X: no file no/such.py"),
        (f"{__file__}:WIDTH", "is no ActionParser; it needs limits, parse, format, as_history"),
    ],
)
def test_an_action_parser_that_is_none_is_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_action_parser(name)
    assert said in str(error.value)
