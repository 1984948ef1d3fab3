r"""UI-TARS text (arXiv 2501.12326; github.com/bytedance/UI-TARS): a thought, then one call.

    Thought: The search field is empty.
    Action: click(start_box='(640,52)')

    click  left_double  right_single     (start_box='(x,y)')
    drag(start_box='(x,y)', end_box='(x,y)')
    scroll(start_box='(x,y)', direction='up')       up, down, left, right: five notches
    hotkey(key='ctrl c')   type(content='text\n')   \n is Enter; \' \" \\ are escapes
    wait()   finished(content='answer')   call_user()

A box may be wrapped in <|box_start|> <|box_end|>; a box of four numbers means its centre.
`finished` with a content is an Answer, without it is Done; `call_user` is Fail.
"""

from __future__ import annotations

import re

from lark import Token, Tree

from bus.errors import ActionError
from dart_cli.policy.codecs.grammar import Grammar
from dart_cli.policy.codecs.keys import join_keys, split_keys
from dart_cli.policy.coordinates import CoordinateMap
from envs.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyPress,
    Scroll,
    Type,
    Wait,
)

NOTCHES = 5  # wheel notches of one scroll, as UI-TARS' own executor turns
WAIT_S = 5.0  # seconds of one wait, as its prompt promises

# PROSE ends at the last line that begins with "Action:"; format() escapes line breaks in strings,
# so a string can never match it. An apostrophe between letters does not end a string.
_GRAMMAR = r"""
start: PROSE? ACTION call
?call: "click" "(" "start_box" "=" box ")"          -> click
     | "left_double" "(" "start_box" "=" box ")"    -> left_double
     | "right_single" "(" "start_box" "=" box ")"   -> right_single
     | "drag" "(" "start_box" "=" box "," "end_box" "=" box ")"            -> drag
     | "scroll" "(" "start_box" "=" box "," "direction" "=" STRING ")"     -> scroll
     | "scroll" "(" "direction" "=" STRING "," "start_box" "=" box ")"     -> scroll
     | "hotkey" "(" "key" "=" STRING ")"            -> hotkey
     | "type" "(" "content" "=" STRING ")"          -> type_text
     | "wait" "(" ")"                               -> wait
     | "finished" "(" ("content" "=" STRING)? ")"   -> finished
     | "call_user" "(" ")"                          -> call_user
box: _QUOTE "<|box_start|>"? "(" NUMBER "," NUMBER ("," NUMBER "," NUMBER)? ")" "<|box_end|>"? _QUOTE
ACTION.2: "Action:"
PROSE: /[\s\S]*\n(?=Action:)/
_QUOTE: /['"]/
NUMBER: /[0-9]{1,5}/
STRING: /'(?:[^'\\]|\\[\s\S]|(?<=\w)'(?=\w))*'|"(?:[^"\\]|\\[\s\S])*"/
%ignore /[ \t\r\n]+/
"""
_READABLE = {
    "PROSE": "a thought",
    "_QUOTE": "a quote",
    "NUMBER": "a number",
    "STRING": "a quoted text",
}

_DIRECTIONS = {
    "up": (0, -NOTCHES),
    "down": (0, NOTCHES),
    "left": (-NOTCHES, 0),
    "right": (NOTCHES, 0),
}
_ESCAPE = re.compile(r"\\([\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}
_BARE_BOX = re.compile(r"""((?:start|end)_box\s*=\s*['"])\s*(\([0-9, ]+\))\s*(['"])""")


class UitarsCodec:
    """See the module's docstring; implements `dart_cli.policy.codec.Codec`."""

    def __init__(self) -> None:
        self._grammar = Grammar(_GRAMMAR, _READABLE)

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """The action of one completion; see Codec."""
        call = self._grammar.parse(text).children[-1]
        assert isinstance(call, Tree)
        points = [_centre(box, coordinates) for box in call.children if isinstance(box, Tree)]
        strings = [_unquote(str(word)) for word in call.children if isinstance(word, Token)]
        match call.data:
            case "click":
                return Click(x=points[0][0], y=points[0][1])
            case "left_double":
                return DoubleClick(x=points[0][0], y=points[0][1])
            case "right_single":
                return Click(x=points[0][0], y=points[0][1], button="right")
            case "drag":
                return Drag(path=points)
            case "scroll":
                if strings[0] not in _DIRECTIONS:
                    raise ActionError(
                        f"direction must be up, down, left or right, got {strings[0][:24]!r}"
                    )
                dx, dy = _DIRECTIONS[strings[0]]
                return Scroll(x=points[0][0], y=points[0][1], dx=dx, dy=dy)
            case "hotkey":
                return KeyPress(keys=split_keys(strings[0].replace("+", " "), None))
            case "type_text":
                return Type(text=strings[0])
            case "wait":
                return Wait(seconds=WAIT_S)
            case "finished":
                return Answer(text=strings[0]) if any(strings) else Done()
            case _:
                return Fail()

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """The completion of one action; see Codec."""
        return f"Thought: {thought}\nAction: {_call(action, coordinates)}"

    def as_history(self, text: str) -> str:
        """The completion with its bare boxes in box tokens, as the model's prompt has them."""
        return _BARE_BOX.sub(r"\1<|box_start|>\2<|box_end|>\3", text)


def _call(action: Action, coordinates: CoordinateMap) -> str:
    match action:
        case Click(button="left"):
            return f"click(start_box={_box(coordinates, action.x, action.y)})"
        case Click(button="right"):
            return f"right_single(start_box={_box(coordinates, action.x, action.y)})"
        case DoubleClick():
            return f"left_double(start_box={_box(coordinates, action.x, action.y)})"
        case Drag(path=[first, last]):
            return (
                f"drag(start_box={_box(coordinates, *first)}, end_box={_box(coordinates, *last)})"
            )
        case Scroll():
            for direction, notches in _DIRECTIONS.items():
                if notches == (action.dx, action.dy):
                    box = _box(coordinates, action.x, action.y)
                    return f"scroll(start_box={box}, direction='{direction}')"
        case KeyPress():
            return f"hotkey(key={_quote(join_keys(action.keys, ' '))})"
        case Type():
            return f"type(content={_quote(action.text)})"
        case Wait(seconds=seconds) if seconds == WAIT_S:
            return "wait()"
        case Answer(text=text) if text:
            return f"finished(content={_quote(text)})"
        case Done():
            return "finished()"
        case Fail():
            return "call_user()"
    raise ActionError(f"UI-TARS text cannot express {action!r}")


def _box(coordinates: CoordinateMap, x: int, y: int) -> str:
    x, y = coordinates.to_model(x, y)
    return f"'({x},{y})'"


def _centre(box: Tree[Token], coordinates: CoordinateMap) -> tuple[int, int]:
    numbers = [int(str(number)) for number in box.children]
    x, y = numbers[0] + numbers[-2], numbers[1] + numbers[-1]  # of two numbers: each twice
    return coordinates.to_screen(x // 2, y // 2)


def _quote(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + text.replace("\n", "\\n").replace("\r", "\\r") + "'"


def _unquote(text: str) -> str:
    """The string a quoted literal means; a backslash before any other character stays."""
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[0]), text[1:-1])
