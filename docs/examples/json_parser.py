"""An action parser for your own language: a thought, and on the last line an action as JSON.

The search field is empty.
{"do": "click", "at": [640, 52]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import WrittenPoint
from envs import Action, Answer, Click, Done, DoubleClick, Fail, Type

_POINT = re.compile(r'"at": (\[(\d{1,6}), ?(\d{1,6})\])')
_ARGUMENT = {
    **dict.fromkeys(("click", "right_click", "double_click"), "at"),
    **dict.fromkeys(("type", "answer"), "text"),
}
_CANNOT = "it has no such action here"


class JsonParser:
    """The action parser; dart_cli/language/parsers/base.py defines the contract of its methods."""

    limits: Mapping[str, str] = {
        "click": "it clicks with the left or right button, no keys held",
        "double_click": "no keys can be held",
        **dict.fromkeys(("triple_click", "move", "drag", "mouse_down", "mouse_up"), _CANNOT),
        **dict.fromkeys(("scroll", "keypress", "key_down", "key_up", "goto", "wait"), _CANNOT),
    }

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action on the last line of a completion; the lines before it are a thought."""
        try:
            return _action(json.loads(_last_line(text)), coordinates)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ActionError(f"the last line is no action in JSON: {error!r:.200}") from None

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return a completion that `parse` reads as exactly this action.

        Raises ActionError if there is none.
        """
        return f"{thought}\n{json.dumps(self._as_json(action, coordinates))}".lstrip("\n")

    def as_history(self, text: str) -> str:
        """Return the completion unchanged, so that prompts show exactly the tokens that were sampled."""
        return text

    def write_point(self, x: int, y: int) -> str:
        """Return a point as text, for a head that points; see dart_cli.language.parsers.base.PointParser."""
        return f"[{x}, {y}]"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the points on the last line.

        A quote within a JSON string has a backslash, so that none is found there.
        """
        try:
            json.loads(_last_line(text))
        except (ValueError, RecursionError):
            return []
        points = _POINT.finditer(text, text.rfind("\n") + 1)
        return [
            WrittenPoint(point.start(1), point.end(1), int(point[2]), int(point[3]))
            for point in points
        ]

    def _as_json(self, action: Action, coordinates: CoordinateMap) -> dict[str, Any]:
        match action:
            case Click(button="left", modifiers=()) | DoubleClick(modifiers=()):
                return {"do": action.kind, "at": coordinates.to_model(action.x, action.y)}
            case Click(button="right", modifiers=()):
                return {"do": "right_click", "at": coordinates.to_model(action.x, action.y)}
            case Type() | Answer():
                return {"do": action.kind, "text": action.text}
            case Done() | Fail():
                return {"do": action.kind}
        raise ActionError(f"JSON here cannot express {action!r}: {self.limits[action.kind]}")


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2]


def _action(value: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
    name = value["do"]
    if strange := {*value} - {"do", _ARGUMENT.get(name)}:
        raise ActionError(f"{str(name)[:40]!r} has no {min(strange)[:40]!r}")
    if name in ("click", "right_click", "double_click"):
        x, y = value["at"]
        if type(x) is not int or type(y) is not int:
            raise ActionError("a place is two whole numbers")
        x, y = coordinates.to_screen(x, y)
        if name == "double_click":
            return DoubleClick(x=x, y=y)
        return Click(x=x, y=y, button="left" if name == "click" else "right")
    if name in ("type", "answer"):
        text = value["text"]
        if not isinstance(text, str):
            raise ActionError(f"{name} needs a text")
        text.encode()  # raises for half a surrogate pair, which JSON can hold and no message can
        return Type(text=text) if name == "type" else Answer(text=text)
    if name in ("done", "fail"):
        return Done() if name == "done" else Fail()
    raise ActionError(f"{str(name)[:40]!r} is no action of this language")
