"""The action language of the tiny model: one call with integers 0-999 and without spaces.

Calls:
    click(x,y)  right_click(x,y)  middle_click(x,y)  double_click(x,y)  triple_click(x,y)
    drag(x,y,x,y,...)  right_drag(...)  middle_drag(...)      two points or more
    ctrl+click(x,y)  ctrl+shift+drag(...)     with ctrl, shift, alt, meta held
    move(x,y)   scroll(x,y,up|down)   three notches
    mouse_down(x,y,right)  mouse_up()     without a button: left; without a point: where the pointer is
    key(ctrl+a)   lower case; a capital is read as shift and its letter, and + itself is written `plus`
    key_down(ctrl)  key_up(ctrl)
    type(TEXT)  answer(TEXT)  goto(URL)   the text is verbatim, up to the last ")" of the completion
    wait()  done()  fail()

Several actions (`policy.max_actions`) are one on each line. A text that is typed ends before a line that begins
like a call, if there is a ")" before the end of the line.

The models that ship were trained on the left click, right_click, double_click, move, a drag of two points,
scroll, type, answer, key, wait, done and fail. Each of these has a token in their vocabulary; the others are
spelt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from lark import Token, Tree

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import Part, WrittenPoint
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
    verb_of,
)
from dart_cli.language.thoughts import reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action, Modifier, MouseButton

NOTCHES = 3  # wheel notches of one scroll
WAIT_S = 1.0  # seconds of one wait

_GRAMMAR = r"""
start: MODIFIERS? pointing | call
?pointing: "click(" point ")"         -> click
         | "right_click(" point ")"   -> right_click
         | "middle_click(" point ")"  -> middle_click
         | "double_click(" point ")"  -> double_click
         | "triple_click(" point ")"  -> triple_click
         | "drag(" point ("," point)+ ")"         -> drag
         | "right_drag(" point ("," point)+ ")"   -> right_drag
         | "middle_drag(" point ("," point)+ ")"  -> middle_drag
?call: "move(" point ")"          -> move
     | "mouse_down(" _where ")"   -> mouse_down
     | "mouse_up(" _where ")"     -> mouse_up
     | "scroll(" point "," DIRECTION ")"  -> scroll
     | "key(" KEYS ")"            -> key
     | "key_down(" KEYS ")"       -> key_down
     | "key_up(" KEYS ")"         -> key_up
     | TYPED                      -> typed
     | ANSWERED                   -> answered
     | OPENED                     -> opened
     | "wait()"  -> wait
     | "done()"  -> done
     | "fail()"  -> fail
_where: (point ("," BUTTON)? | BUTTON)?
point: NUMBER "," NUMBER
NUMBER: /[0-9]{1,4}/
BUTTON: "left" | "right" | "middle"
MODIFIERS: /(?:(?:ctrl|shift|alt|meta)\+)+/
DIRECTION: "up" | "down"
KEYS: /\S+(?=\)\Z)/
TYPED: /type\([\s\S]*\)/
ANSWERED: /answer\([\s\S]*\)/
OPENED: /goto\([\s\S]+\)/
"""

_READABLE = {
    "NUMBER": "a number 0-999",
    "BUTTON": "left, right or middle",
    "MODIFIERS": "ctrl+",
    "DIRECTION": "up or down",
    "KEYS": "keys joined by +",
    "TYPED": "type(TEXT)",
    "ANSWERED": "answer(TEXT)",
    "OPENED": "goto(URL)",
}

_CLICKS: Mapping[str, Verb] = {
    "click": (act.Click, "left"),
    "right_click": (act.Click, "right"),
    "middle_click": (act.Click, "middle"),
    "double_click": (act.DoubleClick, ""),
    "triple_click": (act.TripleClick, ""),
}
_DRAGS: Mapping[str, MouseButton] = {"drag": "left", "right_drag": "right", "middle_drag": "middle"}
_NEXT = re.compile(
    r"(?<=\))\n(?=(?:(?:ctrl|shift|alt|meta)\+)*(?:(?:right_|middle_|double_|triple_)?click|(?:right_|middle_)?drag"
    r"|move|mouse_down|mouse_up|scroll|key|key_down|key_up|type|answer|goto|wait|done|fail)\()"
)
"""The line break before the next of several actions."""
_DRAG_OF = {button: name for name, button in _DRAGS.items()}


class CompactParser:
    """The PointParser of the compact language; the module's docstring has its calls."""

    limits: Mapping[str, str] = {
        "scroll": f"it turns the wheel by {NOTCHES} notches, up or down",
        "wait": f"it waits {WAIT_S:g} s",
    }

    def __init__(self) -> None:
        self._grammar = Grammar(_GRAMMAR, _READABLE)

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return first_read(reply_starts(text), lambda start: self._action(text[start:], coordinates))

    def _action(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of a reply, which is one call. Raises ActionError."""
        *prefix, call = self._grammar.parse(text).children
        assert isinstance(call, Tree)
        points = [_point(node, coordinates) for node in _trees(call)]
        words = [str(child) for child in call.children if isinstance(child, Token)]
        if call.data in _CLICKS:
            return at_point(_CLICKS[call.data], points[0], _modifiers(prefix))
        if call.data in _DRAGS:
            return act.Drag(path=points, button=_DRAGS[call.data], modifiers=_modifiers(prefix))
        match call.data:
            case "move":
                return act.Move(x=points[0][0], y=points[0][1])
            case "mouse_down" | "mouse_up":
                kind = act.MouseDown if call.data == "mouse_down" else act.MouseUp
                button = cast("MouseButton", words[0]) if words else "left"
                x, y = points[0] if points else (None, None)
                return kind(x=x, y=y, button=button)
            case "scroll":
                dy = NOTCHES if words[0] == "down" else -NOTCHES
                return act.Scroll(x=points[0][0], y=points[0][1], dy=dy)
            case "key":
                return act.KeyPress(keys=split_keys(words[0]))
            case "key_down":
                return act.KeyDown(key=one_key(words[0]))
            case "key_up":
                return act.KeyUp(key=one_key(words[0]))
            case "typed":
                return act.Type(text=words[0][len("type(") : -1])
            case "answered":
                return act.Answer(text=words[0][len("answer(") : -1])
            case "opened":
                return act.Goto(url=words[0][len("goto(") : -1])
            case "wait":
                return act.Wait(seconds=WAIT_S)
            case "done":
                return act.Done()
            case _:
                return act.Fail()

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:  # noqa: ARG002
        """Return the completion of one action.

        See ActionParser. The language has no thoughts, so none is written.
        """
        match action:
            case act.Click() | act.DoubleClick() | act.TripleClick():
                prefix = "".join(f"{modifier}+" for modifier in action.modifiers)
                name = verb_of(_CLICKS, action)
                return f"{prefix}{name}({_numbers(coordinates, (action.x, action.y))})"
            case act.Drag():
                prefix = "".join(f"{modifier}+" for modifier in action.modifiers)
                return f"{prefix}{_DRAG_OF[action.button]}({_numbers(coordinates, *action.path)})"
            case act.Move():
                return f"move({_numbers(coordinates, (action.x, action.y))})"
            case act.MouseDown() | act.MouseUp():
                return f"{action.kind}({','.join(_where(action, coordinates))})"
            case act.Scroll(dx=0, dy=dy) if abs(dy) == NOTCHES:
                direction = "down" if dy > 0 else "up"
                return f"scroll({_numbers(coordinates, (action.x, action.y))},{direction})"
            case act.KeyPress():
                return f"key({join_keys(action.keys, '+')})"
            case act.KeyDown() | act.KeyUp():
                return f"{action.kind}({join_keys([action.key], '+')})"
            case act.Type():
                return f"type({action.text})"
            case act.Answer():
                return f"answer({action.text})"
            case act.Goto():
                return f"goto({action.url})"
            case act.Wait(seconds=seconds) if seconds == WAIT_S:
                return "wait()"
            case act.Done():
                return "done()"
            case act.Fail():
                return "fail()"
        raise not_expressed("the compact language", action, self.limits)

    def as_history(self, text: str) -> str:
        """Return the completion unchanged."""
        return text

    def split(self, text: str) -> list[Part]:
        """Return the lines that are actions; see SplitParser."""
        return cut_lines(text, _NEXT, reply_starts(text)[-1])

    def join(self, texts: Sequence[str]) -> str:
        """Return the actions, one on each line; see SplitParser."""
        return "\n".join(texts)

    def write_point(self, x: int, y: int) -> str:
        """Return the two numbers; see PointParser."""
        return f"{x},{y}"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the pairs of numbers that `parse` reads as points; see PointParser."""
        try:
            return first_read(reply_starts(text), lambda start: self._points(text, start))
        except ActionError:
            return []

    def _points(self, text: str, begin: int) -> list[WrittenPoint]:
        """Return the points of a reply that begins at character `begin`. Raises ActionError."""
        return [
            WrittenPoint(begin + start, begin + end, *_two(point))
            for start, end, point in self._grammar.matches(text[begin:], "point")
        ]


def _modifiers(prefix: Sequence[Tree[Token] | Token]) -> tuple[Modifier, ...]:
    """Return the keys that are held during a call, from the tokens before it, e.g. `ctrl+shift+`."""
    names = (name for token in prefix for name in str(token).split("+") if name)
    return tuple(cast("Modifier", name) for name in names)


def _trees(tree: Tree[Token]) -> list[Tree[Token]]:
    """Return the children of a call that are points."""
    return [child for child in tree.children if isinstance(child, Tree)]


def _point(node: Tree[Token], coordinates: CoordinateMap) -> tuple[int, int]:
    """Return the pixel of a point. Raises ActionError if it is beyond the screen."""
    return coordinates.to_screen(*_two(node))


def _two(node: Tree[Token]) -> tuple[int, int]:
    """Return the model's numbers (x, y) of a point."""
    x, y = node.children
    return int(str(x)), int(str(y))


def _numbers(coordinates: CoordinateMap, *points: tuple[int, int]) -> str:
    """Return pixels as the model's numbers, joined by commas."""
    return ",".join(f"{x},{y}" for x, y in (coordinates.to_model(*point) for point in points))


def _where(action: act.MouseDown | act.MouseUp, coordinates: CoordinateMap) -> list[str]:
    """Return the arguments of mouse_down or mouse_up: the point, if any, and a button other than the left."""
    where = []
    if action.x is not None and action.y is not None:
        where.append(_numbers(coordinates, (action.x, action.y)))
    return where if action.button == "left" else [*where, action.button]


ACTION_PARSERS: Mapping[str, Callable[[], CompactParser]] = {"compact": CompactParser}
"""The factory of this module's action parser, by name."""
