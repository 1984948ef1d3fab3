"""Scenes of the embedded suites for the small base."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageChops

from envs.contract.registry import make_env
from scripts.grounding_screens import INSTRUCTIONS, grounding_screen
from scripts.shipped_models.reading.embedded_screens import Suite, desk_scene, mini_scene
from scripts.shipped_models.reading.scene import Scene


def test_a_mini_scene_is_the_tiny_bases_screen_with_its_wording() -> None:
    for seed in range(40):
        scene, screen = mini_scene(seed), grounding_screen(seed)
        assert ImageChops.difference(scene.image, screen.image).getbbox() is None
        boxes = {text: tuple(box) for text, box in screen.questions}
        for asked in scene.queries:
            if asked.kind == "mini":
                assert asked.boxes == (boxes[asked.text],)
            elif asked.kind == "mini idle":
                assert asked.boxes[0] in {tuple(sight) for sight in screen.sights}
            else:
                assert (asked.text, asked.answer) == ("what screen", screen.kind)
        assert {a.text for a in scene.queries} <= {*INSTRUCTIONS, "what screen"}


@pytest.mark.parametrize("suite", ["desk", "apps"])
def test_labels_of_reachable_widgets_are_read_inside_them(suite: Suite) -> None:
    for seed in range(30):
        scene = desk_scene(suite, seed)
        assert scene.glyphs
        for thing in scene.things:
            if thing.role == "button" and thing.label:
                left, top, right, bottom = thing.box
                inside = [g for g in scene.glyphs if left <= g.x < right and top <= g.y < bottom]
                said = "".join(g.character for g in sorted(inside, key=lambda g: g.x))
                assert said == thing.label.replace(" ", ""), scene.key


@pytest.mark.parametrize("suite", ["desk", "apps"])
def test_a_scene_at_its_start_is_what_the_environment_shows(suite: Suite) -> None:
    """The canvas that keeps characters draws the same pixels."""
    env = make_env(suite)
    shown = 0
    for seed in range(40):
        scene = desk_scene(suite, seed)
        task, _, _ = scene.key.rpartition("/")[0].rpartition("/")
        seen, _ = env.reset(seed=seed, options={"task": task})
        shown += _same(scene, seen.screenshot)
    env.close()
    assert shown > 3  # the others are some steps further


def _same(scene: Scene, png: bytes) -> bool:
    with Image.open(io.BytesIO(png)) as picture:
        return ImageChops.difference(scene.image, picture.convert("RGB")).getbbox() is None
