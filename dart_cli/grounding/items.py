"""What is asked of one screenshot, and where the answer is.

Item           an instruction about a screenshot, and the region that it names
Box, Polygon   regions, in pixels of the screenshot; their edges belong to them
pixel_in       the pixel that is the answer to an item, if any is
Answer         what a model said about one item: candidates, best first
Picture        where a screenshot is, a file or a row of a Parquet file: gives its bytes
parquet_rows   the other columns of a Parquet file, as rows
pictures_digest  what the pictures of items show
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field

from bus.errors import UserError, first_line
from dart_cli.data.exchange.parquet_schema import pyarrow_modules
from dart_cli.runtime.work_folder import StoredModel
from envs.contract.blobs import content_hash

IMAGE = "image"
"""Column of a Parquet file with the pictures, as `datasets` writes them: {"bytes", "path"}."""

_GROUPS = 2  # row groups whose pictures are kept
_read: OrderedDict[tuple[Path, int], list[bytes]] = OrderedDict()
_lock = threading.Lock()  # of _read: threads that want the same group wait until one has read it


@dataclass(frozen=True)
class Picture:
    """One encoded screenshot."""

    path: Path
    row: int | None = None  # of a Parquet file, which `path` then is

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"{self.path}[{self.row}]"

    @property
    def name(self) -> str:
        """For messages."""
        return self.path.name if self.row is None else f"{self.path.name}[{self.row}]"

    def read_bytes(self) -> bytes:
        """Return the encoded picture. Raises OSError."""
        if self.row is None:
            return self.path.read_bytes()
        first, group = _group_of(self.path, self.row)
        with _lock:
            pictures = _read.get((self.path, group))
            if pictures is None:
                pictures = _read[self.path, group] = _pictures(self.path, group)
            _read.move_to_end((self.path, group))
            while len(_read) > _GROUPS:
                _read.popitem(last=False)
        return pictures[self.row - first]


def pictures_digest(items: Iterable[Item]) -> str:
    """Return a digest of what the pictures of some items show, each read once. Raises OSError.

    A picture that is replaced by another one of its name and size is another picture.
    """
    digest = hashlib.blake2b(digest_size=16)
    for picture in dict.fromkeys(item.image for item in items):
        digest.update(content_hash(picture.read_bytes()).encode())
    return digest.hexdigest()


Point = tuple[float, float]
"""x and y, pixels of the screenshot."""


@dataclass(frozen=True)
class Box:
    """A rectangle, edges included."""

    x0: float
    y0: float
    x1: float
    y1: float

    @classmethod
    def around(cls, point: Point, reach: float) -> Box:
        """Return the square that ends `reach` pixels from a point on each side."""
        x, y = point
        return cls(x - reach, y - reach, x + reach, y + reach)

    @property
    def corners(self) -> list[Point]:
        """All four, in the order of a walk along the edges."""
        return [(self.x0, self.y0), (self.x1, self.y0), (self.x1, self.y1), (self.x0, self.y1)]

    def contains(self, point: Point) -> bool:
        """Whether the point is in it or on an edge."""
        x, y = point
        return self.x0 <= x <= self.x1 and self.y0 <= y <= self.y1

    def spans(self, y: int) -> list[tuple[float, float]]:
        """Return from where to where the line at `y` is in it."""
        return [(self.x0, self.x1)] if self.y0 <= y <= self.y1 else []

    def overlaps(self, other: Box) -> bool:
        """Whether they have a point in common."""
        return (
            self.x0 <= other.x1
            and other.x0 <= self.x1
            and self.y0 <= other.y1
            and other.y0 <= self.y1
        )


@dataclass(frozen=True)
class Polygon:
    """The area within a closed line, which belongs to it."""

    corners: tuple[Point, ...]  # at least three

    def contains(self, point: Point) -> bool:
        """Whether the point is in it (even-odd rule) or on its line."""
        x, y = point
        inside = False
        for a, b in self._sides():
            if _turn(a, b, point) == 0 and _within(a, b, point):
                return True
            if (a[1] > y) != (b[1] > y):
                inside ^= x < a[0] + (y - a[1]) * (b[0] - a[0]) / (b[1] - a[1])
        return inside

    def spans(self, y: int) -> list[tuple[float, float]]:
        """Return from where to where the line at `y` is in it; a corner that it touches is a span, too."""
        level = [sorted((a[0], b[0])) for a, b in self._sides() if a[1] == b[1] == y]
        corners = [(x, x) for x, at in self.corners if at == y]
        crossed = sorted(
            a[0] + (y - a[1]) * (b[0] - a[0]) / (b[1] - a[1])
            for a, b in self._sides()
            if (a[1] > y) != (b[1] > y)
        )
        between = zip(crossed[::2], crossed[1::2], strict=True)
        return [*between, *((left, right) for left, right in level), *corners]

    def overlaps(self, box: Box) -> bool:
        """Whether they have a point in common."""
        if any(map(self.contains, box.corners)) or any(map(box.contains, self.corners)):
            return True
        edges = list(pairwise([*box.corners, box.corners[0]]))
        return any(_cross(*side, *edge) for side in self._sides() for edge in edges)

    def _sides(self) -> list[tuple[Point, Point]]:
        return list(pairwise([*self.corners, self.corners[0]]))


Region = Box | Polygon


def bounds_of(region: Region) -> Box:
    """Return the smallest box that holds the region."""
    xs, ys = zip(*region.corners, strict=True)
    return Box(min(xs), min(ys), max(xs), max(ys))


def pixel_in(region: Region, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the pixel of a screen of `size` that is in the region, nearest to its middle; None without one."""
    bounds, (wide, high) = bounds_of(region), size
    left, right = max(bounds.x0, 0.0), min(bounds.x1, float(wide))
    top, bottom = max(bounds.y0, 0.0), min(bounds.y1, float(high))
    middle = (
        min(math.floor((left + right) / 2), wide - 1),
        min(math.floor((top + bottom) / 2), high - 1),
    )
    best: tuple[float, tuple[int, int]] | None = None
    rows = range(math.ceil(top), min(math.floor(bottom), high - 1) + 1)
    for y in sorted(rows, key=lambda row: abs(row - middle[1])):
        if best and abs(y - middle[1]) >= best[0]:
            break
        for first, last in region.spans(y):
            begin, end = math.ceil(max(first, left)), math.floor(min(last, right, wide - 1))
            pixel = min(max(middle[0], begin), end), y
            if begin <= end and region.contains(pixel):
                each = math.dist(pixel, middle), pixel
                best = min(best, each) if best else each
    return best[1] if best else None


def share_of(region: Region, size: tuple[int, int]) -> float:
    """Return the region's share of a screen of `size` pixels: how often a click anywhere hits it."""
    corners = region.corners
    turns = pairwise([*corners, corners[0]])
    area: float = abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in turns)) / 2
    return min(1.0, area / (size[0] * size[1]))


@dataclass(frozen=True)
class Item:
    """One instruction about one screenshot."""

    id: str  # FILE[INDEX] of its row, counted from 0
    image: Picture
    size: tuple[int, int]  # width and height of the screenshot, pixels
    instruction: str
    region: Region | None  # what is meant; None where nothing on the screen is: to be refused
    traits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What scores are told by: platform, group, application, ... -> its values, mostly one."""


class Answer(StoredModel):
    """What a model said about one item."""

    id: str  # of the item
    points: list[Point | None]  # candidates, best first; None for one without a point
    scores: list[float] = Field(
        default_factory=list
    )  # of the candidates, where the model gives some
    texts: list[str] = Field(
        default_factory=list
    )  # completions of the candidates, where it writes some
    judged: list[float] = Field(
        default_factory=list
    )  # of a verifier, for each candidate that it looked at, in the model's order
    picked: int = 0  # place in the model's order of the candidate that a verifier put first
    refused: bool = False  # it says that nothing on the screen is meant
    problem: str = ""  # why the first candidate has no point

    def unverified(self) -> Answer:
        """Return this answer with its candidates in the model's own order."""
        if not self.picked:
            return self
        first, *others = self.points
        own = [*others[: self.picked], first, *others[self.picked :]]
        return self.model_copy(update={"points": own, "judged": [], "picked": 0})


def _turn(a: Point, b: Point, c: Point) -> float:
    """Positive where a, b, c turn clockwise on a screen, 0 where they are on a line."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _within(a: Point, b: Point, point: Point) -> bool:
    """Whether a point of the line through a and b is between them."""
    return all(min(p, q) <= at <= max(p, q) for p, q, at in zip(a, b, point, strict=True))


def _cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Whether the line from a to b crosses that from c to d, other than at an end."""
    return _turn(a, b, c) * _turn(a, b, d) < 0 and _turn(c, d, a) * _turn(c, d, b) < 0


# --- Parquet files -----------------------------------------------------------------------------


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """All columns but the pictures. Raises UserError, and MissingPartError without pyarrow."""
    pa, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name != IMAGE]
            if len(names) == len(file.schema_arrow.names):
                raise UserError(
                    f"{path} has no column {IMAGE!r} with the pictures; is it the whole set?"
                )
            rows: list[dict[str, Any]] = file.read(columns=names).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet: {first_line(error)}; copy it again"
        ) from None
    return rows


def _group_of(path: Path, row: int) -> tuple[int, int]:
    """(first row, number) of the row group that holds a row."""
    first = 0
    for group, count in enumerate(_counts(path)):
        if row < first + count:
            return first, group
        first += count
    raise OSError(f"{path} has no row {row}")


def _counts(path: Path) -> list[int]:
    _, pq = pyarrow_modules()
    with pq.ParquetFile(path) as file:
        return [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]


def _pictures(path: Path, group: int) -> list[bytes]:
    pa, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            column = file.read_row_group(group, columns=[IMAGE]).column(IMAGE).to_pylist()
    except pa.ArrowException as error:
        raise OSError(f"{path} cannot be read: {error}") from None
    return [(each or {}).get("bytes") or b"" for each in column]
