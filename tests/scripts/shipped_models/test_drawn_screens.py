"""Drawn screens of the small base, and the questions about them."""

from __future__ import annotations

from random import Random

import pytest

from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers.compact import CompactParser
from scripts.shipped_models.reading.drawn_screens import drawn_scene
from scripts.shipped_models.reading.faces import (
    DEJAVU,
    HELD_OUT_FONTS,
    HELD_OUT_SIZE,
    Faces,
    draw_face,
)
from scripts.shipped_models.reading.layouts import look_alikes
from scripts.shipped_models.reading.questions import questions
from scripts.shipped_models.reading.scene import Glyph, Scene, Thing
from scripts.shipped_models.reading.vocabulary import SMALL_WORDS
from scripts.shipped_models.reading.words import is_held_out

pytestmark = pytest.mark.skipif(
    not (DEJAVU / "DejaVuSans.ttf").exists(), reason="apt install fonts-dejavu-core"
)

SIZES = ((126, 126), (160, 210), (240, 315))
SCREENS = 60


def scenes(faces: Faces = "many", *, held_out_words: bool = False) -> list[Scene]:
    return [
        drawn_scene(
            seed,
            size=SIZES[seed % 3],
            faces=faces,
            held_out_words=held_out_words,
            dense=seed % 10 == 0,
        )
        for seed in range(SCREENS)
    ]


@pytest.fixture(scope="module")
def drawn() -> list[Scene]:
    return scenes()


def test_the_same_seed_draws_the_same_screen() -> None:
    one, other = (
        drawn_scene(7, size=(126, 126), faces="many", held_out_words=False) for _ in range(2)
    )
    assert one == other


def test_boxes_and_middles_lie_on_the_screen(drawn: list[Scene]) -> None:
    for scene in drawn:
        width, height = scene.image.size
        for left, top, right, bottom in (thing.box for thing in scene.things):
            assert -1 <= left < right <= width + 1, scene.key
            assert -1 <= top < bottom <= height + 1, scene.key
        for glyph in scene.glyphs:
            assert 0 <= glyph.x < width, scene.key
            assert 0 <= glyph.y < height, scene.key


def test_the_characters_of_a_label_stand_in_the_box_of_its_thing(drawn: list[Scene]) -> None:
    for scene in drawn:
        for thing in scene.things:
            if thing.role in ("button", "tab", "row", "item", "option", "link", "word", "cell"):
                assert _read(scene, thing) == thing.label.replace(" ", ""), scene.key


def test_what_a_field_holds_stands_in_its_box(drawn: list[Scene]) -> None:
    fields = [(s, t) for s in drawn for t in s.things if t.role == "field"]
    assert fields
    for scene, thing in fields:
        assert _read(scene, thing) == thing.value.replace(" ", ""), scene.key


def _read(scene: Scene, thing: Thing) -> str:
    left, top, right, bottom = thing.box
    inside = [g for g in scene.glyphs if left <= g.x < right and top <= g.y < bottom]
    return "".join(g.character for g in sorted(inside, key=lambda g: g.x))


def test_the_held_out_font_and_size_are_never_drawn_in_training() -> None:
    faces = [draw_face(Random(seed), "many") for seed in range(2000)]
    assert not {*HELD_OUT_FONTS} & {face.name for face in faces}
    assert HELD_OUT_SIZE not in {face.size for face in faces}
    assert draw_face(Random(0), "held_out_font").name in HELD_OUT_FONTS
    assert draw_face(Random(0), "held_out_size").size == HELD_OUT_SIZE


def test_words_of_a_screen_are_all_of_one_part() -> None:
    """Of the held-out part or of the other; look-alikes stay in it."""
    for held_out in (False, True):
        for scene in scenes("one", held_out_words=held_out):
            said = [thing.label for thing in scene.things if thing.role == "word"]
            if not scene.key.endswith("dense"):
                assert all(is_held_out(word) == held_out for word in said), scene.key
        rng = Random(1)
        word = next(w for w in ("kabo", "lumi", "tesa", "rodi") if not is_held_out(w))
        assert all(is_held_out(other) == held_out for other in look_alikes(rng, word, held_out))


def test_a_question_is_answered_by_a_completion_of_the_compact_action_parser(
    drawn: list[Scene],
) -> None:
    action_parser, kinds = CompactParser(), set()
    for scene in drawn:
        width, height = scene.image.size
        for asked in questions(scene, Random(scene.key), 12):
            kinds.add(asked.kind)
            points = [
                f"{min(999, int((b[0] + b[2]) / 2 / width * 1000))},"
                f"{min(999, int((b[1] + b[3]) / 2 / height * 1000))}"
                for b in asked.boxes
            ]
            if asked.kind == "is":
                assert asked.answer in ("yes", "no")
                continue
            assert asked.answer.count("{}") == len(points), asked
            action_parser.parse(
                asked.answer.format(*points), make_coordinate_map("thousandths", width, height)
            )
    assert len(kinds) > 20, kinds


def test_yes_and_no_come_equally_often(drawn: list[Scene]) -> None:
    said = [
        asked.answer
        for scene in drawn
        for seed in range(8)
        for asked in questions(scene, Random(seed), 12)
        if asked.kind == "is"
    ]
    assert 0.4 < said.count("yes") / len(said) < 0.6


def test_a_click_by_label_means_one_thing(drawn: list[Scene]) -> None:
    for scene in drawn:
        for asked in questions(scene, Random(scene.key), 12):
            if asked.text.startswith("click on ") and asked.kind == "click":
                name = asked.text.removeprefix("click on ").lower()
                labelled = {t.box for t in scene.things if t.label.lower() == name}
                assert labelled in (set(), {asked.boxes[0]}), asked


def test_words_of_the_vocabulary_are_letters_alone() -> None:
    assert all(word.isalpha() and word.isascii() for word in SMALL_WORDS)
    assert len(set(SMALL_WORDS)) == len(SMALL_WORDS) <= 450


def test_what_cannot_be_read_is_not_asked_about() -> None:
    """A label that the edge of the screen cuts off, for one."""
    thing = Thing("button", "Save as", (0.0, 0.0, 40.0, 20.0))
    png = drawn_scene(0, size=(126, 126), faces="one", held_out_words=False).png
    cut = Scene("cut", png, tuple(Glyph(c, 4.0, 4.0) for c in "Save"), (thing,))
    assert not [a for a in questions(cut, Random(0), 12) if "ave" in a.text]
