"""GUI actions as calls of the phone's input, `__SIM_INPUT__` in MobileGym's page.

    GestureWriter   converts the actions of one episode into JavaScript expressions

A finger is in place of a pointer. A drag of two points is a swipe; a finger that goes down, moves and goes up by
actions of its own holds what it drags. A right click is a long press, a turn of the wheel a swipe the other way.
The keys back, home and recents are the phone's buttons. Points are pixels of the screenshot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from envs.contract.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    within,
)
from envs.tools.inputs import canonical

LONG_PRESS_MS = 800
SWIPE_MS = 400
NOTCH = 0.08  # fraction of the screen's height or width that a notch of the wheel scrolls
MOST_NOTCHES = 10

BUTTONS = {
    "back": "back",
    "escape": "back",
    "home": "home",
    "enter": "enter",
    "recent": "recent",
    "recents": "recent",
    "app_switch": "recent",
}
"""A key -> the call for it."""

Point = tuple[int, int]


class GestureWriter:
    """Converts the actions of one episode; `scale` is pixels of the screenshot per CSS pixel."""

    def __init__(self, size: tuple[int, int], scale: float) -> None:
        self._size = size  # pixels of the screenshot
        self._scale = scale
        self._finger: list[Point] = []  # where it went since it is down

    def expressions_of(self, action: Action) -> list[str]:
        """Return the expressions that perform `action`, one after another; none if it does nothing here."""
        match within(action, self._size):
            case Click(x=x, y=y, button="right", modifiers=()):
                return [self._call("longPress", *self._css((x, y)), LONG_PRESS_MS)]
            case Click(x=x, y=y, modifiers=()):
                return [self._call("tap", *self._css((x, y)))]
            case DoubleClick(x=x, y=y, modifiers=()) | TripleClick(x=x, y=y, modifiers=()):
                return [self._call("doubleTap", *self._css((x, y)))]
            case Drag(path=path, button="left", modifiers=()):
                return [self._swipe(path[0], path[-1])]
            case Scroll(x=x, y=y, dx=dx, dy=dy) if dx or dy:
                return [self._scroll((x, y), dx, dy)]
            case Type(text=text):
                return self._write(text)
            case KeyPress(keys=[key]) if canonical(key) in BUTTONS:
                return [self._call(BUTTONS[canonical(key)])]
            case MouseDown() | Move() | MouseUp() as touch:
                return self._touch(touch)
            case _:
                return []

    def _touch(self, action: MouseDown | Move | MouseUp) -> list[str]:
        """Return the drag that ends with `action`, if it takes the finger off the screen."""
        at = None if action.x is None or action.y is None else (action.x, action.y)
        if isinstance(action, MouseDown):
            self._finger = [at] if at is not None and action.button == "left" else []
        elif self._finger and at is not None:
            self._finger.append(at)
        if not isinstance(action, MouseUp) or not self._finger:
            return []
        first, last, self._finger = self._finger[0], self._finger[-1], []
        points = [self._point(first), self._point(last)]
        return [self._call("drag", *points, {"ms": SWIPE_MS})]

    def _write(self, text: str) -> list[str]:
        """Return the calls that type a text into the field that has the focus; a newline is Enter."""
        calls: list[str] = []
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n")):
            if number:
                calls.append(self._call("enter"))
            if line:
                calls.append(self._call("type", line, {"clear": False}))
        return calls

    def _scroll(self, at: Point, dx: int, dy: int) -> str:
        """Return a swipe in the other direction. It stays away from the edges, where the phone's gestures begin."""
        ends: list[Point] = []
        for place, notches, side in zip(at, (dx, dy), self._size, strict=True):
            way = round(min(max(notches, -MOST_NOTCHES), MOST_NOTCHES) * NOTCH * side)
            low, high = side // 10, side - 1 - side // 10
            begin = min(max(place, low + max(way, 0)), high + min(way, 0)) if way else place
            ends.append((begin, min(max(begin - way, low), high) if way else place))
        return self._swipe((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]))

    def _swipe(self, first: Point, last: Point) -> str:
        return self._call("swipe", self._point(first), self._point(last), {"ms": SWIPE_MS})

    def _css(self, point: Point) -> Sequence[float]:
        return [round(part / self._scale, 3) for part in point]

    def _point(self, point: Point) -> dict[str, float]:
        return dict(zip("xy", self._css(point), strict=True))

    @staticmethod
    def _call(name: str, *arguments: object) -> str:
        return f"window.__SIM_INPUT__.{name}({', '.join(map(json.dumps, arguments))})"
