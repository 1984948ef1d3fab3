"""What is drawn is exact, the same everywhere, and inside its bounds."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from envs.suites.embedded.draw import (
    ICONS,
    Canvas,
    Rect,
    encode,
    fit_text,
    line_height,
    text_width,
    to_image,
)
from envs.suites.embedded.theme import COLOURS, DESK_THEMES, HALF, THEMES, Palette, palette_of

ALL_THEMES = [*THEMES, *DESK_THEMES]


def blank(width: int = 40, height: int = 30) -> Canvas:
    theme = THEMES[0]
    return Canvas.blank(width, height, palette_of(theme), theme.window)


@pytest.mark.parametrize("theme", ALL_THEMES, ids=lambda theme: theme.name)
def test_a_palette_holds_every_named_colour_exactly(theme) -> None:  # type: ignore[no-untyped-def]
    palette = palette_of(theme)
    assert len(palette.colours) <= HALF
    assert len(palette.plte) == 3 * 256
    for colour in (*COLOURS.values(), theme.window, theme.panel, theme.ink, theme.accent):
        assert palette.colours[palette.index(colour)] == colour


@pytest.mark.parametrize("theme", ALL_THEMES, ids=lambda theme: theme.name)
def test_a_palette_does_not_depend_on_what_was_drawn_before(theme) -> None:  # type: ignore[no-untyped-def]
    used, fresh = Palette(theme), Palette(theme)
    for i in range(200):
        used.index((i, 255 - i, i // 2))
        used.ramp((i, 0, 0), (0, i, 0))
    assert used.plte == fresh.plte
    assert used.index((7, 77, 177)) == fresh.index((7, 77, 177))


@pytest.mark.parametrize("theme", ALL_THEMES, ids=lambda theme: theme.name)
def test_the_named_colours_are_far_apart_on_every_ground(theme) -> None:  # type: ignore[no-untyped-def]
    colours = [*COLOURS.values(), theme.window]
    for i, one in enumerate(colours):
        for other in colours[i + 1 :]:
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 60


def test_png_holds_every_pixel_exactly() -> None:
    canvas = blank()
    canvas.rounded(Rect(2, 2, 30, 20), 5, COLOURS["red"], edge=COLOURS["blue"])
    canvas.icon("star", Rect(8, 4, 24, 20), COLOURS["green"], COLOURS["red"])
    canvas.text(3, 12, "Ag", 12, THEMES[0].ink)
    decoded = Image.open(io.BytesIO(encode(canvas))).convert("RGB")
    assert decoded.size == (40, 30)
    assert decoded.tobytes() == to_image(canvas).tobytes()


def test_jpeg_is_close_and_has_its_signature() -> None:
    canvas = blank()
    canvas.fill(Rect(0, 0, 20, 30), COLOURS["red"])
    blob = encode(canvas, "jpeg")
    assert blob.startswith(b"\xff\xd8")
    decoded = Image.open(io.BytesIO(blob)).convert("RGB")
    red, green, blue = decoded.getpixel((5, 15))  # type: ignore[misc]
    assert red > 180
    assert green < 80
    assert blue < 80


def test_dimming_darkens_every_pixel_and_twice_is_once() -> None:
    canvas = blank()
    before = to_image(canvas).getpixel((1, 1))
    canvas.dim()
    once = to_image(canvas).getpixel((1, 1))
    canvas.dim()
    assert to_image(canvas).getpixel((1, 1)) == once
    assert all(a < b for a, b in zip(once, before, strict=True))  # type: ignore[arg-type]


def test_nothing_is_drawn_outside_of_a_clip() -> None:
    canvas = blank()
    before = to_image(canvas)
    box = Rect(10, 10, 20, 20)
    with canvas.clip(box) as inner:
        inner.text(0, 5, "wide text", 12, COLOURS["blue"])
        inner.fill(Rect(15, 15, 40, 30), COLOURS["red"])
    after = to_image(canvas)
    for x in range(40):
        for y in range(30):
            if not box.contains(x, y):
                assert after.getpixel((x, y)) == before.getpixel((x, y))
    assert after.getpixel((19, 19)) == COLOURS["red"]


@pytest.mark.parametrize("name", ICONS)
def test_every_icon_can_be_seen_at_sixteen_pixels(name: str) -> None:
    canvas = blank()
    canvas.icon(name, Rect(4, 4, 20, 20), THEMES[0].ink)
    colours = to_image(canvas).crop((4, 4, 20, 20)).getcolors()
    assert colours is not None
    assert sum(count for count, colour in colours if colour != THEMES[0].window) > 20


def test_a_text_that_does_not_fit_ends_in_dots_and_fits() -> None:
    text = "a rather long line of text"
    assert fit_text(text, 12, 400) == text
    short = fit_text(text, 12, 60)
    assert short.endswith("...")
    assert text_width(short, 12) <= 60
    assert fit_text(text, 12, 1) == ""
    assert line_height(12) >= 12


def test_rectangles_meet_where_they_share_pixels() -> None:
    box = Rect(0, 0, 10, 10)
    assert box.cut(Rect(5, 5, 20, 20)) == Rect(5, 5, 10, 10)
    assert box.overlaps(Rect(9, 9, 12, 12))
    assert not box.overlaps(Rect(10, 0, 12, 12))
    assert box.centred(4, 2) == Rect(3, 4, 7, 6)
    assert box.contains(9, 9)
    assert not box.contains(10, 9)
