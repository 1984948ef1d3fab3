"""Numbers as SVG: well formed, bounded, and where they belong."""

from __future__ import annotations

import re
from math import inf, isfinite, nan
from xml.etree import ElementTree as ET

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
        line_chart([Series("<a> & b", points)], label='"'),
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
    drawn = line_chart([Series("a", [(0, 0.0), (10, 0.5), (20, 1.0)])], width=156, height=130)
    [path] = re.findall(r'<path class="line" d="([^"]+)"', drawn)
    places = [tuple(map(float, each.split())) for each in path[1:].split("L")]
    assert places == [(44, 108), (94, 58), (144, 8)]


def test_bars_hang_where_values_are_negative_and_take_the_colour_of_their_version() -> None:
    drawn = token_bars([-1.0, -2.0], ["v0", "v1"], label="x", height=10)
    assert '<path class="v0" d="M0.5 0.00V5.00"/><path class="v1" d="M1.5 0.00V10.00"/>' in drawn
    assert 'd="M0.5 5.00V10.00M1.5 0.00V10.00"' in token_bars(
        [1.0, 2.0], ["v0", "v0"], label="x", height=10
    )


def test_a_band_lies_between_its_bounds_and_the_legend_names_each_line() -> None:
    series = Series("a, n 8", [(0, 0.5), (10, 0.5)], "mean", band=[(0.0, 1.0), (0.5, 0.5)])
    drawn = line_chart([series], width=156, height=130, low=0.0, high=1.0)
    [path] = re.findall(r'<path class="band" d="M([^"]+)Z"', drawn)
    places = [tuple(map(float, each.split())) for each in path.split("L")]
    assert places == [(44, 108), (144, 58), (144, 58), (44, 8)]
    names = ET.fromstring(legend([series, Series("<b>", [], "t3")]))
    assert ["".join(each.itertext()) for each in names] == ["a, n 8", "<b>"]
