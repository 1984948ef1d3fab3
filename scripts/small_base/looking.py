"""Reads a page in the browser: its characters, its things. The work is done by look.js in the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from scripts.small_base.scene import Box, Glyph, Thing

LONGEST = 60
"""Characters of a label or a value that is kept."""


@dataclass(frozen=True)
class Looked:
    """What a page shows, in pixels of its screenshot."""

    glyphs: tuple[Glyph, ...]
    things: tuple[Thing, ...]
    unread: tuple[Box, ...]


def look(ask: Callable[[str], Any], scale: float) -> Looked:
    """What the page shows now; `ask` evaluates an expression in it. Raises EnvError."""
    if not ask("typeof dartLook === 'function'"):
        ask(_script())
    told = ask(f"dartLook({scale:g})")
    glyphs = tuple(Glyph(character, x, y) for character, x, y in told["glyphs"])
    things = [_thing(each) for each in told["things"]]
    both = {each.size for each in things} >= {"small", "large"}
    kept = tuple(each if both or not each.size else _unsized(each) for each in things)
    return Looked(glyphs, kept, tuple(_box(each) for each in told["unread"]))


def _thing(told: dict[str, Any]) -> Thing:
    return Thing(
        role=told["role"],
        label=told["label"],
        box=_box(told["box"]),
        colour=told["colour"],
        shape=told["shape"],
        size=told["size"],
        checked=told["checked"],
        value=str(told["value"])[:LONGEST],
    )


def _unsized(thing: Thing) -> Thing:
    """The same where nothing of the other size is in sight."""
    return Thing(
        thing.role,
        thing.label,
        thing.box,
        thing.colour,
        thing.shape,
        "",
        thing.checked,
        thing.value,
    )


def _box(told: list[float]) -> Box:
    left, top, right, bottom = told
    return left, top, right, bottom


@lru_cache(maxsize=1)
def _script() -> str:
    return Path(__file__).with_name("look.js").read_text(encoding="utf-8").strip()
