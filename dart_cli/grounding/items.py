"""Items of grounding sets: instructions about screenshots, their regions, and the answers to them.

Item             an instruction about a screenshot, and the region that it names
Box, Polygon     regions in pixels of the screenshot; their edges belong to them
pixel_in         the pixel of a region that is nearest to its middle
Answer           a model's answer to one item: candidates, best first
Picture          a screenshot in a file, or in a row of a Parquet file
parquet_rows     the rows of a Parquet file, without its pictures
pictures_digest  a digest of the pictures of items
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
"""Column of a Parquet file that has the pictures, as `datasets` writes them: {"bytes", "path"}."""

_GROUPS = 2  # row groups whose pictures stay in memory
_read: OrderedDict[tuple[Path, int], list[bytes]] = OrderedDict()
_lock = threading.Lock()  # of _read: threads that need the same group wait until one has read it


@dataclass(frozen=True)
class Picture:
    """One encoded screenshot."""

    path: Path
    row: int | None = None  # in the Parquet file at `path`; None if `path` is the picture

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"{self.path}[{self.row}]"

    @property
    def name(self) -> str:
        """The name of the file, with the row, for messages."""
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
    """Return a digest of the content of the items' pictures, each of which is read once. Raises OSError.

    It differs if a picture is replaced by another one of the same name and size.
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
        """The four corners, in the order of a walk along the edges."""
        return [(self.x0, self.y0), (self.x1, self.y0), (self.x1, self.y1), (self.x0, self.y1)]

    def contains(self, point: Point) -> bool:
        """Return True if the point is in the box or on an edge."""
        x, y = point
        return self.x0 <= x <= self.x1 and self.y0 <= y <= self.y1

    def spans(self, y: int) -> list[tuple[float, float]]:
        """Return the intervals of x in which the line at `y` is in the box."""
        return [(self.x0, self.x1)] if self.y0 <= y <= self.y1 else []

    def overlaps(self, other: Box) -> bool:
        """Return True if the two boxes have a point in common."""
        return (
            self.x0 <= other.x1
            and other.x0 <= self.x1
            and self.y0 <= other.y1
            and other.y0 <= self.y1
        )


@dataclass(frozen=True)
class Polygon:
    """The area inside a closed line; the line belongs to it."""

    corners: tuple[Point, ...]  # at least three

    def contains(self, point: Point) -> bool:
        """Return True if the point is inside (even-odd rule) or on the line."""
        x, y = point
        inside = False
        for a, b in self._sides():
            if _turn(a, b, point) == 0 and _within(a, b, point):
                return True
            if (a[1] > y) != (b[1] > y):
                inside ^= x < a[0] + (y - a[1]) * (b[0] - a[0]) / (b[1] - a[1])
        return inside

    def spans(self, y: int) -> list[tuple[float, float]]:
        """Return the intervals of x in which the line at `y` is inside; a touched corner is one, too."""
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
        """Return True if the polygon and the box have a point in common."""
        if any(map(self.contains, box.corners)) or any(map(box.contains, self.corners)):
            return True
        edges = list(pairwise([*box.corners, box.corners[0]]))
        return any(_cross(*side, *edge) for side in self._sides() for edge in edges)

    def _sides(self) -> list[tuple[Point, Point]]:
        return list(pairwise([*self.corners, self.corners[0]]))


Region = Box | Polygon


def bounds_of(region: Region) -> Box:
    """Return the smallest box that contains the region."""
    xs, ys = zip(*region.corners, strict=True)
    return Box(min(xs), min(ys), max(xs), max(ys))


def pixel_in(region: Region, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the pixel of the region nearest to its middle, on a screen of `size`; None without one."""
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
                candidate = math.dist(pixel, middle), pixel
                best = min(best, candidate) if best else candidate
    return best[1] if best else None


def share_of(region: Region, size: tuple[int, int]) -> float:
    """Return the region's share of a screen of `size` pixels: the probability that a random click hits it."""
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
    region: Region | None  # what is meant; None if nothing on the screen is: one should refuse
    traits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Traits by which scores are reported, such as platform, group, application -> values, mostly one."""


class Answer(StoredModel):
    """A model's answer to one item."""

    id: str  # of the item
    points: list[Point | None]  # candidates, best first; None for one without a point
    scores: list[float] = Field(default_factory=list)
    """Scores of the candidates, if the model gives some."""
    texts: list[str] = Field(default_factory=list)
    """Completions of the candidates, if the model writes some."""
    verifier_scores: list[float] = Field(default_factory=list)
    """Scores of a verifier for the candidates that it looked at, in the model's order."""
    picked: int = 0  # place in the model's order of the candidate that a verifier put first
    refused: bool = False  # it says that nothing on the screen is meant
    problem: str = ""  # why the first candidate has no point

    def unverified(self) -> Answer:
        """Return this answer with its candidates in the model's order."""
        if not self.picked:
            return self
        first, *others = self.points
        own = [*others[: self.picked], first, *others[self.picked :]]
        return self.model_copy(update={"points": own, "verifier_scores": [], "picked": 0})


def _turn(a: Point, b: Point, c: Point) -> float:
    """Return a positive number if a, b, c turn clockwise on a screen, and 0 if they are on a line."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _within(a: Point, b: Point, point: Point) -> bool:
    """Return True if a point on the line through a and b is between them."""
    return all(min(p, q) <= at <= max(p, q) for p, q, at in zip(a, b, point, strict=True))


def _cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return True if the line from a to b crosses the one from c to d, not only at an end."""
    return _turn(a, b, c) * _turn(a, b, d) < 0 and _turn(c, d, a) * _turn(c, d, b) < 0


# --- Parquet files -----------------------------------------------------------------------------


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file without its pictures.

    Raises UserError for a file of another form, and MissingPartError without pyarrow.
    """
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
    """Return the first row and the number of the row group that has a row.

    Raises OSError if there is none.
    """
    first = 0
    for group, count in enumerate(_counts(path)):
        if row < first + count:
            return first, group
        first += count
    raise OSError(f"{path} has no row {row}")


def _counts(path: Path) -> list[int]:
    """Return the number of rows in each row group of a Parquet file."""
    _, pq = pyarrow_modules()
    with pq.ParquetFile(path) as file:
        return [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]


def _pictures(path: Path, group: int) -> list[bytes]:
    """Return the encoded pictures of a row group. Raises OSError."""
    pa, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            column = file.read_row_group(group, columns=[IMAGE]).column(IMAGE).to_pylist()
    except pa.ArrowException as error:
        raise OSError(f"{path} cannot be read: {error}") from None
    return [(cell or {}).get("bytes") or b"" for cell in column]
