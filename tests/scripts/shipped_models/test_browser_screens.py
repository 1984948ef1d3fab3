"""Screens of the small base: held-out words are apart, and what a scene tells is what its picture shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bus.errors import MissingPartError
from envs.contract.registry import load_suite, make_env
from envs.suites.miniwob.env import MiniwobEnv
from scripts.shipped_models.reading import words
from scripts.shipped_models.reading.browser_screens import Canvas, rendered_scenes
from scripts.shipped_models.reading.page_screens import page_scenes
from scripts.shipped_models.reading.scene import Glyph, Query, Scene, Thing
from scripts.shipped_models.reading.store import load, write_shard


@pytest.fixture(scope="module")
def canvas() -> Iterator[Canvas]:
    _need_chromium()
    made = Canvas()
    yield made
    made.close()


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    _need_chromium()
    made = make_env("miniwob", browsers=1)
    assert isinstance(made, MiniwobEnv)
    yield made
    made.close()


def _need_chromium() -> None:
    try:
        load_suite("miniwob").check_parts()  # type: ignore[attr-defined]
    except MissingPartError as error:
        pytest.skip(str(error))


def test_training_never_draws_a_held_out_word() -> None:
    rng = Random(0)
    assert not any(words.is_held_out(words.word(rng, held_out=False)) for _ in range(500))
    assert all(words.is_held_out(words.word(rng, held_out=True)) for _ in range(100))


def test_about_a_tenth_of_all_words_is_held_out() -> None:
    rng = Random(0)
    drawn = {words.word(rng, held_out=bool(at % 2)) for at in range(400)}
    made_up = {f"{one}{two}" for one in drawn for two in ("ba", "de", "ki")}
    assert 0.05 < sum(map(words.is_held_out, made_up)) / len(made_up) < 0.15


def test_labels_and_values_are_printable_and_repeat_with_their_seed() -> None:
    def drawn() -> list[str]:
        rng = Random(7)
        return [each(rng, False) for _ in range(50) for each in (words.label, words.value)]

    assert drawn() == drawn()
    assert all(text and text.isascii() and text.isprintable() for text in drawn())


def test_a_shard_gives_back_what_was_written(tmp_path: Path, canvas: Canvas) -> None:
    first = next(iter(rendered_scenes(canvas, "store", 1)))
    asked = (Query("click a", "click({})", ((1.0, 2.0, 3.0, 4.0),), "named", ("type(b)",)),)
    scene = Scene("key", first.png, (Glyph("a", 1.5, 2.0),), first.things, asked)
    assert write_shard(tmp_path / "one.scenes", [scene, first]) == 2
    back = load(tmp_path)[0]
    assert (back.glyphs, back.things, back.queries) == (scene.glyphs, scene.things, scene.queries)
    assert np.array_equal(np.asarray(back.image), np.asarray(first.image))


def test_there_is_ink_where_a_glyph_is_said_to_be(canvas: Canvas) -> None:
    inked = total = 0
    for scene in rendered_scenes(canvas, "ink", 12):
        grey = np.asarray(scene.image.convert("L"), dtype=float)
        for glyph in scene.glyphs:
            x, y = round(glyph.x), round(glyph.y)
            near = grey[max(0, y - 7) : y + 8, max(0, x - 3) : x + 4]
            inked += near.max() - near.min() > 25
            total += 1
    assert total > 300
    assert inked / total > 0.97


def test_a_page_says_which_characters_and_things_it_shows(canvas: Canvas) -> None:
    canvas.show(
        "1",
        "",
        '<div id="area"><button>Qub</button><br><input type="checkbox" checked> zed<br>'
        '<input type="text" value="w7" data-n="name"><p hidden>gone</p></div>',
    )
    scene = canvas.scene("one")
    assert sorted(glyph.character for glyph in scene.glyphs) == sorted("Qubzedw7")
    things = {thing.role: thing for thing in scene.things}
    assert things["button"] == Thing("button", "Qub", things["button"].box)
    assert (things["checkbox"].label, things["checkbox"].checked) == ("zed", True)
    assert (things["field"].label, things["field"].value) == ("name", "w7")
    left, top, right, bottom = things["button"].box
    inside = [g for g in scene.glyphs if left < g.x < right and top < g.y < bottom]
    assert "".join(glyph.character for glyph in inside) == "Qub"


def test_a_number_and_a_seed_give_the_same_page(canvas: Canvas) -> None:
    def shown(first: int) -> Scene:
        return next(iter(rendered_scenes(canvas, "again", 1, first=first)))

    one, _, again = shown(3), shown(4), shown(3)
    assert (one.key, one.glyphs, one.things) == (again.key, again.glyphs, again.things)


def test_a_page_of_one_step_is_answered_by_what_solves_it(env: MiniwobEnv) -> None:
    (scene,) = page_scenes(env, "click-button", [3], Random(0))
    (asked,) = scene.queries
    name = asked.text.split('"')[1]
    left, top, right, bottom = asked.boxes[0]
    x, y = (left + right) / 2, (top + bottom) / 2
    held = [
        thing.label
        for thing in scene.things
        if thing.box[0] < x < thing.box[2] and thing.box[1] < y < thing.box[3]
    ]
    assert asked.answer == "click({})"
    assert name in held
