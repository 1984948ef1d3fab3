r"""UI-TARS text (arXiv 2501.12326; github.com/bytedance/UI-TARS): a thought, then one call.

    Thought: The search field is empty.
    Action: click(start_box='(640,52)')

    click  left_double  left_triple  right_single  middle_click  hover     (start_box='(x,y)')
    drag(start_box='(x,y)', end_box='(x,y)')
    mouse_down(start_box='(x,y)', button='left')  mouse_up(...)    both arguments are optional
    scroll(start_box='(x,y)', direction='up')       up, down, left, right: five notches
    hotkey(key='ctrl c')   press(key='ctrl') holds a key until release(key='ctrl')
    type(content='text\n')   \n is Enter; \' \" \\ are escapes, which quotes before the last one do not need
    wait()   finished(content='answer')   call_user()

Other names are read, too: left_single (click), select (drag), triple_click, move_to (hover), keydown, keyup,
and a content of call_user, which is dropped. The calls are those of UI-TARS' prompts and of the executors
that its models run under; left_triple comes from executors of other models.

A box may be wrapped in <|box_start|> <|box_end|>. A box of four numbers means its centre. UI-TARS' later
prompts write point='<point>x y</point>', and start_point and end_point for start_box and end_box; these are
read, too. `finished` with a content is an Answer, without it it is Done; `call_user` is Fail.

Several actions (`policy.max_actions`) are several calls after one `Action:`, with an empty line between them, as
UI-TARS' own code reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast, get_args

from lark import Token, Tree

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import Part, WrittenPoint, whole
from dart_cli.language.parsers.reading import (
    Grammar,
    Verb,
    at_point,
    cut_lines,
    first_read,
    join_keys,
    not_expressed,
    one_key,
    split_keys,
    verb_and_pixel,
)
from dart_cli.language.thoughts import reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action, MouseButton

NOTCHES = 5  # wheel notches of one scroll, as in UI-TARS' own executor
WAIT_S = 5.0  # seconds of one wait, as its prompt promises

# PROSE ends at the last line that begins with "Action:". A string of `format` never begins such a line,
# because `format` escapes line breaks. An apostrophe between letters does not end a string. A content is the
# last argument of the last call, so a quote ends it only before a ) that ends the line.
_GRAMMAR = r"""
start: PROSE? ACTION call
?call: ("click" | "left_single") "(" _start ")"         -> click
     | "left_double" "(" _start ")"                     -> left_double
     | ("left_triple" | "triple_click") "(" _start ")"  -> left_triple
     | "right_single" "(" _start ")"                    -> right_single
     | "middle_click" "(" _start ")"                    -> middle_click
     | ("hover" | "move_to") "(" _start ")"             -> hover
     | ("drag" | "select") "(" _start "," ("end_box" | "end_point") "=" box ")"   -> drag
     | "mouse_down" "(" _where ")"                      -> mouse_down
     | "mouse_up" "(" _where ")"                        -> mouse_up
     | "scroll" "(" _start "," "direction" "=" STRING ")"   -> scroll
     | "scroll" "(" "direction" "=" STRING "," _start ")"   -> scroll
     | "hotkey" "(" "key" "=" STRING ")"                -> hotkey
     | ("press" | "keydown") "(" "key" "=" STRING ")"   -> press
     | ("release" | "keyup") "(" "key" "=" STRING ")"   -> release
     | "type" "(" _content ")"                          -> type_text
     | "wait" "(" ")"                                   -> wait
     | "finished" "(" _content? ")"                     -> finished
     | "call_user" "(" _content? ")"                    -> call_user
_start: ("start_box" | "start_point" | "point") "=" box
_where: (_start ("," "button" "=" STRING)? | "button" "=" STRING)?
_content: "content" "=" CONTENT
box: _QUOTE "<|box_start|>"? "(" NUMBER "," NUMBER ("," NUMBER "," NUMBER)? ")" "<|box_end|>"? _QUOTE
   | _QUOTE "<point>" NUMBER NUMBER "</point>" _QUOTE
ACTION.2: "Action:"
PROSE: /[\s\S]*\n(?=Action:)/
_QUOTE: /['"]/
NUMBER: /[0-9]{1,5}/
STRING: /'(?:[^'\\]|\\[\s\S]|(?<=\w)'(?=\w))*'|"(?:[^"\\]|\\[\s\S])*"/
CONTENT: /'(?:[^'\\]|\\[\s\S]|'(?!\s*\)[ \t]*(?:[\r\n]|\Z)))*'|"(?:[^"\\]|\\[\s\S]|"(?!\s*\)[ \t]*(?:[\r\n]|\Z)))*"/
%ignore /[ \t\r\n]+/
"""
_READABLE = {
    "PROSE": "a thought",
    "_QUOTE": "a quote",
    "NUMBER": "a number",
    "STRING": "a quoted text",
    "CONTENT": "a quoted text",
}

_DIRECTIONS = {
    "up": (0, -NOTCHES),
    "down": (0, NOTCHES),
    "left": (-NOTCHES, 0),
    "right": (NOTCHES, 0),
}
_HELD = "keys are held by press(key='ctrl') before it and release(key='ctrl') after it"
_VERBS: Mapping[str, Verb] = {
    "click": (act.Click, "left"),
    "right_single": (act.Click, "right"),
    "middle_click": (act.Click, "middle"),
    "left_double": (act.DoubleClick, ""),
    "left_triple": (act.TripleClick, ""),
    "hover": (act.Move, ""),
}
_ESCAPE = re.compile(r"\\([\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}
_BARE_BOX = re.compile(r"\s*\([0-9, ]+\)\s*")
_ACTION_LINE = re.compile(r"^Action:", re.MULTILINE)
_NEXT = re.compile(
    r"(?<=\))[ \t]*\n\s*(?=(?:click|left_single|left_double|left_triple|triple_click|right_single|middle_click|hover"
    r"|move_to|drag|select|mouse_down|mouse_up|scroll|hotkey|press|keydown|release|keyup|type|wait|finished|call_user)"
    r"\s*\()"
)
"""The empty line before the next of several calls."""


class UitarsParser:
    """The PointParser of UI-TARS text; the module's docstring has its calls."""

    limits: Mapping[str, str] = {
        **dict.fromkeys(("click", "double_click", "triple_click"), _HELD),
        "drag": f"it has two points and the left button, else mouse_down, hover and mouse_up; {_HELD}",
        "scroll": f"it turns the wheel by {NOTCHES} notches in one direction",
        "goto": "it has no call that opens an address",
        "wait": f"it waits {WAIT_S:g} s",
        "answer": "an empty answer would be `finished()`, which is done",
    }

    def __init__(self) -> None:
        self._grammar = Grammar(_GRAMMAR, _READABLE)

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return first_read(_calls_begin(text), lambda start: self._action(text[start:], coordinates))

    def _action(self, text: str, coordinates: CoordinateMap) -> Action:
        call = self._grammar.parse(text).children[-1]
        assert isinstance(call, Tree)
        points = [_centre(box, coordinates) for box in call.children if isinstance(box, Tree)]
        strings = [_unquote(str(word)) for word in call.children if isinstance(word, Token)]
        if call.data in _VERBS:
            return at_point(_VERBS[call.data], points[0])
        match call.data:
            case "drag":
                return act.Drag(path=points)
            case "mouse_down" | "mouse_up":
                kind = act.MouseDown if call.data == "mouse_down" else act.MouseUp
                x, y = points[0] if points else (None, None)
                return kind(x=x, y=y, button=_button(strings))
            case "scroll":
                if strings[0] not in _DIRECTIONS:
                    raise ActionError(
                        f"direction must be up, down, left or right, got {strings[0][:24]!r}"
                    )
                dx, dy = _DIRECTIONS[strings[0]]
                return act.Scroll(x=points[0][0], y=points[0][1], dx=dx, dy=dy)
            case "hotkey":
                return act.KeyPress(keys=split_keys(strings[0]))
            case "press":
                return act.KeyDown(key=one_key(strings[0]))
            case "release":
                return act.KeyUp(key=one_key(strings[0]))
            case "type_text":
                return act.Type(text=strings[0])
            case "wait":
                return act.Wait(seconds=WAIT_S)
            case "finished":
                return act.Answer(text=strings[0]) if any(strings) else act.Done()
            case _:
                return act.Fail()

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser."""
        call = _call(action, coordinates)
        if call is None:
            raise not_expressed("UI-TARS text", action, self.limits)
        return f"Thought: {thought}\nAction: {call}"

    def as_history(self, text: str) -> str:
        """Return the completion with bare boxes wrapped in box tokens, as in the model's prompts."""
        for point in reversed(self.find_points(text)):
            box = text[point.start : point.end]
            if _BARE_BOX.fullmatch(box):
                wrapped = f"<|box_start|>{box.strip()}<|box_end|>"
                text = text[: point.start] + wrapped + text[point.end :]
        return text

    def split(self, text: str) -> list[Part]:
        """Return the calls after the last `Action:` of the reply; see SplitParser."""
        try:
            self.parse(text, AS_IT_IS)
        except ActionError:
            pass
        else:
            return whole(text)  # a text that it types may look like several calls
        begin = reply_starts(text)[-1]
        lines = [match.end() for match in _ACTION_LINE.finditer(text, begin)]
        return cut_lines(text, _NEXT, lines[-1], "Action: ") if lines else whole(text)

    def join(self, texts: Sequence[str]) -> str:
        """Return the thought and call of the first text, and the calls of the others; see SplitParser."""
        first, *others = texts
        return "\n\n".join([first, *(text.rpartition("\nAction: ")[2] for text in others)])

    def write_point(self, x: int, y: int) -> str:
        """Return a box without its quotes; see PointParser."""
        return f"({x},{y})"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the text between the quotes of each box, box tokens included, as points; see PointParser."""
        try:
            return first_read(_calls_begin(text), lambda start: self._points(text, start))
        except ActionError:
            return []

    def _points(self, text: str, begin: int) -> list[WrittenPoint]:
        """Return the points of a reply that begins at character `begin`. Raises ActionError."""
        points = []
        for first, last, box in self._grammar.matches(text[begin:], "box"):
            first, last = begin + first, begin + last
            start = max(text.rfind(quote, 0, first) for quote in "'\"") + 1
            end = min(at for quote in "'\"" if (at := text.find(quote, last)) >= 0)
            points.append(WrittenPoint(start, end, *_middle(box)))
        return points


def _calls_begin(text: str) -> Iterator[int]:
    """Yield the places where the reply may begin, the likeliest first.

    The first is the first line with a call, since a later such line may be a text that the call types.
    """
    starts = reply_starts(text)
    line = _ACTION_LINE.search(text, starts[-1])
    if line and line.start() not in starts:
        yield line.start()
    yield from reversed(starts)


def _call(action: Action, coordinates: CoordinateMap) -> str | None:
    """Return the call for an action; None if the language has none."""
    if call := verb_and_pixel(_VERBS, action):
        name, x, y = call
        return f"{name}(start_box={_box(coordinates, x, y)})"
    match action:
        case act.Drag(path=[first, last], button="left", modifiers=()):
            return (
                f"drag(start_box={_box(coordinates, *first)}, end_box={_box(coordinates, *last)})"
            )
        case act.MouseDown() | act.MouseUp():
            return f"{action.kind}({', '.join(_where(action, coordinates))})"
        case act.Scroll():
            for direction, notches in _DIRECTIONS.items():
                if notches == (action.dx, action.dy):
                    box = _box(coordinates, action.x, action.y)
                    return f"scroll(start_box={box}, direction='{direction}')"
        case act.KeyPress():
            return f"hotkey(key={_quote(join_keys(action.keys, ' '))})"
        case act.KeyDown():
            return f"press(key={_quote(join_keys([action.key], ' '))})"
        case act.KeyUp():
            return f"release(key={_quote(join_keys([action.key], ' '))})"
        case act.Type():
            return f"type(content={_quote(action.text)})"
        case act.Wait(seconds=seconds) if seconds == WAIT_S:
            return "wait()"
        case act.Answer(text=text) if text:
            return f"finished(content={_quote(text)})"
        case act.Done():
            return "finished()"
        case act.Fail():
            return "call_user()"
    return None


def _where(action: act.MouseDown | act.MouseUp, coordinates: CoordinateMap) -> list[str]:
    """Return the arguments of mouse_down or mouse_up: the box, if any, and a button other than the left."""
    where = []
    if action.x is not None and action.y is not None:
        where.append(f"start_box={_box(coordinates, action.x, action.y)}")
    return where if action.button == "left" else [*where, f"button='{action.button}'"]


def _button(strings: list[str]) -> MouseButton:
    """Return the mouse button that a call names, or the left one. Raises ActionError for another name."""
    name = strings[0] if strings else "left"
    if name not in get_args(MouseButton):
        raise ActionError(f"button must be left, right or middle, got {name[:24]!r}")
    return cast("MouseButton", name)


def _box(coordinates: CoordinateMap, x: int, y: int) -> str:
    x, y = coordinates.to_model(x, y)
    return f"'({x},{y})'"


def _centre(box: Tree[Token], coordinates: CoordinateMap) -> tuple[int, int]:
    """Return the pixel of the centre of a box. Raises ActionError if it is beyond the screen."""
    return coordinates.to_screen(*_middle(box))


def _middle(box: Tree[Token]) -> tuple[int, int]:
    """Return the centre (x, y) of a box of two or four of the model's numbers."""
    numbers = [int(str(number)) for number in box.children]
    # A box of two numbers adds each number to itself.
    x, y = numbers[0] + numbers[-2], numbers[1] + numbers[-1]
    return x // 2, y // 2


def _quote(text: str) -> str:
    """Return a text as a quoted literal of one line, which `_unquote` reads."""
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + text.replace("\n", "\\n").replace("\r", "\\r") + "'"


def _unquote(text: str) -> str:
    """Return the string of a quoted literal; a backslash that begins no known escape stays."""
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), text[1:-1])


ACTION_PARSERS: Mapping[str, Callable[[], UitarsParser]] = {"uitars": UitarsParser}
"""The factory of this module's action parser, by name."""
