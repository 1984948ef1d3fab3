"""Conversion between the numbers of a text and the pointers among its tokens, without torch.

    Cells          maps the model's numbers to cells of a screenshot, and back
    jitter         returns where in its cell a sampled pointer clicks
    split_text     splits a text into its points and the texts around them
    PointerText    converts tokens of completions to texts and back, for one policy and action parser

Only the prompts and completions of a model that points have pointers. A rollout worker returns texts with
numbers in their place, and the prompts it makes have pointers in the place of numbers. So environments,
action parsers, the store and the pages handle numbers alone.
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
"""x and y as the model writes them."""


@dataclass(frozen=True)
class Cells:
    """The cells of one screenshot. The vision tower's patch merger makes one embedding of each."""

    rows: int
    columns: int

    def at(self, x: float, y: float) -> int:
        """Return the cell of a point in fractions [0, 1] of the screen.

        Cells are counted row by row from 0.
        """
        row, column = min(int(y * self.rows), self.rows - 1), int(x * self.columns)
        return row * self.columns + min(column, self.columns - 1)

    def holding(self, point: Numbers, coordinates: CoordinateMap) -> int:
        """Return the cell that contains the centre of the point's pixel.

        Raises ActionError if the point is beyond the screen.
        """
        column, row = self._place(*point, coordinates)
        return row * self.columns + column

    def numbers_at(self, x: float, y: float, coordinates: CoordinateMap) -> Numbers:
        """Return the numbers of a point in fractions of the screen.

        They lie in the same cell as the point.
        """
        cell = self.at(x, y)
        row, column = divmod(cell, self.columns)
        return self.numbers(cell, x * self.columns - column, y * self.rows - row, coordinates)

    def numbers(self, cell: int, across: float, down: float, coordinates: CoordinateMap) -> Numbers:
        """Return the numbers at the fractions [0, 1) of a cell's width and height.

        Uniform fractions give each number of the cell with the same probability. On a screen so small that
        the cell contains no number, the result is the next number after it.
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
        """Return the column and the row of a point."""
        grid = CoordinateMap(coordinates.width, coordinates.height, self.columns, self.rows)
        return grid.to_model(*coordinates.to_screen(x, y))


def _within(place: int, fraction: float, grid: int, place_of: Callable[[int], int]) -> int:
    """Return the number at `fraction` [0, 1] of the numbers below `grid` that `place_of` maps to `place`."""
    first = bisect_left(range(grid), place, key=place_of)
    after = bisect_left(range(grid), place + 1, key=place_of)
    number = first + int(min(max(fraction, 0.0), 1.0) * (after - first))
    return min(number, max(after - 1, first), grid - 1)


def jitter(seed: int, position: int) -> tuple[float, float]:
    """Return uniform fractions in [0, 1) for the pointer at `position` of the completion with this `seed`.

    The fractions do not enter the likelihood, since all points of a cell are equally likely.
    """
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=16).digest()
    x, y = (int.from_bytes(half, "little") >> 11 for half in (digest[:8], digest[8:]))
    return x / 2**53, y / 2**53


def split_text(action_parser: PointParser, text: str) -> tuple[list[str], Sequence[WrittenPoint]]:
    """Return the texts [N + 1] around the points of `text`, and the points [N]."""
    points = action_parser.find_points(text)
    starts = [0, *(point.end for point in points)]
    ends = [*(point.start for point in points), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)], points


@dataclass(frozen=True)
class PointedTokens:
    """A text as tokens, with a pointer for each of its points."""

    token_ids: list[int]
    points: dict[int, Numbers]  # by the position of the pointer's `end`


class PointerText:
    """Converts completions of one policy, in the language of one action parser, to tokens and back.

    `encode` reads special tokens that a text spells as plain characters.
    """

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
        """Return the tokens of `text`, with a pointer for each of its points, without an end token."""
        texts, points = split_text(self.action_parser, text)
        token_ids = self._encode(texts[0])
        numbers = {}
        for point, following in zip(points, texts[1:], strict=True):
            token_ids += self._tokens.triple
            numbers[len(token_ids) - 1] = (point.x, point.y)
            token_ids += self._encode(following)
        return PointedTokens(token_ids, numbers)

    def write(self, sampled: SampledTokens, points: dict[int, Numbers]) -> str:
        """Return the text of a completion; `points` has the numbers for each position with a patch."""
        text, start = "", 0
        for position, patch in enumerate(sampled.patches):
            if patch >= 0:
                x, y = points[position]
                text += self._decode(sampled.token_ids[start : position - 2])
                text += self.action_parser.write_point(x, y)
                start = position + 1
        return text + self._decode(sampled.token_ids[start:])
