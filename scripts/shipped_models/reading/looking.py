"""Reads a page in the browser: its characters, its things. The work is done by look.js in the page.

look       what the page shows
is_drawn   whether its picture shows it, too
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.shipped_models.reading.scene import Box, Glyph, Thing

REACH, INK, LEAST_INKED = 6, 25, 0.95
"""Pixels around a character's middle, how far apart its shades of 256 are, and how many must have ink."""

LONGEST = 60
"""Characters of a label or a value that is kept."""


@dataclass(frozen=True)
class Looked:
    """The contents of a page, in pixels of its screenshot."""

    glyphs: tuple[Glyph, ...]
    things: tuple[Thing, ...]
    unread: tuple[Box, ...]


def look(ask: Callable[[str], Any], scale: float) -> Looked:
    """Return what the page shows now; `ask` evaluates an expression in it. Raises EnvError."""
    if not ask("typeof dartLook === 'function'"):
        ask(_script())
    page = ask(f"dartLook({scale:g})")
    glyphs = tuple(Glyph(character, x, y) for character, x, y in page["glyphs"])
    things = [_thing(each) for each in page["things"]]
    both = {thing.size for thing in things} >= {"small", "large"}
    sized = tuple(thing if both or not thing.size else _unsized(thing) for thing in things)
    return Looked(glyphs, sized, tuple(_box(each) for each in page["unread"]))


def is_drawn(png: bytes, glyphs: Sequence[Glyph]) -> bool:
    """Return True if the picture has ink nearly everywhere that the page reports a character.

    It has not where a page is ahead of its picture: the browser draws the first scroll of a page that was
    just loaded with a later frame.
    """
    if not glyphs:
        return True
    with Image.open(io.BytesIO(png)) as picture:
        grey = np.asarray(picture.convert("L"), dtype=np.int16)
    inked = 0
    for glyph in glyphs:
        x, y = round(glyph.x), round(glyph.y)
        near = grey[max(0, y - REACH) : y + REACH + 1, max(0, x - REACH // 2) : x + REACH // 2 + 1]
        inked += near.size > 0 and int(near.max()) - int(near.min()) > INK
    return inked >= LEAST_INKED * len(glyphs)


def _thing(properties: dict[str, Any]) -> Thing:
    return Thing(
        role=properties["role"],
        label=properties["label"],
        box=_box(properties["box"]),
        colour=properties["colour"],
        shape=properties["shape"],
        size=properties["size"],
        checked=properties["checked"],
        value=str(properties["value"])[:LONGEST],
    )


def _unsized(thing: Thing) -> Thing:
    """Return the same thing without its size, for a scene where nothing of the other size is in sight."""
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


def _box(edges: list[float]) -> Box:
    left, top, right, bottom = edges
    return left, top, right, bottom


@lru_cache(maxsize=1)
def _script() -> str:
    return Path(__file__).with_name("look.js").read_text(encoding="utf-8").strip()
