"""Promises of the coordinate frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as published

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map, smart_resize
from dart_cli.language.parsers import make_action_parser
from envs.contract.actions import Click

_side = st.integers(8, 4000)


@given(_side, _side, st.sampled_from([28, 32]), st.integers(4, 600), st.integers(1, 30))
def test_resizing_is_the_published_one(
    height: int, width: int, factor: int, least: int, more: int
) -> None:
    bounds = {"min_pixels": least * factor**2, "max_pixels": least * more * factor**2}
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ActionError, match="strip"):
            smart_resize(height, width, factor=factor, **bounds)
        return
    expected = published(height, width, factor=factor, **bounds)
    assert smart_resize(height, width, factor=factor, **bounds) == expected


def test_a_full_hd_screen_is_1932_by_1092_for_uitars() -> None:
    coordinates = make_coordinate_map("resized", 1920, 1080)
    assert coordinates == CoordinateMap(1920, 1080, 1932, 1092, has_edge=True)


def test_the_width_of_a_resized_screen_is_its_last_pixel_as_in_ui_tars_own_code() -> None:
    """And nothing beyond it; the other conventions have no such number."""
    coordinates = make_coordinate_map("resized", 1920, 1080)
    assert coordinates.to_screen(1932, 1092) == coordinates.to_screen(1931, 1091) == (1919, 1079)
    for point in ((1933, 0), (0, 1093), (-1, 0)):
        with pytest.raises(ActionError, match="beyond the screen"):
            coordinates.to_screen(*point)
    call = "Action: click(start_box='(1932,546)')"
    assert make_action_parser("uitars").parse(call, coordinates) == Click(x=1919, y=540)


@given(st.integers(1, 1000), st.integers(1, 1000), st.data())
def test_pixels_round_trip_through_thousandths_up_to_1000_pixels(
    width: int, height: int, data: st.DataObject
) -> None:
    coordinates = make_coordinate_map("thousandths", width, height)
    pixel = data.draw(st.tuples(st.integers(0, width - 1), st.integers(0, height - 1)))
    assert coordinates.to_screen(*coordinates.to_model(*pixel)) == pixel


@given(st.integers(1, 8000), st.integers(0, 999))
def test_a_thousandth_is_the_pixel_of_its_centre(width: int, number: int) -> None:
    coordinates = make_coordinate_map("thousandths", width, width)
    assert coordinates.to_screen(number, number)[0] == int((number + 0.5) * width / 1000)


@given(_side, _side, st.data())
def test_every_number_on_the_grid_names_a_pixel_of_the_screen(
    width: int, height: int, data: st.DataObject
) -> None:
    coordinates = (
        make_coordinate_map("resized", width, height) if width < 9 * height < 81 * width else None
    )
    coordinates = coordinates or make_coordinate_map("thousandths", width, height)
    x = data.draw(st.integers(0, coordinates.grid_width - 1))
    y = data.draw(st.integers(0, coordinates.grid_height - 1))
    pixel_x, pixel_y = coordinates.to_screen(x, y)
    assert 0 <= pixel_x < width
    assert 0 <= pixel_y < height


@given(_side, _side)
def test_corners_stay_corners(width: int, height: int) -> None:
    coordinates = make_coordinate_map("thousandths", width, height)
    assert coordinates.to_screen(0, 0) == (width // 2000, height // 2000)
    assert coordinates.to_screen(999, 999) == (
        width - 1 - (width - 1) // 2000,
        height - 1 - (height - 1) // 2000,
    )


@pytest.mark.parametrize("point", [(-1, 0), (1000, 0), (0, -1), (0, 1000)])
def test_numbers_beyond_the_screen_are_refused_not_clamped(point: tuple[int, int]) -> None:
    with pytest.raises(ActionError, match="beyond the screen: 0 to 999"):
        make_coordinate_map("thousandths", 168, 168).to_screen(*point)
