"""The tiny model's action language: one call, integers 0-999, no spaces.

Calls:
    click(x,y)  right_click(x,y)  double_click(x,y)  move(x,y)  drag(x,y,x,y)
    scroll(x,y,up|down)   three notches          key(ctrl+a)   lower case; + itself is `plus`
    type(TEXT)  answer(TEXT)   TEXT runs to the last ")" of the completion, verbatim
    wait()  done()  fail()
"""

from __future__ import annotations

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
    Move,
    Scroll,
    Type,
    Wait,
)

NOTCHES = 3  # wheel notches of one scroll
WAIT_S = 1.0  # seconds of one wait

_GRAMMAR = r"""
start: "click(" point ")"         -> click
     | "right_click(" point ")"   -> right_click
     | "double_click(" point ")"  -> double_click
     | "move(" point ")"          -> move
     | "drag(" point "," point ")"  -> drag
     | "scroll(" point "," DIRECTION ")"  -> scroll
     | "key(" KEYS ")"            -> key
     | TYPED                      -> typed
     | ANSWERED                   -> answered
     | "wait()"  -> wait
     | "done()"  -> done
     | "fail()"  -> fail
point: NUMBER "," NUMBER
NUMBER: /[0-9]{1,3}/
DIRECTION: "up" | "down"
KEYS: /\S+(?=\)\Z)/
TYPED: /type\([\s\S]*\)/
ANSWERED: /answer\([\s\S]*\)/
"""

_READABLE = {
    "NUMBER": "a number 0-999",
    "DIRECTION": "up or down",
    "KEYS": "keys joined by +",
    "TYPED": "type(TEXT)",
    "ANSWERED": "answer(TEXT)",
}


class CompactCodec:
    """See the module's docstring; implements `dart_cli.policy.codec.Codec`."""

    def __init__(self) -> None:
        self._grammar = Grammar(_GRAMMAR, _READABLE)

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """The action of one completion; see Codec."""
        tree = self._grammar.parse(text)
        points = [_point(node, coordinates) for node in tree.find_data("point")]
        word = str(tree.children[-1]) if tree.children else ""
        match tree.data:
            case "click":
                return Click(x=points[0][0], y=points[0][1])
            case "right_click":
                return Click(x=points[0][0], y=points[0][1], button="right")
            case "double_click":
                return DoubleClick(x=points[0][0], y=points[0][1])
            case "move":
                return Move(x=points[0][0], y=points[0][1])
            case "drag":
                return Drag(path=[_point(node, coordinates) for node in _trees(tree)])
            case "scroll":
                dy = NOTCHES if word == "down" else -NOTCHES
                return Scroll(x=points[0][0], y=points[0][1], dy=dy)
            case "key":
                return KeyPress(keys=split_keys(word, "+"))
            case "typed":
                return Type(text=word[len("type(") : -1])
            case "answered":
                return Answer(text=word[len("answer(") : -1])
            case "wait":
                return Wait(seconds=WAIT_S)
            case "done":
                return Done()
            case _:
                return Fail()

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:  # noqa: ARG002
        """The completion of one action; see Codec. The language has no thoughts: `thought` is dropped."""
        match action:
            case Click(button="left"):
                return f"click({_numbers(coordinates, (action.x, action.y))})"
            case Click(button="right"):
                return f"right_click({_numbers(coordinates, (action.x, action.y))})"
            case DoubleClick():
                return f"double_click({_numbers(coordinates, (action.x, action.y))})"
            case Move():
                return f"move({_numbers(coordinates, (action.x, action.y))})"
            case Drag(path=[first, last]):
                return f"drag({_numbers(coordinates, first, last)})"
            case Scroll(dx=0, dy=dy) if abs(dy) == NOTCHES:
                direction = "down" if dy > 0 else "up"
                return f"scroll({_numbers(coordinates, (action.x, action.y))},{direction})"
            case KeyPress():
                return f"key({join_keys(action.keys, '+')})"
            case Type():
                return f"type({action.text})"
            case Answer():
                return f"answer({action.text})"
            case Wait(seconds=seconds) if seconds == WAIT_S:
                return "wait()"
            case Done():
                return "done()"
            case Fail():
                return "fail()"
        raise ActionError(f"the compact language cannot express {action!r}")

    def as_history(self, text: str) -> str:
        """The completion unchanged."""
        return text


def _trees(tree: Tree[Token]) -> list[Tree[Token]]:
    return [child for child in tree.children if isinstance(child, Tree)]


def _point(node: Tree[Token], coordinates: CoordinateMap) -> tuple[int, int]:
    x, y = node.children
    return coordinates.to_screen(int(str(x)), int(str(y)))


def _numbers(coordinates: CoordinateMap, *points: tuple[int, int]) -> str:
    return ",".join(f"{x},{y}" for x, y in (coordinates.to_model(*point) for point in points))
