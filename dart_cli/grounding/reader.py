"""Reads a grounding set from a local folder; nothing is downloaded.

read_set      reads the items of a set, in the order of its files, and reports malformed rows
GroundingSet  the result
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from bus.errors import UserError
from dart_cli.grounding.items import Box, Item, Picture, Region, bounds_of, pixel_in
from dart_cli.grounding.layouts import FORMS, Form, Layout, find_layout, read_rows
from envs.contract.screenshots import BROKEN, seen_size
from envs.tools.textfiles import read_text

ELEMENTS = "element"
"""The name of the trait whose values are text and icon."""


@dataclass(frozen=True)
class GroundingSet:
    """The items of a set, and its malformed rows."""

    layout: Layout
    folder: Path
    items: list[Item]
    malformed: list[str]  # FILE[INDEX]: what is wrong, for each row that is no item
    digest: str  # of the annotation files

    @property
    def refusals(self) -> int:
        """Number of items whose right answer is that nothing on the screen is meant."""
        return sum(item.region is None for item in self.items)


def read_set(folder: Path, name: str = "") -> GroundingSet:
    """Read a folder in the layout called `name`; without a name, the layout is recognised.

    Raises UserError if no layout or several fit, or if a file is no list of rows.
    """
    layout = find_layout(folder, name)
    reader = _Reader(layout, folder)
    items: list[Item] = []
    malformed: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for path, trait in layout.paths(folder).items():
        rows = read_rows(path)
        digest.update(json.dumps([path.name, rows]).encode())
        for index, row in enumerate(rows):
            place = f"{path.relative_to(folder).as_posix()}[{index}]"
            try:
                items.append(reader.item(place, row, trait, Picture(path, index)))
            except ValueError as error:
                malformed.append(f"{place}: {error}")
    return GroundingSet(layout, folder, items, malformed, digest.hexdigest())


class _Reader:
    """Makes items from the rows of one set. Raises ValueError with what is wrong with a row."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        self._layout = layout
        self._folder = folder
        self._sizes: dict[Picture, tuple[int, int]] = {}
        self._classes = dict(_classes(folder / layout.classes)) if layout.classes else {}

    def item(self, place: str, row: Any, file_trait: str, own: Picture) -> Item:
        """Return the item of a row; `own` is its picture if the annotation file has the pictures."""
        layout = self._layout
        if not isinstance(row, dict):
            raise ValueError("must be an object of keys and values")  # noqa: TRY004 - a row's mistake
        missing = sorted(layout.keys - set(row))
        if missing:
            raise ValueError(f"has no {missing[0]!r}")
        image = self._image(row) if layout.images else own
        size = self._size(image)
        if layout.size and row[layout.size] != list(size):
            raise ValueError(
                f"{layout.size} is {_short(row[layout.size])}, but {image.name} has {size[0]}x{size[1]} "
                "pixels, so its box is in others"
            )
        return Item(
            id=place,
            image=image,
            size=size,
            instruction=_text(row, layout.instruction),
            region=self._region(row, size),
            traits=self._traits(row, file_trait),
        )

    def _image(self, row: Mapping[str, Any]) -> Picture:
        """Return the picture that a row names, from the first folder that has it."""
        name = _text(row, self._layout.image)
        tried: list[str] = []
        for folder in self._layout.images:
            values = {key: _text(row, key) for key in ("platform",) if "{" + key + "}" in folder}
            path = PurePosixPath(folder.format(**values)) / name
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{self._layout.image} {_short(name)} leads out of the set's folder"
                )
            if (self._folder / path).is_file():
                return Picture(self._folder / path)
            tried.append(str(path))
        raise ValueError(f"there is no picture {' or '.join(tried)}")

    def _size(self, picture: Picture) -> tuple[int, int]:
        """Return the size of a picture in pixels. Raises ValueError if it cannot be read."""
        if picture not in self._sizes:
            try:
                with Image.open(io.BytesIO(picture.read_bytes())) as image:
                    self._sizes[picture] = seen_size(image)
            except (UnidentifiedImageError, *BROKEN) as error:
                raise ValueError(
                    f"{picture.name} is no picture that can be read: {error}"
                ) from None
        return self._sizes[picture]

    def _region(self, row: Mapping[str, Any], size: tuple[int, int]) -> Region | None:
        """Return the region of a row in pixels; None if nothing on the screen is meant."""
        layout = self._layout
        form: Form
        if isinstance(layout.form, str):
            form = layout.form
        else:
            kind = row[layout.form_key]
            if not isinstance(kind, str) or kind not in layout.form:
                raise ValueError(
                    f"{layout.form_key} must be one of {', '.join(layout.form)}, got {_short(kind)}"
                )
            form = layout.form[kind]
        if form == "nothing":
            return None
        try:
            region = FORMS[form](_numbers(row[layout.box]), size)
        except ValueError as error:
            raise ValueError(f"{layout.box} {_short(row[layout.box])}: {error}") from None
        if region is None:
            return None
        place, bounds = f"{layout.box} {_short(row[layout.box])}", bounds_of(region)
        if not bounds.overlaps(Box(0, 0, *size)):
            raise ValueError(f"{place} lies outside of {size[0]}x{size[1]} pixels")
        if pixel_in(region, size) is None:
            hint = (
                "; are its numbers shares of the sides?" if max(bounds.x1, bounds.y1) <= 1 else ""
            )
            raise ValueError(
                f"{place} holds no pixel of {size[0]}x{size[1]}: no click can hit it{hint}"
            )
        return region

    def _traits(self, row: Mapping[str, Any], file_trait: str) -> dict[str, tuple[str, ...]]:
        """Return trait -> values, by which the score of a row is reported."""
        layout = self._layout
        keys = {**layout.traits, **{t: key for t, key in layout.optional.items() if key in row}}
        traits: dict[str, tuple[str, ...]] = {
            trait: (_label(row, key),) for trait, key in keys.items()
        }
        for trait, key in layout.lists.items():
            if not isinstance(row[key], list) or not all(
                isinstance(label, str) for label in row[key]
            ):
                raise ValueError(f"{key} must be a list of texts, got {_short(row[key])}")
            traits[trait] = tuple(dict.fromkeys(row[key]))
        if layout.file_trait:
            traits[layout.file_trait] = (file_trait,)
        if layout.groups:
            traits["group"] = (layout.groups.get(traits["platform"][0], "unknown"),)
        if self._classes:
            traits["category"] = self._classes.get(str(row.get("id")), ("unclassified",))
        if ELEMENTS in traits and "group" in traits:
            [group], [element] = traits["group"], traits[ELEMENTS]
            traits["group, element"] = (f"{group}, {element}",)
        return traits


def _classes(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each id with its classes. Raises UserError for a file of another form."""
    if not path.is_file():
        return
    try:
        classified = json.loads(read_text(path))["classified"]
        pairs = [
            (str(entry["id"]), name) for name, entries in classified.items() for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} must be {{'classified': {{name: [{{'id': ...}}, ...]}}}} ({error!r}); copy it "
            "again, or remove it: scores are then not reported by category"
        ) from None
    by_id: dict[str, dict[str, None]] = {}
    for key, name in pairs:
        by_id.setdefault(key, {})[name] = None
    yield from ((key, tuple(names)) for key, names in by_id.items())


def _text(row: Mapping[str, Any], key: str) -> str:
    """Return a text of a row. Raises ValueError if it is missing or empty."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text, got {_short(value)}")
    return value


def _label(row: Mapping[str, Any], key: str) -> str:
    """Return the value of a trait; an empty one is `unknown`."""
    if not isinstance(row[key], str):
        raise ValueError(f"{key} must be a text, got {_short(row[key])}")  # noqa: TRY004 - a row's mistake
    return row[key].strip() or "unknown"


def _numbers(value: Any) -> Sequence[float]:
    """Return a list of finite numbers. Raises ValueError for anything else."""
    numbers = value if isinstance(value, list) else []
    if not numbers or not all(
        isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        for number in numbers
    ):
        raise ValueError("must be a list of numbers")
    return [float(number) for number in numbers]


def _short(value: Any) -> str:
    """Return a value for a message, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
