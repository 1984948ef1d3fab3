"""Numbers as SVG: well formed, bounded, and where they belong."""

from __future__ import annotations

import re
from itertools import pairwise
from math import inf, isfinite, nan
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dart_cli.inspection.curves import Series
from dart_cli.view.charts import (
    legend,
    line_chart,
    sparkline,
    token_bars,
)

numbers = st.floats(-1e6, 1e6) | st.sampled_from([nan, inf, -inf, 0.0])
values = st.lists(numbers, max_size=600)


@given(values)
@example([0.0, 5e-324])
@example([1e-322])
@example([1e-13, 3e-13])
def test_any_numbers_make_a_picture_of_finite_places_or_none(ys: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    for drawn in (
        line_chart([Series("<a> & b", points)], x="<", y='"'),
        line_chart([Series("<a> & b", points), Series("c", points)], x="<", y='"', height=100),
        sparkline(points, "a"),
        token_bars(ys, ["v0"] * len(ys), label="<"),
    ):
        if not any(map(isfinite, ys)):
            assert drawn == ""
            continue
        root = ET.fromstring(drawn)
        for each in root.iter():
            for value in each.attrib.values():
                assert "nan" not in value
                assert "inf" not in value


def test_a_line_goes_through_its_points() -> None:
    points = [(0, 0.0), (10, 0.5), (20, 1.0)]
    drawn = line_chart([Series("a", points)], x="x", y="y", height=160)
    [path] = re.findall(r'<path class="line" d="M([^"]+)"', drawn)
    assert places(path) == [(0, 122), (500, 72), (1000, 22)]


def test_bars_hang_where_values_are_negative_and_take_the_colour_of_their_version() -> None:
    drawn = token_bars([-1.0, -2.0], ["v0", "v1"], label="x", height=10)
    assert '<path class="v0" d="M0.5 0.00V5.00"/><path class="v1" d="M1.5 0.00V10.00"/>' in drawn
    assert 'd="M0.5 5.00V10.00M1.5 0.00V10.00"' in token_bars(
        [1.0, 2.0], ["v0", "v0"], label="x", height=10
    )


def test_a_band_lies_between_its_bounds_and_the_legend_names_each_line() -> None:
    series = Series("a, n 8", [(0, 0.5), (10, 0.5)], "mean", band=[(0.0, 1.0), (0.5, 0.5)])
    drawn = line_chart([series], x="x", y="y", height=160, low=0.0, high=1.0)
    [path] = re.findall(r'<path class="band mean" d="M([^"]+)Z"', drawn)
    assert places(path) == [(0, 122), (1000, 72), (1000, 72), (0, 22)]
    names = ET.fromstring(legend([series, Series("<b>", [], "t3")]))
    assert ["".join(each.itertext()) for each in names] == ["a, n 8", "<b>"]


def places(path: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, each.split())) for each in path.split("L")]


def readings(drawn: str) -> list[list[str]]:
    """The lines of text that each place of a chart shows under the pointer."""
    cards = re.findall(r'<ul class="values \w+">(.*?)</ul>', drawn)
    return [
        [re.sub("<[^>]+>", "", row) for row in re.findall(r"<li>(.*?)</li>", card)]
        for card in cards
    ]


def test_under_the_pointer_are_the_values_of_all_lines_that_are_there() -> None:
    drawn = line_chart(
        [
            Series("a, n 8", [(0, 0.0), (10, 1.0)], "t0", [(0.0, 0.5), (0.5, 1.0)], "a"),
            Series("<b>", [(4, 0.25), (20, 3000.0)], "t1"),
            Series("up, n 5", [(0, 0.0), (20, 1.0)], "thin", short="<up>"),
            Series("down, n 6", [(3, 0.9), (10, 0.2)], "thin", short="down"),
        ],
        x="minutes",
        y="success",
    )
    high, low = "highest of the others: ", "lowest of the others: "
    up = "&lt;up&gt; "
    assert readings(drawn) == [
        ["minutes: 0", "a 0 (0 to 0.5)", f"{high}{up}0", f"{low}{up}0"],
        [
            *("minutes: 4", "a 0.4 (0.2 to 0.7)", "&lt;b&gt; 0.25"),
            *(f"{high}down 0.8", f"{low}{up}0.2"),
        ],
        [
            *("minutes: 10", "a 1 (0.5 to 1)", "&lt;b&gt; 1,125"),
            *(f"{high}{up}0.5", f"{low}down 0.2"),
        ],
        ["minutes: 20", "&lt;b&gt; 3,000", f"{high}{up}1", f"{low}{up}1"],
    ]


def test_every_place_across_a_chart_belongs_to_one_reading_and_there_are_not_too_many() -> None:
    points = [(float(x) ** 2, float(x)) for x in range(500)]
    drawn = line_chart([Series("a", points)], x="x", y="y")
    columns = [
        (float(left.rstrip("%")), float(width.rstrip("%")))
        for left, width in re.findall(r'<g class="at"><rect x="([^"]+)" width="([^"]+)"', drawn)
    ]
    assert 40 <= len(columns) <= 60
    assert columns[0][0] == 0
    for (left, width), (after, _) in pairwise(columns):
        assert after == pytest.approx(left + width, abs=0.02)
    assert sum(columns[-1]) == pytest.approx(100, abs=0.02)


def test_a_part_of_the_axis_is_drawn_from_end_to_end_with_the_lines_own_values_there() -> None:
    series = Series("a", [(0, 0.0), (10, 1.0), (20, 0.0)], "line", [(0, 0), (1, 1), (0, 0)])
    drawn = line_chart([series], x="x", y="y", height=160, part=(5, 12))
    assert [row for row, *_ in readings(drawn)] == ["x: 5", "x: 10", "x: 12"]
    assert [row for _, row in readings(drawn)] == [
        "0.5 (0.5 to 0.5)",
        "1 (1 to 1)",
        "0.8 (0.8 to 0.8)",
    ]
    assert line_chart([series], x="x", y="y", part=(21, 30)) == ""


def test_texts_keep_their_size_as_only_the_lines_are_in_the_picture_that_is_stretched() -> None:
    root = ET.fromstring(line_chart([Series("a", [(0, 1.0), (9, 2.0)])], x="x, min", y="y, nats"))
    [stretched] = [each for each in root.iter("svg") if "preserveAspectRatio" in each.attrib]
    assert {each.tag for each in stretched.iter()} == {"svg", "path", "title"}
    assert {"x, min", "y, nats"} <= {each.text for each in root.iter("text")}
