"""A verifier chooses among the candidates of a model; a pointer's map has candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.messages import PointerMap
from dart_cli.grounding.items import Answer, Item, Picture, Point
from dart_cli.grounding.scorers import VerifiedScorer, candidates_of
from tests.grounding.sets import SIZE, screen

PLACES: list[Point | None] = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


class Told:
    """Gives these candidates."""

    def __init__(self, points: list[Point | None]) -> None:
        self.points = points

    async def answer(self, item: Item) -> Answer:
        return Answer(id=item.id, points=self.points, scores=[0.5] * len(self.points))


@pytest.fixture
def item(tmp_path: Path) -> Item:
    screen(tmp_path / "a.png")
    return Item("s[0]", Picture(tmp_path / "a.png"), SIZE, "click the red button", None)


def judge(*scores: float) -> object:
    def each(screenshot: bytes, instruction: str, points: list[Point]) -> Iterator[float]:
        assert screenshot.startswith(b"\x89PNG")
        assert instruction == "click the red button"
        assert len(points) == len(scores)
        yield from scores

    return each


async def test_the_chosen_candidate_comes_first_and_the_models_order_is_not_lost(
    item: Item,
) -> None:
    scorer = VerifiedScorer(Told(PLACES), judge(0.1, 0.2, 0.9), 0.8)  # type: ignore[arg-type]
    answer = await scorer.answer(item)
    assert answer.points == [(3.0, 3.0), (1.0, 1.0), (2.0, 2.0)]
    assert answer.verifier_scores == [0.1, 0.2, 0.9]
    assert answer.unverified().points == PLACES
    scorer = VerifiedScorer(Told(PLACES), judge(0.1, 0.9, 0.99), 0.8)  # type: ignore[arg-type]
    answer = await scorer.answer(item)
    assert (answer.points, answer.verifier_scores) == (
        [(2.0, 2.0), (1.0, 1.0), (3.0, 3.0)],
        [0.1, 0.9],
    )
    assert answer.unverified().points == PLACES


@pytest.mark.parametrize("points", [[(1.0, 1.0)], [None, (1.0, 1.0)], []])
async def test_nothing_is_judged_where_there_is_no_choice(
    item: Item, points: list[Point | None]
) -> None:
    answer = await VerifiedScorer(Told(points), judge(), 0.8).answer(item)  # type: ignore[arg-type]
    assert answer == await Told(points).answer(item)


def pointer_map(heat: NDArray[np.uint8]) -> PointerMap:
    return PointerMap(position=3, rows=heat.shape[0], columns=heat.shape[1], heat=heat.tobytes())


def test_candidates_are_regions_then_cells() -> None:
    heat = np.zeros((2, 4), np.uint8)
    heat[0, 0], heat[0, 1], heat[1, 3] = 255, 255, 60
    found, scores = candidates_of(pointer_map(heat), (400, 200), 20)
    assert found == [
        (100, 50),
        (50, 50),
        (150, 50),
        (350, 150),
    ]  # the region's centre, its cells, another
    assert scores == [1.0, 1.0, 1.0, round(60 / 255, 4)]
    assert candidates_of(pointer_map(heat), (400, 200), 2)[0] == found[:2]


def test_a_region_of_one_cell_is_one_candidate() -> None:
    heat = np.zeros((2, 4), np.uint8)
    heat[1, 2] = 255
    assert candidates_of(pointer_map(heat), (400, 200), 20) == ([(250, 150)], [1.0])
