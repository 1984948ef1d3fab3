"""GUI actions as those of a cua-bench worker: pure.

A worker has clicks, drags, moves, vertical scrolling, typing, keys and waiting (`cua_bench/types.py`), in
pixels of the screenshot. What it has not, it does not get: an action without a counterpart does nothing.
"""

from __future__ import annotations

from typing import Any

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

NOTCH = 100
"""Of a wheel, in the worker's `amount`: pixels in a browser, and a hundredth of a notch elsewhere."""

MOST_NOTCHES = 50  # of the wheel in one action
_CLICKS = {"left": "ClickAction", "right": "RightClickAction", "middle": "MiddleClickAction"}

Payload = dict[str, Any]

DONE: Payload = {"type": "DoneAction"}
"""Ends the episode: the worker evaluates and answers with the reward."""


def payloads_of(action: Action, size: tuple[int, int]) -> list[Payload]:
    """The worker's actions that perform `action` on a screen of `size`; none if it has none."""
    match action:
        case Click(x=x, y=y, button=button, modifiers=()):
            return [{"type": _CLICKS[button], **_point(x, y, size)}]
        case DoubleClick(x=x, y=y, modifiers=()):
            return [{"type": "DoubleClickAction", **_point(x, y, size)}]
        case Move(x=x, y=y):
            return [_move(x, y, size)]
        case Drag(path=path, button="left", modifiers=()):
            begin, end = _point(*path[0], size), _point(*path[-1], size)
            ends = {"from_x": begin["x"], "from_y": begin["y"], "to_x": end["x"], "to_y": end["y"]}
            return [{"type": "DragAction", **ends, "duration": 1.0}]
        case Scroll(x=x, y=y, dy=dy) if dy:
            amount = NOTCH * min(abs(dy), MOST_NOTCHES)
            direction = "down" if dy > 0 else "up"
            wheel = {"type": "ScrollAction", "direction": direction, "amount": amount}
            return [_move(x, y, size), wheel]  # the wheel turns where the pointer is
        case Type(text=text) if text:
            return [{"type": "TypeAction", "text": text}]
        case KeyPress(keys=[key]):
            return [{"type": "KeyAction", "key": key}]
        case KeyPress(keys=keys):
            return [{"type": "HotkeyAction", "keys": keys}]
        case Wait(seconds=seconds):
            return [{"type": "WaitAction", "seconds": seconds}]
        case Done() | Fail() | Answer():
            return [DONE]
        case _:
            return []


def _move(x: int, y: int, size: tuple[int, int]) -> Payload:
    return {"type": "MoveToAction", **_point(x, y, size), "duration": 0.0}


def _point(x: int, y: int, size: tuple[int, int]) -> dict[str, int]:
    return {"x": min(max(x, 0), size[0] - 1), "y": min(max(y, 0), size[1] - 1)}
