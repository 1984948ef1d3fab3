"""Actions as answers: text of the compact action parser with a box for each point.

answer_of   the answer that an action is, on the page as it is now
spoken      an action as the prompt tells earlier steps
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers.compact import CompactParser
from envs.contract.actions import Action, Click, Drag, Move, Scroll
from scripts.shipped_models.reading.scene import Box

Ask = Callable[[str], Any]
"""Evaluates an expression in the page."""

PRECISE = 3
"""CSS pixels to each side of a point whose place matters."""

SCROLLED = 12
"""The same of a scroll: any place over what scrolls does."""


class Answer(NamedTuple):
    """A text of the compact action parser; each `{}` stands for a point in the next of `boxes`."""

    text: str
    boxes: tuple[Box, ...]


def load_safe(ask: Ask) -> None:
    """Define the functions of safe.js in the page. Raises EnvError."""
    if not ask("typeof dartSafe === 'function'"):
        ask(_script())


def answer_of(action: Action, ask: Ask, scale: float, precise: int = PRECISE) -> Answer:
    """Return the answer that an action is; call it before the action is performed. Raises EnvError."""
    load_safe(ask)
    small = precise * scale
    boxes: list[Box] = []
    if isinstance(action, Drag):
        boxes = [_around(point, small, scale) for point in action.path]
    elif isinstance(action, Scroll):
        boxes = [_around((action.x, action.y), SCROLLED * scale, scale)]
    elif isinstance(action, Click | Move):
        boxes = [safe_box(action.x, action.y, ask, scale, precise)]
    elif (x := getattr(action, "x", None)) is not None and (
        y := getattr(action, "y", None)
    ) is not None:
        boxes = [safe_box(x, y, ask, scale, precise)]
    return Answer(_templated(action, len(boxes)), tuple(boxes))


def safe_box(x: float, y: float, ask: Ask, scale: float, precise: int = PRECISE) -> Box:
    """Return the box in which a click does what it does at this point; a small one where the page cannot tell."""
    edges = ask(f"dartSafe({x}, {y}, {scale:g})")
    if edges is None:
        return _around((x, y), precise * scale, scale)
    left, top, right, bottom = edges
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
