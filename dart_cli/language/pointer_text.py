"""Numbers of a text <-> pointers among the tokens; without torch.

    Cells          the cells of a screenshot, and which of the model's numbers are in each
    jitter         where in its cell a sampled pointer clicks
    split_text     a text -> what stands between its points, and the points
    PointerText    tokens of completions <-> their texts, for one policy and action parser

What leaves a rollout worker has numbers where the model pointed, and what a model that points is shown has
pointers where a text has numbers: environments, action parsers, store and pages know only numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bus.messages import SampledTokens
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import PointParser, WrittenPoint
from dart_cli.language.pointer_tokens import PointerTokens

Numbers = tuple[int, int]
"""x and y, as the model writes them."""


@dataclass(frozen=True)
class Cells:
    """The cells of one screenshot: what the vision tower's patch merger makes one embedding of."""

    rows: int
    columns: int

    def at(self, x: float, y: float) -> int:
        """Return the cell, row by row from 0, of a point in fractions of the screen, its edges included."""
        row, column = min(int(y * self.rows), self.rows - 1), int(x * self.columns)
        return row * self.columns + min(column, self.columns - 1)

    def holding(self, point: Numbers, coordinates: CoordinateMap) -> int:
        """Return the cell with the centre of the point's pixel. Raises ActionError beyond the screen."""
        column, row = self._place(*point, coordinates)
        return row * self.columns + column

    def numbers_at(self, x: float, y: float, coordinates: CoordinateMap) -> Numbers:
        """Return the numbers of a point in fractions of the screen, in the same cell."""
        cell = self.at(x, y)
        row, column = divmod(cell, self.columns)
        return self.numbers(cell, x * self.columns - column, y * self.rows - row, coordinates)

    def numbers(self, cell: int, across: float, down: float, coordinates: CoordinateMap) -> Numbers:
        """Return the point at fractions in [0, 1) of a cell's width and height, of those that are in it.

        Uniform fractions give each of its numbers alike. Where a screen is so small that a cell has none, it
        is the next after it.
        """
        row, column = divmod(cell, self.columns)

        def column_of(x: int) -> int:
            return self._place(x, 0, coordinates)[0]

        def row_of(y: int) -> int:
            return self._place(0, y, coordinates)[1]

        return (
            _within(column, across, coordinates.grid_width, column_of),
            _within(row, down, coordinates.grid_height, row_of),
        )

    def _place(self, x: int, y: int, coordinates: CoordinateMap) -> tuple[int, int]:
        """Column and row of a point."""
        grid = CoordinateMap(coordinates.width, coordinates.height, self.columns, self.rows)
        return grid.to_model(*coordinates.to_screen(x, y))


def _within(place: int, fraction: float, grid: int, place_of: Callable[[int], int]) -> int:
    first = bisect_left(range(grid), place, key=place_of)
    after = bisect_left(range(grid), place + 1, key=place_of)
    chosen = first + int(min(max(fraction, 0.0), 1.0) * (after - first))
    return min(chosen, max(after - 1, first), grid - 1)


def jitter(seed: int, position: int) -> tuple[float, float]:
    """Uniform fractions in [0, 1) for the pointer at `position` of the completion that `seed` draws.

    They belong to no likelihood: that of a point within its cell is the same for every point.
    """
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=16).digest()
    x, y = (int.from_bytes(half, "little") >> 11 for half in (digest[:8], digest[8:]))
    return x / 2**53, y / 2**53


def split_text(action_parser: PointParser, text: str) -> tuple[list[str], Sequence[WrittenPoint]]:
    """Return the points [N] of `text`, and the texts [N + 1] around them."""
    points = action_parser.find_points(text)
    starts = [0, *(point.end for point in points)]
    ends = [*(point.start for point in points), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)], points


@dataclass(frozen=True)
class PointedTokens:
    """A text as tokens of which some are pointers."""

    token_ids: list[int]
    points: dict[int, Numbers]  # by the position of their `end`


class PointerText:
    """Completions of one policy and action parser; `encode` takes text in which special tokens are characters."""

    def __init__(
        self,
        action_parser: PointParser,
        tokens: PointerTokens,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.action_parser = action_parser
        self._tokens = tokens
        self._encode = encode
        self._decode = decode

    def read(self, text: str) -> PointedTokens:
        """Tokens of `text`, with a pointer for each of its points; without an end token."""
        texts, points = split_text(self.action_parser, text)
        token_ids = self._encode(texts[0])
        found = {}
        for point, following in zip(points, texts[1:], strict=True):
            token_ids += self._tokens.triple
            found[len(token_ids) - 1] = (point.x, point.y)
            token_ids += self._encode(following)
        return PointedTokens(token_ids, found)

    def write(self, sampled: SampledTokens, points: dict[int, Numbers]) -> str:
        """Return the text of a completion; `points` has one for each position with a patch."""
        text, done = "", 0
        for position, patch in enumerate(sampled.patches):
            if patch >= 0:
                text += self._decode(sampled.token_ids[done : position - 2])
                text += self.action_parser.write_point(*points[position])
                done = position + 1
        return text + self._decode(sampled.token_ids[done:])
