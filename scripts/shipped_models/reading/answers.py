"""Actions as answers: text of the compact action parser with a box for each point.

Answer      the text, `{}` for a point, and the boxes
answer_of   that of an action on the page as it is now
spoken      an action as earlier steps are told
expressible an action as the action parser can write it
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers.compact import NOTCHES, WAIT_S, CompactParser
from envs.contract.actions import Action, Click, Drag, Move, Scroll, Wait
from scripts.shipped_models.reading.scene import Box

Ask = Callable[[str], Any]
"""Evaluates an expression in the page."""

PRECISE = 3
"""CSS pixels to each side of a point whose place matters."""

SCROLLED = 12
"""The same of a scroll: any place over what scrolls does."""


class Answer(NamedTuple):
    """Text of the compact action parser; each `{}` stands for a point in the next of `boxes`."""

    text: str
    boxes: tuple[Box, ...]


def load_safe(ask: Ask) -> None:
    """Define the functions of safe.js in the page. Raises EnvError."""
    if not ask("typeof dartSafe === 'function'"):
        ask(_script())


def expressible(action: Action) -> Action:
    """Return the nearest action that the action parser can write.

    A scroll is of three notches, a drag with one stop on its way goes straight, a wait is of one second, and
    a shorter one is a move to the middle of the page, which takes a step's time as well.
    """
    if isinstance(action, Scroll):
        return Scroll(x=action.x, y=action.y, dy=NOTCHES if action.dy >= 0 else -NOTCHES)
    if isinstance(action, Wait):
        return Wait(seconds=WAIT_S) if action.seconds > 0.9 * WAIT_S else Move(x=80, y=130)
    if isinstance(action, Drag) and len(action.path) == 3:
        return Drag(path=[action.path[0], action.path[-1]])
    return action


def answer_of(
    action: Action, ask: Ask, scale: float, precise: int = PRECISE, placed: bool = False
) -> Answer:
    """Return the answer that an action is, read before it is performed. Raises EnvError.

    `placed`: on this page the place matters, but on buttons, fields and links.
    """
    load_safe(ask)
    small = precise * scale
    boxes: list[Box] = []
    if isinstance(action, Drag):
        boxes = [_around(point, small, scale) for point in action.path]
    elif isinstance(action, Scroll):
        boxes = [_around((action.x, action.y), SCROLLED * scale, scale)]
    elif isinstance(action, Click | Move):
        boxes = [safe_box(action.x, action.y, ask, scale, precise, placed)]
    elif (x := getattr(action, "x", None)) is not None and (
        y := getattr(action, "y", None)
    ) is not None:
        boxes = [safe_box(x, y, ask, scale, precise, placed)]
    return Answer(_templated(action, len(boxes)), tuple(boxes))


def safe_box(
    x: float, y: float, ask: Ask, scale: float, precise: int = PRECISE, placed: bool = False
) -> Box:
    """Where a click does what it does at this point; a small box where nothing else is known."""
    told = ask(f"dartSafe({x}, {y}, {scale:g}, {json.dumps(placed)})")
    if told is None:
        return _around((x, y), precise * scale, scale)
    left, top, right, bottom = told
    return left, top, right, bottom


def spoken(action: Action, width: int, height: int) -> str:
    """Return the action as the action parser writes it, numbers from 0 to 999."""
    return _action_parser().format(action, make_coordinate_map("thousandths", width, height))


def _templated(action: Action, points: int) -> str:
    """Return the action parser's text with `{}` in place of each point."""
    text = _action_parser().format(action, make_coordinate_map("thousandths", 1000, 1000))
    if not points:
        return text
    name, _, rest = text.partition("(")
    numbers = rest.rstrip(")").split(",")
    return f"{name}({','.join(['{}'] * points + numbers[2 * points :])})"


def _around(point: tuple[float, float], half: float, scale: float) -> Box:
    x, y = point
    return (
        max(0.0, x - half),
        max(0.0, y - half),
        min(160 * scale, x + half),
        min(210 * scale, y + half),
    )


@lru_cache(maxsize=1)
def _action_parser() -> CompactParser:
    return CompactParser()  # its grammar takes 50 ms to read


@lru_cache(maxsize=1)
def _script() -> str:
    return Path(__file__).with_name("safe.js").read_text(encoding="utf-8").strip()
