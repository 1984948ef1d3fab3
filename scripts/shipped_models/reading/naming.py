"""What the things of a scene may be called, so that exactly one is meant.

View        a scene's things by label, role, look and place
tables      the tables among the cells of a scene
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from random import Random

import numpy as np

from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.scene import Box, Scene, Thing

LONGEST = 28
"""Characters of a label that an instruction names."""

NOUNS: dict[str, tuple[str, ...]] = {
    "button": ("button",),
    "link": ("link",),
    "field": ("field", "text field", "textbox", "input"),
    "checkbox": ("checkbox", "check box"),
    "radio": ("radio button",),
    "tab": ("tab",),
    "row": ("row", "list item"),
    "item": ("item", "menu item"),
    "option": ("option",),
    "icon": ("icon",),
    "slider": ("slider",),
    "select": ("dropdown", "list"),
    "cell": ("cell",),
    "section": ("section",),
    "menu": ("menu",),
    "toggle": ("switch", "toggle"),
    "word": ("word",),
}
"""What instructions call a role. Things of other roles are never the answer to a click by label."""

BESIDE = ("field", "checkbox", "radio", "slider", "select")
"""Roles whose label is text beside them."""

BLANK = 40
"""Most difference of brightness in a field that holds nothing, of 255: grounds may be noisy."""

Cell = tuple[str, str, Thing]
"""Name of the row, name of the column, the cell."""


_FIXED_WORDS = frozenset((*words.UI_WORDS, *words.FIRST_NAMES, *words.LAST_NAMES))
"""Words that have no held-out part."""


def key_of(text: str) -> str:
    """Return the part of a text that distinguishes two labels: case does not count."""
    return " ".join(text.lower().split())


def speakable(text: str) -> bool:
    """Return True if an instruction can hold the text."""
    return 0 < len(text) <= LONGEST and "{" not in text and '"' not in text and text.isascii()


class View:
    """A scene, seen by what can be asked about it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.things = scene.things
        self._text = "".join(glyph.character for glyph in scene.glyphs)
        self._image = scene.image
        width, height = self._image.size
        self.screen: Box = (0.0, 0.0, float(width), float(height))
        self.by_role: defaultdict[str, list[Thing]] = defaultdict(list)
        self._by_label: defaultdict[str, list[Thing]] = defaultdict(list)
        for thing in scene.things:
            self.by_role[thing.role].append(thing)
            if thing.label:
                self._by_label[key_of(thing.label)].append(thing)

    def readable(self, thing: Thing) -> bool:
        """Return True if an instruction can name the thing: its label is on the screen, or it is an icon's."""
        return speakable(thing.label) and (
            thing.role == "icon" or key_of(thing.label) == "close" or self.stands(thing.label)
        )

    def stands(self, text: str) -> bool:
        """Return True if all of the text can be read, or if not all characters of the scene are listed."""
        return bool(self.scene.unread) or "".join(text.split()) in self._text

    def blank(self, field: Thing) -> bool:
        """Return True if nothing can be seen in a field: no text, no hint, no dots of a password."""
        left, top, right, bottom = map(round, field.box)
        if right - left < 10 or bottom - top < 10:
            return False
        inside = self._image.crop((left + 4, top + 4, right - 4, bottom - 4)).convert("L")
        return not field.value and int(np.ptp(np.asarray(inside))) < BLANK

    @cached_property
    def labels(self) -> set[str]:
        """Every label and value that can be seen, as `key_of`."""
        return {*self._by_label, *(key_of(thing.value) for thing in self.things)}

    @cached_property
    def held_out(self) -> bool:
        """Whether most words of the scene are of the tenth that is for tests."""
        parts = [
            part
            for thing in self.things
            for part in thing.label.split()
            if part.isalpha() and part not in _FIXED_WORDS
        ]
        return sum(map(words.is_held_out, parts)) * 2 > len(parts)

    @cached_property
    def plain(self) -> list[Thing]:
        """Things that their label alone names, without words of running text."""
        return [t for t in self.things if t.role in NOUNS and t.role != "word" and self.alone(t)]

    @cached_property
    def single_words(self) -> list[Thing]:
        """Words of running text that stand there once."""
        return [thing for thing in self.by_role["word"] if self.alone(thing)]

    def alone(self, thing: Thing) -> bool:
        """Return True if no other thing has this label, except text inside it."""
        return self.readable(thing) and all(
            other is thing
            or (other.role in ("text", "word", "heading") and _inside(other.box, thing.box))
            or (other.role == "text" and thing.role in BESIDE)
            for other in self._by_label[key_of(thing.label)]
        )

    def marks(self, role: str) -> list[Thing]:
        """Return the things of a role that their label alone names."""
        return [thing for thing in self.by_role[role] if self.alone(thing)]

    def of_role(self, role: str) -> list[Thing]:
        """Return the things that their role and label name together."""
        count = Counter(key_of(thing.label) for thing in self.by_role[role])
        return [
            thing
            for thing in self.by_role[role]
            if self.readable(thing) and count[key_of(thing.label)] == 1
        ]

    def in_order(self, role: str) -> list[Thing]:
        """Return the things of a role in reading order; empty where the order is open to doubt."""
        return reading_order(self.by_role[role])

    @cached_property
    def cells(self) -> list[Cell]:
        """Cells of tables with the names of their row and column, where these name one cell."""
        named_cells = [
            cell for table in tables(self.by_role["cell"]) for cell in _name_cells(table)
        ]
        count = Counter((key_of(row), key_of(column)) for row, column, _ in named_cells)
        return [
            (row, column, thing)
            for row, column, thing in named_cells
            if all(speakable(name) and self.stands(name) for name in (row, column))
            and count[key_of(row), key_of(column)] == 1
        ]

    def shapes(self, rng: Random) -> tuple[str, str, Thing] | None:
        """Return the kind of question (colour, shape, size), what a shape is called, and the shape."""
        shapes = self.by_role["shape"]
        for _ in range(4):
            if not shapes:
                return None
            thing = rng.choice(shapes)
            parts = [
                part
                for part in ("size", "colour", "shape")
                if getattr(thing, part) and rng.random() < 0.6
            ]
            same = [s for s in shapes if all(getattr(s, p) == getattr(thing, p) for p in parts)]
            if not parts or len(same) != 1:
                continue
            phrase = [getattr(thing, part) for part in parts if part != "shape"]
            phrase.append(thing.shape if "shape" in parts else rng.choice(("shape", "item")))
            kind = "size" if "size" in parts else "shape" if "shape" in parts else "colour"
            return kind, " ".join(phrase), thing
        return None

    def place(self, rng: Random) -> tuple[str, str, Thing, str] | None:
        """Return the role of the target, its direction, the target and the label beside which it lies."""
        if len(self.plain) < 2:
            return None
        anchor = rng.choice(self.plain)
        where = rng.choice(("below", "above", "right", "left"))
        others = [t for t in self.by_role[anchor.role] if t is not anchor]
        target = _next(anchor, others, where)
        return (target.role, where, target, anchor.label) if target else None


def reading_order(things: Sequence[Thing]) -> list[Thing]:
    """Return things line by line, from the left; empty where lines overlap or things lie on each other."""
    lines: list[list[Thing]] = []
    for thing in sorted(things, key=lambda thing: thing.box[1] + thing.box[3]):
        middle = (thing.box[1] + thing.box[3]) / 2
        if lines and middle < min(line.box[3] for line in lines[-1]):
            lines[-1].append(thing)
        else:
            lines.append([thing])
    ordered: list[Thing] = []
    bottom = float("-inf")
    for line in lines:
        line.sort(key=lambda thing: thing.box[0])
        high = min(thing.box[3] - thing.box[1] for thing in line)
        if min(thing.box[1] for thing in line) < bottom - high / 4:
            return []
        if any(b.box[0] < a.box[2] - 2 for a, b in pairwise(line)):
            return []
        bottom = max(thing.box[3] for thing in line)
        ordered += line
    return ordered


def tables(cells: Sequence[Thing]) -> list[list[list[Thing]]]:
    """Return the rows of cells of each table that has a cell in every place, two rows and columns at least."""
    rows: list[list[Thing]] = []
    for cell in sorted(cells, key=lambda cell: (round(cell.box[1] / 3), cell.box[0])):
        before = rows[-1][-1].box if rows else None
        if before and abs(before[1] - cell.box[1]) <= 3 and -3 <= cell.box[0] - before[2] <= 7:
            rows[-1].append(cell)
        else:
            rows.append([cell])
    blocks: list[list[list[Thing]]] = []
    for row in rows:
        above = blocks[-1][-1] if blocks else []
        fits = len(above) == len(row) and all(
            abs(a.box[0] - b.box[0]) <= 3 and -3 <= b.box[1] - a.box[3] <= 7
            for a, b in zip(above, row, strict=False)
        )
        if fits:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    touching = {id(cell) for table in blocks if len(table) > 1 for row in table for cell in row}
    whole = len(touching) == len(cells) or len(blocks) == sum(len(t) > 1 for t in blocks)
    return [table for table in blocks if len(table) > 1 and len(table[0]) > 1] if whole else []


def _name_cells(table: list[list[Thing]]) -> list[Cell]:
    heads = [cell.label for cell in table[0]]
    return [
        (row[0].label, heads[at], cell)
        for row in table[1:]
        for at, cell in enumerate(row)
        if at and row[0].label and heads[at]
    ]


def _next(anchor: Thing, others: Sequence[Thing], where: str) -> Thing | None:
    """Return the one of `others` that lies next in a direction, straight on and with no rival near."""
    along, across = (1, 0) if where in ("below", "above") else (0, 1)
    far = where in ("below", "right")
    ahead = []
    for other in others:
        gap = (
            other.box[along] - anchor.box[along + 2]
            if far
            else anchor.box[along] - other.box[along + 2]
        )
        common = min(anchor.box[across + 2], other.box[across + 2]) - max(
            anchor.box[across], other.box[across]
        )
        narrow = min(b[across + 2] - b[across] for b in (anchor.box, other.box))
        if gap >= -2:
            ahead.append((gap, common / narrow, other))
    ahead.sort(key=lambda candidate: candidate[0])
    straight = [candidate for candidate in ahead if candidate[1] > 0]
    if not straight or straight[0][1] < 0.6:
        return None
    gap, _, target = straight[0]
    size = target.box[along + 2] - target.box[along]
    if gap > 60 or any(candidate[0] < gap + size * 0.7 for candidate in straight[1:]):
        return None
    # A thing beside the way that is as near makes "below" a matter of taste.
    beside = [
        candidate
        for candidate in ahead
        if candidate[1] <= 0 and candidate[0] < gap + size and candidate[1] > -0.5
    ]
    return None if beside else target


def _inside(one: Box, other: Box) -> bool:
    return (
        one[0] >= other[0] - 1
        and one[1] >= other[1] - 1
        and one[2] <= other[2] + 1
        and one[3] <= other[3] + 1
    )
