"""Keys of screens: carets and ignored parts make no difference, anything else does."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import make_async_env
from dart_cli.env.episode import play_episode
from envs import screenshots
from envs.actions import Click
from envs.base import Observation
from envs.registry import load_suite
from envs.screen_key import CARET, screen_key
from envs.screenshots import ScreenFormat, pixels_of
from tests.env.parts import Memory, Says, action_spec, lease
from tests.waiting import PATIENCE_S

PAPER, INK = (250, 250, 245), (20, 20, 30)


def form(text: str = "12 High Street", *, turned: bool = False) -> Image.Image:
    """A page with a field, a checkbox and a button; `turned` is light on dark."""
    back, front = (INK, PAPER) if turned else (PAPER, INK)
    page = Image.new("RGB", (300, 200), back)
    draw = ImageDraw.Draw(page)
    draw.rectangle((20, 40, 220, 64), outline=front)
    draw.text((26, 46), text, fill=front, font=ImageFont.load_default(13))
    draw.rectangle((20, 90, 32, 102), outline=front)
    draw.rectangle((20, 140, 100, 164), fill=(90, 120, 200))
    return page


def drawn(page: Image.Image, draw: Callable[[ImageDraw.ImageDraw], Any]) -> Image.Image:
    page = page.copy()
    draw(ImageDraw.Draw(page))
    return page


@pytest.mark.parametrize("turned", [False, True], ids=["dark on light", "light on dark"])
def test_a_caret_anywhere_on_plain_ground_makes_no_difference(turned: bool) -> None:
    rng = random.Random(0)
    page = form(turned=turned)
    tone = PAPER if turned else INK
    for _ in range(40):
        wide, high = rng.choice([1, 2]), rng.randint(CARET[0], 24)
        left, top = rng.randrange(230, 290), rng.randrange(0, 170)
        box = (left, top, left + wide - 1, top + high - 1)
        with_caret = drawn(page, lambda draw, box=box: draw.rectangle(box, fill=tone))
        assert with_caret.tobytes() != page.tobytes()
        assert screen_key(with_caret) == screen_key(page)


def test_a_caret_behind_typed_text_makes_no_difference_and_a_letter_does() -> None:
    page = form("12 High Stree")
    end = 26 + round(ImageDraw.Draw(page).textlength("12 High Stree", ImageFont.load_default(13)))
    blinking = drawn(page, lambda draw: draw.line((end + 2, 45, end + 2, 60), fill=INK))
    assert screen_key(blinking) == screen_key(page)
    assert screen_key(form("12 High Street")) != screen_key(page)


OTHERS: dict[str, Callable[[ImageDraw.ImageDraw], Any]] = {
    "a tick": lambda draw: draw.line([(22, 96), (25, 100), (30, 92)], fill=INK, width=2),
    "a dialog": lambda draw: draw.rectangle((60, 50, 240, 150), fill=(220, 220, 220), outline=INK),
    "another colour of the same grey": lambda draw: draw.rectangle(
        (20, 140, 100, 164), fill=(120, 104, 201)
    ),
    "a line of three pixels": lambda draw: draw.rectangle((250, 20, 252, 40), fill=INK),
    "a short line": lambda draw: draw.line((250, 20, 250, 20 + CARET[0] - 2), fill=INK),
    "a tall line": lambda draw: draw.line((250, 20, 250, 20 + CARET[1]), fill=INK),
    "a line across": lambda draw: draw.line((230, 20, 260, 20), fill=INK),
    "a pale line": lambda draw: draw.line((250, 20, 250, 40), fill=(240, 240, 235)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_makes_a_difference(name: str) -> None:
    assert screen_key(drawn(form(), OTHERS[name])) != screen_key(form())


def test_what_is_ignored_makes_no_difference_and_only_there() -> None:
    def clock(text: str) -> Image.Image:
        return drawn(form(), lambda draw: draw.text((262, 4), text, fill=INK))

    bar = [(0.8, 0.0, 1.0, 0.1)]
    assert screen_key(clock("12:39")) != screen_key(clock("12:40"))
    assert screen_key(clock("12:39"), bar) == screen_key(clock("12:40"), bar)
    assert screen_key(form(), bar) != screen_key(form("12 High Stree"), bar)


@pytest.mark.parametrize("size", [(1, 1), (2, 40), (3, 13), (40, 5)])
def test_a_screen_of_any_size_has_a_key(size: tuple[int, int]) -> None:
    assert screen_key(Image.new("RGB", size, PAPER)) != screen_key(Image.new("RGB", size, INK))
    turned = Image.new("RGB", size[::-1], PAPER)
    assert size[0] == size[1] or screen_key(Image.new("RGB", size, PAPER)) != screen_key(turned)


# --- where screens come from --------------------------------------------------------------------


def seen(page: Image.Image, key: str = "") -> Observation:
    into = io.BytesIO()
    page.save(into, "PNG")
    return Observation(into.getvalue(), "image/png", *page.size, screen_key=key)


def test_keys_are_of_the_pixels_before_they_are_encoded() -> None:
    plain = ScreenFormat(has_key=True).of(seen(form()))
    lossy = ScreenFormat("jpeg", 20, has_key=True).of(seen(form()))
    assert plain.screen_key == lossy.screen_key == screen_key(form())
    assert lossy.screenshot != plain.screenshot


def test_a_screenshot_is_decoded_once_for_its_key_and_its_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[bytes] = []

    def counted(image: bytes) -> Image.Image:
        decoded.append(image)
        return pixels_of(image)

    monkeypatch.setattr(screenshots, "pixels_of", counted)
    ScreenFormat("webp", has_key=True).of(seen(form()))
    assert len(decoded) == 1
    ScreenFormat().of(seen(form()))
    assert len(decoded) == 1


def test_a_suite_may_give_a_key_of_its_own_which_counts_only_where_keys_are_asked_for() -> None:
    given = [seen(form(text), "address?page=2") for text in ("a", "b")]
    one, other = (ScreenFormat(has_key=True).of(each).screen_key for each in given)
    assert (
        one == other != ScreenFormat(has_key=True).of(replace(given[0], screen_key="x")).screen_key
    )
    assert len(one) == 32
    assert ScreenFormat().of(given[0]).screen_key == ""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_environment_gives_keys_where_they_are_asked_for(isolation: str) -> None:
    async def keys(**changes: object) -> list[tuple[str, bytes]]:
        config = EnvConfig.model_validate({"suite": "mini", "isolation": isolation, **changes})
        env = make_async_env(config, "env-0/0")
        task = next(iter(load_suite("mini").tasks.values()))
        try:
            first, _ = await env.reset(task, 3)
            second = (await env.step(Click(x=1, y=1))).observation
        finally:
            await env.close()
        return [(each.screen_key, each.screenshot) for each in (first, second)]

    async def both() -> None:
        assert {key for key, _ in await keys()} == {""}
        ignore = [[0.5, 0.0, 1.0, 1.0]]
        for key, image in await keys(screen_match="similar", screen_ignore=ignore):
            assert key == screen_key(pixels_of(image), [(0.5, 0.0, 1.0, 1.0)])

    asyncio.run(asyncio.wait_for(both(), PATIENCE_S))


async def test_each_step_is_handed_in_with_the_key_of_its_screen() -> None:
    player = make_async_env(EnvConfig(screen_match="similar"), "env-0/0")
    sink = Memory()
    menu = load_suite("mini").tasks["mini/menu"]
    await play_episode(player, lease(max_steps=2), menu, Says("wait()"), sink, action_spec())
    await player.close()
    assert len(sink.steps) == 2
    for record in sink.steps:
        assert record.screen_key == screen_key(pixels_of(record.screenshot))
