"""The layouts of published grounding sets: their files, their keys, and the form of their boxes.

    LAYOUTS      one entry for each layout; no other module has anything about a particular set
    Layout       the files and keys of one published set
    find_layout  returns the layout of a folder
    FORMS        the forms of a box, with functions that return the region in pixels

The form of a box is never guessed from its numbers: [10, 20, 30, 40] is a box in every form, and a different
one in each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bus.error_texts import did_you_mean
from bus.errors import UserError
from dart_cli.grounding.items import Box, Point, Polygon, Region, parquet_rows
from envs.tools.textfiles import read_text, why

Form = Literal["xywh", "xyxy", "corners", "shares", "shares_or_pixels", "polygon", "nothing"]


@dataclass(frozen=True)
class Layout:
    """One published layout. A row must have all `keys`; the keys in `optional` may be missing."""

    name: str  # for --layout
    title: str
    files: Mapping[str, str]
    """Annotation files (globs below the folder) -> the value of `file_trait` of their rows."""
    images: tuple[str, ...]
    """Folders in which a picture is looked for; {platform} is the row's platform. Empty: the pictures are in
    `files`."""
    image: str = "img_filename"
    instruction: str = "instruction"
    box: str = "bbox"
    form: Form | Mapping[str, Form] = "xywh"  # a mapping is by the value of `form_key`
    form_key: str = ""
    size: str = ""  # key of [width, height] in pixels, which the picture must match
    traits: Mapping[str, str] = field(default_factory=dict)  # trait -> key of a text
    optional: Mapping[str, str] = field(default_factory=dict)  # likewise, if a row has the key
    lists: Mapping[str, str] = field(default_factory=dict)  # trait -> key of a list of texts
    file_trait: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)  # value of trait `platform` -> `group`
    classes: str = ""  # file {"classified": {value: [{"id": ...}, ...]}} of trait `category`
    without: str = ""  # one of `files` that repeats the others; it is read only if it is alone

    def paths(self, folder: Path) -> dict[Path, str]:
        """Return the annotation files of the folder, in order, each with the `file_trait` of its rows."""
        paths = {
            path: trait for glob, trait in self.files.items() for path in _matches(folder, glob)
        }
        whole = folder / self.without if self.without else None
        if whole in paths and len(paths) > 1:
            paths.pop(whole)
        return paths

    @property
    def keys(self) -> set[str]:
        """The keys that every row must have."""
        own = (self.image, self.instruction, self.box, self.form_key, self.size)
        return {key for key in (*own, *self.traits.values(), *self.lists.values()) if key}


OURS = ("application", "environment", "size", "query")
"""Keys that sets made by dart have in addition to ScreenSpot's; `query` is the kind of an exploration's
row."""

_PARTS = ("desktop", "mobile", "web")
_SCREENSPOT_V2 = {f"screenspot_{part}_v2.json": part for part in _PARTS}
_OSWORLD_G: dict[str, Any] = {
    "images": ("images",),
    "image": "image_path",
    "box": "box_coordinates",
    "form": {"bbox": "xywh", "polygon": "polygon", "refusal": "nothing"},
    "form_key": "box_type",
    "size": "image_size",
    "lists": {"type": "GUI_types"},
    "classes": "classification_result.json",
}

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="screenspot",
        title="ScreenSpot",
        files={f"screenspot_{part}.json": part for part in _PARTS},
        images=("screenspot_imgs", "images", "."),
        form="xywh",
        traits={"platform": "data_source", "element": "data_type"},
        optional={name: name for name in OURS},
        file_trait="group",
    ),
    Layout(
        name="screenspot-parquet",
        title="ScreenSpot",
        files={"data/test-*.parquet": ""},
        images=(),
        image="file_name",
        form="shares",
        traits={"platform": "data_source", "element": "data_type"},
        optional={name: name for name in OURS},
        groups={
            **dict.fromkeys(("windows", "macos"), "desktop"),
            **dict.fromkeys(("ios", "android"), "mobile"),
            **dict.fromkeys(("tool", "shop", "gitlab", "forum"), "web"),
        },
    ),
    Layout(
        name="screenspot-v2",
        title="ScreenSpot-v2",
        files=_SCREENSPOT_V2,
        images=("screenspotv2_image", "images", "."),
        form="xywh",
        traits={"platform": "data_source", "element": "data_type"},
        file_trait="group",
    ),
    Layout(
        name="screenspot-v2-new",
        title="ScreenSpot-v2 as GUI-Actor's release has it",
        files=_SCREENSPOT_V2,
        images=("screenspotv2_image", "images", "."),
        form="xyxy",
        size="img_size",
        traits={"platform": "platform", "group": "group", "element": "ui_type"},
    ),
    Layout(
        name="screenspot-pro",
        title="ScreenSpot-Pro",
        files={"annotations/*.json": ""},
        images=("images",),
        form="xyxy",
        size="img_size",
        traits={
            "platform": "platform",
            "group": "group",
            "application": "application",
            "element": "ui_type",
        },
        without="annotations/all.json",
    ),
    Layout(name="osworld-g", title="OSWorld-G", files={"OSWorld-G.json": ""}, **_OSWORLD_G),
    Layout(
        name="osworld-g-refined",
        title="OSWorld-G, refined instructions",
        files={"OSWorld-G_refined.json": ""},
        **_OSWORLD_G,
    ),
    Layout(
        name="ui-vision",
        title="UI-Vision, element grounding",
        files={
            f"annotations/element_grounding/element_grounding_{part}.json": part
            for part in ("basic", "functional", "spatial")
        },
        images=("images",),
        image="image_path",
        instruction="prompt_to_evaluate",
        form="corners",
        size="image_size",
        traits={"application": "platform", "element": "element_type"},
        file_trait="category",
    ),
    Layout(
        name="mmbench-gui-l2",
        title="MMBench-GUI L2",
        files={"L2_annotations.json": ""},
        images=("offline_images/{platform}",),
        image="image_path",
        form="shares_or_pixels",
        traits={
            "platform": "platform",
            "application": "app_name",
            "element": "data_type",
            "category": "grounding_type",
        },
    ),
)


def find_layout(folder: Path, name: str = "") -> Layout:
    """Return the layout called `name`; without a name, the one whose files the folder has.

    Raises UserError if there is no such layout, or if none or several fit the folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name the folder of a grounding set")
    if name:
        by_name = {layout.name: layout for layout in LAYOUTS}
        if name not in by_name:
            hint = did_you_mean(name, by_name)
            raise UserError(
                f"--layout {name}: no such layout{hint}; there are {', '.join(by_name)}"
            )
        if not by_name[name].paths(folder):
            raise UserError(f"{folder} has no {_files(by_name[name])}, as --layout {name} needs")
        return by_name[name]
    fitting = [layout for layout in LAYOUTS if layout.paths(folder)]
    if len(fitting) > 1:
        by_keys = [layout for layout in fitting if layout.keys <= _first_keys(layout, folder)]
        fitting = by_keys or fitting
    if not fitting:
        all_files = "; ".join(f"{layout.name}: {_files(layout)}" for layout in LAYOUTS)
        raise UserError(f"{folder} has the files of no known set ({all_files})")
    if len(fitting) > 1:
        names = ", ".join(layout.name for layout in fitting)
        raise UserError(f"{folder} may be any of {names}; choose one with --layout NAME")
    return fitting[0]


def _files(layout: Layout) -> str:
    return " or ".join(layout.files)


def _matches(folder: Path, glob: str) -> list[Path]:
    """Return the files below a folder that match a glob, sorted."""
    return sorted(path for path in folder.glob(glob) if path.is_file())


def _first_keys(layout: Layout, folder: Path) -> set[str]:
    """Return the keys of the first row; none if it is malformed, which the reader reports later."""
    rows = read_rows(next(iter(layout.paths(folder))))
    return set(rows[0]) if rows and isinstance(rows[0], dict) else set()


def read_rows(path: Path) -> list[Any]:
    """Return the rows of an annotation file. Raises UserError if it has no list of rows."""
    if path.suffix == ".parquet":
        return parquet_rows(path)
    try:
        rows = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} {why(error, 'copy it again')}") from None
    if not isinstance(rows, list):
        raise UserError(
            f"{path} must hold a list of rows; copy it again, or choose another --layout"
        )
    return rows


# --- forms of a box --------------------------------------------------------------------------


def _xywh(numbers: Sequence[float], _: tuple[int, int]) -> Region:
    """Return the region of left, top, width and height in pixels."""
    x, y, width, height = _four(numbers)
    return _ordered(x, y, x + width, y + height, "width and height must be >= 0")


def _xyxy(numbers: Sequence[float], _: tuple[int, int]) -> Region:
    """Return the region of left, top, right and bottom in pixels."""
    return _ordered(*_four(numbers), "left must be <= right, top <= bottom")


def _corners(numbers: Sequence[float], _: tuple[int, int]) -> Region:
    """Return the region of two opposite corners, in any order, in pixels."""
    x0, y0, x1, y1 = _four(numbers)
    return Box(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))


def _shares(numbers: Sequence[float], size: tuple[int, int]) -> Region:
    """Return the region of left, top, right and bottom as shares of the sides."""
    x0, y0, x1, y1 = _four(numbers)
    if not all(0 <= share <= 1 for share in numbers):
        raise ValueError("must be shares of the sides, in 0 to 1")
    wide, high = size
    return _ordered(
        x0 * wide, y0 * high, x1 * wide, y1 * high, "left must be <= right, top <= bottom"
    )


def _shares_or_pixels(numbers: Sequence[float], size: tuple[int, int]) -> Region:
    """Return the region of left, top, right and bottom.

    They are shares of the sides if all are in 0 to 1, otherwise pixels; -1 means 0. The evaluator of the set reads its rows like this.
    """
    four = _four(numbers)
    wide, high = size if all(0 <= number <= 1 for number in four) else (1, 1)
    x0, y0, x1, y1 = (0.0 if number == -1 else number for number in four)
    return _ordered(
        x0 * wide, y0 * high, x1 * wide, y1 * high, "left must be <= right, top <= bottom"
    )


def _polygon(numbers: Sequence[float], _: tuple[int, int]) -> Region:
    """Return the region of x and y of each corner in turn, in pixels."""
    if len(numbers) < 6 or len(numbers) % 2:
        raise ValueError(f"must be x and y of three corners or more, has {len(numbers)} numbers")
    corners: list[Point] = list(zip(numbers[::2], numbers[1::2], strict=True))
    return Polygon(tuple(corners))


def _nothing(_: Sequence[float], __: tuple[int, int]) -> None:
    """Return None: nothing on the screen is meant, and the numbers mean nothing."""


FORMS: Mapping[Form, Callable[[Sequence[float], tuple[int, int]], Region | None]] = {
    "xywh": _xywh,
    "xyxy": _xyxy,
    "corners": _corners,
    "shares": _shares,
    "shares_or_pixels": _shares_or_pixels,
    "polygon": _polygon,
    "nothing": _nothing,
}
"""For each form, a function from a row's numbers and the screenshot's (width, height); it raises
ValueError."""


def _four(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Return four numbers. Raises ValueError for any other count."""
    if len(numbers) != 4:
        raise ValueError(f"must have four numbers, has {len(numbers)}")
    a, b, c, d = numbers
    return a, b, c, d


def _ordered(x0: float, y0: float, x1: float, y1: float, rule: str) -> Box:
    """Return a box. Raises ValueError with `rule` if its corners are in the wrong order."""
    if x1 < x0 or y1 < y0:
        raise ValueError(rule)
    return Box(x0, y0, x1, y1)
