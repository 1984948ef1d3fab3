"""Writes GUI actions as actions of a cua-bench worker, without input or output.

A worker has clicks, drags, moves, vertical scrolling, typing, keys and waiting (`cua_bench/types.py`), in
pixels of the screenshot. An action without a counterpart does nothing.
"""

from __future__ import annotations

from typing import Any

from envs.contract.actions import (
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
    within,
)

NOTCH = 100
"""A notch of the wheel in the worker's `amount`: pixels in a browser, hundredths of a notch elsewhere."""

MOST_NOTCHES = 50  # of the wheel in one action
_CLICKS = {"left": "ClickAction", "right": "RightClickAction", "middle": "MiddleClickAction"}

Payload = dict[str, Any]

DONE: Payload = {"type": "DoneAction"}
"""The action that ends the episode: the worker evaluates and answers with the reward."""


def payloads_of(action: Action, size: tuple[int, int]) -> list[Payload]:
    """Return the worker's actions that perform `action` on a screen of `size`; [] if there are none."""
    match within(action, size):
        case Click(x=x, y=y, button=button, modifiers=()):
            return [{"type": _CLICKS[button], "x": x, "y": y}]
        case DoubleClick(x=x, y=y, modifiers=()):
            return [{"type": "DoubleClickAction", "x": x, "y": y}]
        case Move(x=x, y=y):
            return [_move(x, y)]
        case Drag(path=[(x0, y0), *_, (x1, y1)], button="left", modifiers=()):
            ends = {"from_x": x0, "from_y": y0, "to_x": x1, "to_y": y1}
            return [{"type": "DragAction", **ends, "duration": 1.0}]
        case Scroll(x=x, y=y, dy=dy) if dy:
            amount = NOTCH * min(abs(dy), MOST_NOTCHES)
            direction = "down" if dy > 0 else "up"
            wheel = {"type": "ScrollAction", "direction": direction, "amount": amount}
            return [_move(x, y), wheel]  # the wheel turns where the pointer is
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


def _move(x: int, y: int) -> Payload:
    return {"type": "MoveToAction", "x": x, "y": y, "duration": 0.0}
