"""Rows for a verifier, from any grounding set: pictures with a mark, and whether it is in the right place.

make_rows        writes the rows of a set: `dart model verifier-rows`
reach_of         how far the crop around a mark reaches, by the screenshots of a set
read_rows        reads rows as items; an item whose mark is wrong has no region

A folder has rows.json [{"img_filename", "instruction", "correct", "kind", "source", "point", "size"}], the
pictures in images/, and verifier.json with the settings by which the pictures were made.

Each item gives two right marks, at the centre of its region and elsewhere in it, and two wrong ones: on
another element of the same screenshot, preferably a near one, and just beside the region. On a screenshot
with a single element both wrong marks are beside it. The original method left near neighbours out and marked
arbitrary places.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from random import Random

from pydantic import Field, TypeAdapter, ValidationError

from bus.errors import EngineError, UserError
from dart_cli.config.model_folder import VERIFIER
from dart_cli.config.rules.machine import refuse_filled
from dart_cli.grounding.items import Box, Item, Picture, Point
from dart_cli.grounding.reader import read_set
from dart_cli.policy.verifier import VerifierSpec, as_png, mark_place, open_screenshot
from dart_cli.runtime.work_folder import StoredModel
from dart_cli.tune.examples import visible_box
from envs.contract.blobs import content_hash

ROWS, IMAGES = "rows.json", "images"

BESIDE = (1.0, 3.0)
"""Least and greatest distance of a mark beside a region from its edge, in half sides of the region."""
LEAST = 6.0
"""Least length of a half side in this unit, pixels."""
TRIES = 64
"""Random places that are tried before a mark is left out."""


class Row(StoredModel):
    """One picture and its answer, as it is stored."""

    img_filename: str
    instruction: str = Field(min_length=1)
    correct: bool
    kind: str  # centre, inside, neighbour, beside
    source: str  # id of the item that it was made from
    point: tuple[float, float]  # pixels of the item's screenshot
    size: tuple[int, int]  # of the picture


@dataclass(frozen=True)
class VerifierRows:
    """The rows of a folder, as items."""

    items: list[Item]
    digest: str


def reach_of(data: Path, layout: str = "") -> int:
    """Return a sixth of the shorter side of the set's median screenshot, pixels. Raises UserError.

    The crop is then a third of the screen, in which the mark is large. With whole screens, a verifier learned
    nothing in the same time (docs/pointing.md).
    """
    sides = sorted(min(item.size) for item in read_set(data, layout).items)
    return max(8, round(sides[len(sides) // 2] / 6)) if sides else 8


def make_rows(
    data: Path,
    out: Path,
    spec: VerifierSpec,
    *,
    layout: str = "",
    seed: int = 0,
    limit: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    """Write the rows of a grounding set, and return their number by kind. Raises UserError."""
    refuse_filled(out)
    grounding_set = read_set(data, layout)
    items = [item for item in grounding_set.items if item.region is not None]
    if not items:
        raise UserError(f"{data} has no items that name a place; is it the whole set?")
    items = items[:limit] if limit else items
    by_screenshot: dict[Picture, list[Item]] = defaultdict(list)
    for item in items:
        by_screenshot[item.image].append(item)
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for item in items:
        rng = Random(f"{seed}/{item.id}")  # noqa: S311 - repeatable on purpose
        rows += _rows_of(item, by_screenshot[item.image], out, spec, rng)
        advance(1)
    spec.write(out)
    content = json.dumps([row.model_dump() for row in rows], indent=1)
    (out / ROWS).write_text(content + "\n", encoding="utf-8")
    return {
        kind: sum(row.kind == kind for row in rows) for kind in dict.fromkeys(r.kind for r in rows)
    }


def marks(item: Item, others: Sequence[Item], rng: Random) -> list[tuple[str, Point]]:
    """Return the (kind, place) of an item's marks; `others` are the items of the same screenshot."""
    assert item.region is not None
    box = visible_box(item)
    centre = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    # 1. Right marks
    right: list[tuple[str, Point]] = [("centre", centre)] if item.region.contains(centre) else []

    def place_in_box() -> Point:
        return rng.uniform(box.x0, box.x1), rng.uniform(box.y0, box.y1)

    inside = _first_fit(place_in_box, item, is_inside=True)
    right += [("inside", inside)] if inside else []
    # 2. As many wrong ones
    wrong: list[tuple[str, Point]] = []
    centres = [_centre(other) for other in others if other.region is not None]
    near = sorted(
        {place for place in centres if not item.region.contains(place)},
        key=lambda place: (math.dist(place, centre), place),
    )
    if near:  # the nearest most often
        wrong.append(("neighbour", near[min(int(rng.expovariate(1.0)), len(near) - 1)]))
    while len(wrong) < len(right):
        place = _first_fit(lambda: _near_edge(box, item.size, rng), item, is_inside=False)
        if place is None:  # the region is the whole screen
            break
        wrong.append(("beside", place))
    return [*right, *wrong]


def _rows_of(
    item: Item, others: Sequence[Item], out: Path, spec: VerifierSpec, rng: Random
) -> list[Row]:
    """Write the pictures of an item's marks, and return their rows. Raises UserError."""
    try:
        screenshot = open_screenshot(item.image.read_bytes())
    except (OSError, EngineError) as error:
        raise UserError(f"{item.id}: {error}; copy the set again") from None
    rows = []
    for kind, (x, y) in marks(item, others, rng):
        picture = mark_place(screenshot, x, y, spec)
        encoded = as_png(picture)
        name = f"{content_hash(encoded)}.png"
        (out / IMAGES / name).write_bytes(encoded)
        rows.append(
            Row(
                img_filename=name,
                instruction=item.instruction,
                correct=kind in ("centre", "inside"),
                kind=kind,
                source=item.id,
                point=(round(x, 1), round(y, 1)),
                size=picture.size,
            )
        )
    return rows


def _centre(item: Item) -> Point:
    box = visible_box(item)
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def _first_fit(draw: Callable[[], Point], item: Item, *, is_inside: bool) -> Point | None:
    """Return the first random place on the screenshot inside the region, or outside; None after TRIES."""
    assert item.region is not None
    wide, high = item.size
    for _ in range(TRIES):
        x, y = draw()
        if 0 <= x < wide and 0 <= y < high and item.region.contains((x, y)) == is_inside:
            return x, y
    return None


def _near_edge(box: Box, size: tuple[int, int], rng: Random) -> Point:
    """Return a random place beside one edge of the box."""
    half = max((box.x1 - box.x0) / 2, LEAST), max((box.y1 - box.y0) / 2, LEAST)
    away = rng.uniform(*BESIDE)
    x, y = rng.uniform(box.x0, box.x1), rng.uniform(box.y0, box.y1)
    if rng.random() < 0.5:
        x = rng.choice((box.x0 - away * half[0], box.x1 + away * half[0]))
    else:
        y = rng.choice((box.y0 - away * half[1], box.y1 + away * half[1]))
    return min(max(x, 0.0), size[0] - 1.0), min(max(y, 0.0), size[1] - 1.0)


def read_rows(folder: Path) -> VerifierRows:
    """Return the rows of a folder. Raises UserError for a folder without rows or with malformed ones."""
    path = folder / ROWS
    if not (folder / VERIFIER).is_file() or not path.is_file():
        raise UserError(
            f"{folder} has no rows for a verifier ({ROWS}, {VERIFIER}); make them with "
            "`dart model verifier-rows SET OUT`"
        )
    content = path.read_bytes()
    try:
        rows = TypeAdapter(list[Row]).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}[{place}]: {first['msg']}; make the rows again") from None
    if not rows:
        raise UserError(f"{path} has no rows; make them again")
    items = []
    for index, row in enumerate(rows):
        name = PurePosixPath(row.img_filename)
        image = folder / IMAGES / name
        if name.is_absolute() or ".." in name.parts or not image.is_file():
            raise UserError(
                f"{path}[{index}]: there is no picture {row.img_filename}; make the rows again"
            )
        region = Box(0, 0, *row.size) if row.correct else None
        items.append(
            Item(
                f"{ROWS}[{index}]",
                Picture(image),
                row.size,
                row.instruction,
                region,
                {"kind": (row.kind,)},
            )
        )
    digest = hashlib.blake2b(content + (folder / VERIFIER).read_bytes(), digest_size=16).hexdigest()
    return VerifierRows(items, digest)
