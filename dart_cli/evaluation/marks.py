"""An action in words, and the marks of actions and pointers over a screenshot, for filmstrips and pages.

action_words   an action as one short line
step_words     the actions of a completion as one line
marks_of       actions -> rings and lines over their screenshot
heat_of        the heat map of a pointer, by cell
outline        the edges of the regions in a heat map
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.errors import ActionError
from bus.messages import PointerMap
from dart_cli.algo.regions import THRESHOLD
from envs.contract.actions import (
    Click,
    DoubleClick,
    Drag,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    action_from_dict,
)

MOST_OPAQUE = 0.7
"""Opacity of the cell with the largest probability; the opacity of other cells is in proportion."""

_ARC = 12  # number of lines in half a circle

Edge = tuple[int, int, int, int]
"""A line from (x0, y0) to (x1, y1), in cells from the upper left corner."""


@dataclass(frozen=True)
class Ring:
    """A circle with a dot in its middle, in pixels of the screenshot."""

    x: int
    y: int
    radius: float


@dataclass(frozen=True)
class Line:
    """A line through points (x, y), in pixels of the screenshot."""

    points: list[tuple[float, float]]


def action_words(action: Mapping[str, Any]) -> str:
    """Return an action as one short line: `click 77,46`, `ctrl+click 77,46`, `type text hello`."""
    rest = {key: value for key, value in action.items() if key not in ("kind", "x", "y")}
    if rest.get("button") == "left":
        del rest["button"]
    modifiers = "".join(f"{key}+" for key in rest.pop("modifiers", ()))
    place = f" {action['x']},{action['y']}" if "x" in action and "y" in action else ""
    return f"{modifiers}{action.get('kind', '?')}{place}" + "".join(
        f" {key} {value}" for key, value in rest.items()
    )


def step_words(actions: Sequence[Mapping[str, Any]]) -> str:
    """Return the actions of a completion as one line: `click 77,46, then type text hello`."""
    return ", then ".join(map(action_words, actions))


def marks_of(actions: Sequence[Mapping[str, Any]], width: int) -> list[Ring | Line]:
    """Return the marks of actions over the screenshot of `width` pixels that they answer, in order.

    A click is a ring, a button that goes down or up half a ring, a drag or a turn of the wheel a line. An
    action without coordinates has no marks.
    """
    return [mark for action in actions for mark in _marks_of(action, width)]


def _marks_of(action: Mapping[str, Any], width: int) -> list[Ring | Line]:
    """Return the marks of one action."""
    try:
        parsed = action_from_dict(dict(action))
    except ActionError:
        return []
    radius = max(5.0, width / 32)
    match parsed:
        case Click(x=x, y=y) | Move(x=x, y=y):
            return [Ring(x, y, radius)]
        case DoubleClick(x=x, y=y):
            return [Ring(x, y, radius), Ring(x, y, radius * 0.6)]
        case TripleClick(x=x, y=y):
            return [Ring(x, y, radius * size) for size in (1, 0.7, 0.4)]
        case MouseDown(x=int(x), y=int(y)):
            return [_half(x, y, radius)]
        case MouseUp(x=int(x), y=int(y)):
            return [_half(x, y, -radius)]
        case Drag(path=path):
            return [Line([(float(x), float(y)) for x, y in path]), Ring(*path[-1], radius)]
        case Scroll(x=x, y=y, dx=dx, dy=dy):
            end = x + 3 * radius * _sign(dx), y + 3 * radius * _sign(dy)
            return [Line([(x, y), end]), Ring(x, y, radius)]
    return []


def _half(x: int, y: int, radius: float) -> Line:
    """Return the lower half of a circle; the upper half if the radius is negative."""
    angles = [pi * step / _ARC for step in range(_ARC + 1)]
    arc = [(x + radius * cos(angle), y + radius * sin(angle)) for angle in angles]
    return Line([*arc, arc[0]])


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def heat_of(pointer_map: PointerMap) -> NDArray[np.uint8]:
    """Return the heat of a pointer [rows, columns], 0 to 255; missing cells are 0."""
    cells = pointer_map.rows * pointer_map.columns
    heat = np.frombuffer(pointer_map.heat[:cells].ljust(cells, b"\0"), np.uint8)
    return heat.reshape(pointer_map.rows, pointer_map.columns)


def outline(heat: NDArray[np.uint8]) -> list[Edge]:
    """Return the edges of the regions of heat [rows, columns].

    A region has the cells with more than THRESHOLD of the largest heat.
    """
    inside = np.pad(heat > THRESHOLD * heat.max(initial=0), 1)
    across = np.argwhere(inside[1:-1, 1:] != inside[1:-1, :-1]).tolist()  # row, column to the right
    down = np.argwhere(inside[1:, 1:-1] != inside[:-1, 1:-1]).tolist()
    return [(x, y, x, y + 1) for y, x in across] + [(x, y, x + 1, y) for y, x in down]
