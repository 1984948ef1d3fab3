"""Promises of the texts that leave a model that points: numbers in the drawn cell, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from bus.errors import ActionError
from bus.messages import SampledTokens
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.language.parsers import point_parser
from dart_cli.language.pointer_text import Cells, PointerText, jitter
from dart_cli.language.pointer_tokens import TRIPLE, PointerTokens

SCREENS = [
    (make_coordinate_map("thousandths", 168, 168), Cells(6, 6)),
    (make_coordinate_map("thousand", 1920, 1080), Cells(39, 69)),
    (make_coordinate_map("resized", 1920, 1080), Cells(39, 69)),
    (make_coordinate_map("thousandths", 1366, 77), Cells(2, 48)),
]


def fraction(point: tuple[int, int], coordinates: CoordinateMap) -> tuple[float, float]:
    """Where the centre of the pixel is that the numbers name."""
    x, y = coordinates.to_screen(*point)
    return (x + 0.5) / coordinates.width, (y + 0.5) / coordinates.height


@pytest.mark.parametrize(("coordinates", "cells"), SCREENS)
def test_every_point_of_a_cell_is_in_it_and_leads_back(
    coordinates: CoordinateMap, cells: Cells
) -> None:
    random = np.random.default_rng(3)
    for cell in {0, cells.columns - 1, cells.rows * cells.columns - 1, *random.integers(0, 60, 8)}:
        cell = int(cell) % (cells.rows * cells.columns)
        row, column = divmod(cell, cells.columns)
        for across, down in [(0.0, 0.0), (1 - 2**-53, 1 - 2**-53), *random.random((20, 2))]:
            point = cells.numbers(cell, across, down, coordinates)
            assert cells.holding(point, coordinates) == cell
            x, y = fraction(point, coordinates)
            assert (math.floor(x * cells.columns), math.floor(y * cells.rows)) == (column, row)


def test_the_points_of_a_cell_are_alike_and_all_of_them_are_drawn() -> None:
    coordinates, cells = make_coordinate_map("thousandths", 1000, 1000), Cells(40, 50)
    drawn = [cells.numbers(53, *jitter(seed, 4), coordinates) for seed in range(4000)]
    counts = np.zeros((1000, 1000))
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    inside = counts[60:80, 25:50]  # x in 60..79, y in 25..49
    assert inside.sum() == 4000
    for axis, numbers in ((1, 20), (0, 25)):
        expected = 4000 / numbers
        chi = ((inside.sum(axis=axis) - expected) ** 2 / expected).sum()
        assert chi < numbers + 5 * math.sqrt(2 * numbers)


def test_a_jitter_follows_from_seed_and_position_alone() -> None:
    assert jitter(5, 3) == jitter(5, 3)
    assert len({jitter(seed, position) for seed in range(9) for position in range(9)}) == 81
    assert all(0 <= each < 1 for seed in range(99) for each in jitter(seed, 0))


def test_a_screen_with_fewer_pixels_than_cells_gets_points_on_it() -> None:
    coordinates, cells = make_coordinate_map("thousandths", 5, 5), Cells(10, 10)
    for cell in range(100):
        coordinates.to_screen(*cells.numbers(cell, 0.5, 0.5, coordinates))


def test_a_point_in_fractions_has_numbers_next_to_it_in_its_own_cell() -> None:
    coordinates, cells = make_coordinate_map("thousandths", 1920, 1080), Cells(39, 69)
    for x, y in [(0, 0), (1, 1), (0.5, 0.5), *np.random.default_rng(1).random((30, 2))]:
        point = cells.numbers_at(x, y, coordinates)
        assert cells.holding(point, coordinates) == cells.at(x, y)
        assert max(abs(point[0] - 1000 * x), abs(point[1] - 1000 * y)) < 2
    assert [Cells(2, 4).at(*each) for each in [(0, 0), (0.25, 0), (0.2499, 0.5), (1, 1)]] == [
        *(0, 1, 4, 7)
    ]


def test_a_point_beyond_the_screen_is_in_no_cell() -> None:
    with pytest.raises(ActionError, match="beyond the screen"):
        Cells(6, 6).holding((1000, 0), make_coordinate_map("thousandths", 168, 168))


# A token is a character; these three are not.
TOKENS = PointerTokens(start=-1, pad=-2, end=-3)
_SPELT = dict(zip(TOKENS.triple, TRIPLE.replace("><", "> <").split(), strict=True))


def spelt(token_ids: Sequence[int]) -> str:
    return "".join(_SPELT[each] if each < 0 else chr(each) for each in token_ids)


COMPACT = PointerText(point_parser("compact"), TOKENS, lambda text: list(map(ord, text)), spelt)
UITARS = PointerText(point_parser("uitars"), TOKENS, lambda text: list(map(ord, text)), spelt)
SEVERAL = {
    name: PointerText(point_parser(name, 4), TOKENS, lambda text: list(map(ord, text)), spelt)
    for name in ("compact", "uitars")
}
TEXTS = [
    (COMPACT, "click(12,34)", f"click({TRIPLE})"),
    (COMPACT, "ctrl+drag(1,2,3,4)", f"ctrl+drag({TRIPLE},{TRIPLE})"),
    (COMPACT, "scroll(5,6,up)", f"scroll({TRIPLE},up)"),
    (COMPACT, "double_click(7,8)", f"double_click({TRIPLE})"),
    (COMPACT, "type(9,9)", "type(9,9)"),
    (COMPACT, "no action, 1,2", "no action, 1,2"),
    (COMPACT, "click(1,2)\nclick(3,4)", "click(1,2)\nclick(3,4)"),
    (
        SEVERAL["compact"],
        "click(1,2)\ntype(9,9)\ndrag(3,4,5,6)",
        f"click({TRIPLE})\ntype(9,9)\ndrag({TRIPLE},{TRIPLE})",
    ),
    (SEVERAL["compact"], "click(1,2)\nclick(3,", "click(1,2)\nclick(3,"),
    (
        SEVERAL["uitars"],
        "Thought: (1,2)\nAction: click(start_box='(3,4)')\n\nhover(start_box='(5,6)')",
        f"Thought: (1,2)\nAction: click(start_box='{TRIPLE}')\n\nhover(start_box='{TRIPLE}')",
    ),
    (
        UITARS,
        "Thought: (1,2)\nAction: drag(start_box='(3,4)', end_box='(5,6)')",
        f"Thought: (1,2)\nAction: drag(start_box='{TRIPLE}', end_box='{TRIPLE}')",
    ),
]


@pytest.mark.parametrize(("language", "text", "pointed"), TEXTS)
def test_a_text_with_numbers_becomes_pointers_and_comes_back(
    language: PointerText, text: str, pointed: str
) -> None:
    read = language.read(text)
    assert spelt(read.token_ids) == pointed
    assert all(read.token_ids[position] == TOKENS.end for position in read.points)
    assert list(read.points.values()) == [
        (point.x, point.y) for point in language.action_parser.find_points(text)
    ]
    patches = [9 if position in read.points else -1 for position in range(len(read.token_ids))]
    assert language.write(sampled(read.token_ids, patches), read.points) == text


def test_a_pointer_that_was_cut_off_stays_in_the_text() -> None:
    cut = [*map(ord, "click("), *TOKENS.triple[:2]]
    assert COMPACT.write(sampled(cut, []), {}) == "click(" + TRIPLE[: -len(_SPELT[TOKENS.end])]


def sampled(token_ids: list[int], patches: list[int]) -> SampledTokens:
    return SampledTokens(
        token_ids=token_ids,
        behaviour_logprobs=[],
        entropies=[],
        version_spans=[],
        patches=patches,
    )
