"""Scores against what can be counted by hand, and regions against drawn ones."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
from PIL import Image, ImageDraw

from dart_cli.algo.statistics import wilson
from dart_cli.grounding.items import (
    Answer,
    Box,
    Item,
    Picture,
    Point,
    Polygon,
    bounds_of,
    pixel_in,
    share_of,
)
from dart_cli.grounding.scores import (
    REACH,
    refusal_lines,
    report_tables,
    score,
    summary,
)


def item(name: str, region: Box | Polygon | None, **traits: str) -> Item:
    return Item(
        name,
        Picture(Path("a.png")),
        (200, 100),
        "x",
        region,
        {key: (of,) for key, of in traits.items()},
    )


def answer(name: str, *points: Point | None, refused: bool = False) -> Answer:
    return Answer(id=name, points=list(points), refused=refused)


BOX = Box(40, 20, 100, 50)


@pytest.mark.parametrize(
    ("point", "hit", "overlap"),
    [
        ((40, 20), 1, 1),  # edges belong to it
        ((100, 50), 1, 1),
        ((100.5, 50), 0, 1),
        ((100 + REACH, 30), 0, 1),
        ((100 + REACH + 0.5, 30), 0, 0),
        ((70, 19), 0, 1),
        ((70, 20 - REACH - 1), 0, 0),
        (None, 0, 0),
    ],
)
def test_a_point_on_an_edge_hits_and_a_near_one_overlaps(
    point: Point | None, hit: int, overlap: int
) -> None:
    report = score([item("a", BOX)], {"a": answer("a", point)}, candidates=1)
    assert (report.overall.hits, report.overall.overlaps) == (hit, overlap)
    assert report.overall.pointless == (point is None)


def test_three_candidates_are_looked_at_where_there_are_three() -> None:
    items = [item("a", BOX), item("b", BOX), item("c", BOX)]
    far, near = (0.0, 0.0), (50.0, 30.0)
    answers = {
        "a": answer("a", far, None, near),
        "b": answer("b", far, far, far, near),  # the fourth is not looked at
        "c": answer("c", near, far, far),
    }
    assert score(items, answers, candidates=1).overall.hit_of_three is None
    report = score(items, answers, candidates=4)
    assert (report.overall.hits, report.overall.hits_of_three) == (1, 2)
    assert "n/a" not in str(summary(report))


def test_what_has_no_answer_is_a_miss_and_counted_apart() -> None:
    report = score([item("a", BOX), item("b", BOX)], {"a": answer("a", (50, 30))}, candidates=1)
    assert report.overall.hit == 0.5
    assert (report.overall.unanswered, report.overall.pointless) == (1, 0)
    assert report.overall.interval == wilson(1, 2)


def test_scores_are_told_by_trait() -> None:
    items = [
        item("a", BOX, group="web", element="text"),
        item("b", BOX, group="web", element="icon"),
        item("c", BOX, group="desktop", element="text"),
    ]
    answers = {each.id: answer(each.id, (50, 30) if each.id != "b" else (0, 0)) for each in items}
    report = score(items, answers, candidates=1)
    told = {trait: {each.name: each.hit for each in some} for trait, some in report.by.items()}
    assert told == {
        "group": {"desktop": 1.0, "web": 0.5},
        "element": {"icon": 0.0, "text": 1.0},
    }
    assert summary(report)["by"]["group"]["web"]["n"] == 2
    assert len(report_tables("t", report)) == 3


def test_refusals_are_in_no_hit_rate() -> None:
    items = [item("a", BOX), item("b", BOX), item("c", None), item("d", None)]
    answers = {
        "a": answer("a", (50, 30)),
        "b": answer("b", None, refused=True),
        "c": answer("c", None, refused=True),
        "d": answer("d", (50, 30)),
    }
    report = score(items, answers, candidates=1)
    assert (report.overall.n, report.overall.hits) == (2, 1)
    assert report.refusals is not None
    assert (report.refusals.n, report.refusals.refused, report.refusals.refused_others) == (2, 1, 1)
    told = summary(report)
    assert told["with_refusals"] == {"n": 4, "score": 0.5, "interval": list(wilson(2, 4))}
    assert len(refusal_lines(report)) == 2
    plain = score(items[:2], answers, candidates=1)
    assert (plain.refusals, refusal_lines(plain)) == (None, [])


def test_chance_is_the_share_of_the_screen() -> None:
    half, triangle = Box(0, 0, 100, 100), Polygon(((0, 0), (200, 0), (0, 100)))
    assert share_of(half, (200, 100)) == share_of(triangle, (200, 100)) == 0.5
    assert share_of(Box(-10, -10, 300, 300), (200, 100)) == 1.0
    assert score([item("a", half), item("b", None)], {}, candidates=1).chance == 0.5


def test_a_polygon_holds_what_is_drawn_of_it() -> None:
    """Against Pillow's own filling, away from the line, where the two may differ by a pixel."""
    rng = Random(3)
    compared = 0
    for _ in range(12):
        corners = tuple((rng.randrange(64), rng.randrange(64)) for _ in range(rng.randrange(3, 7)))
        polygon = Polygon(corners)
        filled, line = Image.new("1", (64, 64)), Image.new("1", (64, 64))
        ImageDraw.Draw(filled).polygon(corners, fill=1)
        ImageDraw.Draw(line).line([*corners, corners[0]], fill=1, width=5)
        box = bounds_of(polygon)
        for x in range(0, 64, 3):
            for y in range(0, 64, 3):
                if not line.getpixel((x, y)):
                    compared += 1
                    assert polygon.contains((x, y)) == bool(filled.getpixel((x, y)))
                assert box.contains((x, y)) or not polygon.contains((x, y))
        assert all(polygon.contains(corner) for corner in corners)
    assert compared > 2000


def test_the_right_answer_is_the_pixel_of_the_region_that_is_nearest_to_its_middle() -> None:
    """Against a search of all pixels of a small screen, for regions of which some hold none."""
    rng = Random(5)
    size, without = (24, 16), 0
    for _ in range(400):
        corners = tuple(
            (rng.choice((rng.uniform(-4, 28), rng.randrange(-2, 27))), rng.uniform(-3, 19))
            for _ in range(rng.randrange(3, 6))
        )
        scale = rng.choice((1.0, 0.1))
        (x0, y0), *_ = corners
        corners = tuple((x0 + (x - x0) * scale, y0 + (y - y0) * scale) for x, y in corners)
        for region in (Polygon(corners), bounds_of(Polygon(corners))):
            held = [p for p in ((x, y) for x in range(24) for y in range(16)) if region.contains(p)]
            pixel = pixel_in(region, size)
            without += pixel is None
            assert (pixel is None) == (not held)
            if pixel is None:
                continue
            assert pixel in held
            bounds = bounds_of(region)
            middle = (
                min(int((max(bounds.x0, 0) + min(bounds.x1, 24)) // 2), 23),
                min(int((max(bounds.y0, 0) + min(bounds.y1, 16)) // 2), 15),
            )
            assert math.dist(pixel, middle) == min(math.dist(each, middle) for each in held)
    assert without > 50
    assert pixel_in(Box(10.6, 4, 11.2, 5), size) == (11, 4)  # its middle is between two pixels
    corner = Polygon(((0, 0), (20, 0), (20, 2), (2, 2), (2, 14), (0, 14)))
    assert pixel_in(corner, size) == (10, 2)  # its middle is not in it


def test_a_polygon_overlaps_what_it_shares_a_point_with() -> None:
    triangle = Polygon(((10, 10), (50, 10), (10, 50)))
    assert triangle.overlaps(Box(0, 0, 60, 60))  # wholly around it
    assert triangle.overlaps(Box(12, 12, 14, 14))  # wholly in it
    assert triangle.overlaps(Box(0, 20, 100, 22))  # across it
    assert triangle.overlaps(Box(0, 0, 10, 10))  # at a corner
    assert not triangle.overlaps(Box(45, 45, 60, 60))  # in its bounds, beyond the long side
    assert not triangle.overlaps(Box(51, 0, 60, 9))
