"""Films of a policy that points: heat, regions and candidates over the screenshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from bus.messages import PointerCandidate, PointerMap
from dart_cli.evaluation.films import Film, FilmFrame
from dart_cli.evaluation.filmstrip_png import film_strip, heated
from dart_cli.evaluation.marks import action_words, marks_of, outline, step_words

HEAT = [[0, 255, 0, 0], [0, 128, 0, 60]]
POINTED = PointerMap(
    position=3,
    rows=2,
    columns=4,
    heat=bytes(np.array(HEAT, np.uint8)),
    candidates=[PointerCandidate(x=0.375, y=0.4, score=0.4)],
)


def test_an_outline_surrounds_the_cells_of_regions_alone() -> None:
    edges = {(1, 0, 1, 1), (1, 1, 1, 2), (2, 0, 2, 1), (2, 1, 2, 2), (1, 0, 2, 0), (1, 2, 2, 2)}
    found = outline(np.array(HEAT, np.uint8))
    assert len(found) == len(edges)
    assert set(found) == edges
    assert outline(np.zeros((2, 2), np.uint8)) == []


def test_heat_is_in_proportion_to_probability() -> None:
    shot = heated(Image.new("RGB", (400, 200), "white"), [POINTED])
    red = [shot.getpixel((x, y))[0] for x, y in [(110, 10), (110, 190), (350, 190), (10, 10)]]  # type: ignore[index]
    assert red == sorted(red)
    assert len(set(red)) == 4
    assert red[-1] == 255


def test_every_action_of_a_step_is_marked_and_named_in_order() -> None:
    click, typed = {"kind": "click", "x": 40, "y": 50}, {"kind": "type", "text": "a"}
    drag = {"kind": "drag", "path": [[1, 2], [5, 6]]}
    marks = marks_of([click, typed, drag], 320)
    assert marks == [*marks_of([click], 320), *marks_of([drag], 320)]
    assert [type(mark).__name__ for mark in marks] == ["Ring", "Line", "Ring"]
    assert step_words([click, typed]) == "click 40,50, then type text a"
    assert step_words([click]) == action_words(click)


def test_a_film_shows_where_the_policy_looked(tmp_path: Path) -> None:
    Image.new("RGB", (400, 200), "white").save(tmp_path / "a.png")
    action = {"kind": "click", "x": 150, "y": 40}
    strips = []
    for pointed in ([], [POINTED]):
        one = FilmFrame(screenshot="a.png", text="click(375,200)", action=action, pointed=pointed)
        film = Film(
            task_id="t",
            seed=1,
            instruction="",
            outcome="pass",
            reason="",
            frames=[one],
            last="a.png",
        )
        assert Film.model_validate_json(film.model_dump_json()) == film
        strips.append(np.asarray(film_strip(tmp_path, film, "t", "")))
    changed = (strips[1] != strips[0]).any(axis=2)
    assert 0.03 < changed.mean() < 0.2
