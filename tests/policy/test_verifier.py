"""What a verifier sees, what its score is, and which candidate it chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bus.errors import EngineError, ModelError
from dart_cli.config.model_folder import VERIFIER
from dart_cli.config.schema import PolicyConfig
from dart_cli.policy.forward import logits
from dart_cli.policy.loader import load_policy
from dart_cli.policy.prompt import make_renderer
from dart_cli.policy.verifier import (
    Verifier,
    VerifierSpec,
    as_png,
    first_good,
    mark_place,
    open_screenshot,
)

SPEC = VerifierSpec(radius=5, width=2, reach=20)


def test_a_mark_is_a_red_ring_around_the_place_in_the_middle_of_the_crop() -> None:
    screen = Image.new("RGB", (200, 100), "white")
    picture = mark_place(screen, 90.2, 49.6, SPEC)
    assert picture.size == (40, 40)
    y, x = np.mgrid[:40, :40]
    distance = np.hypot(x - 20, y - 20)
    red = np.all(np.asarray(picture) == (255, 0, 0), axis=2)
    assert not red[distance < 2.5].any()
    assert not red[distance > 6.1].any()
    assert red[20, 15]
    assert red[25, 20]
    assert screen.getcolors() == [(200 * 100, (255, 255, 255))]  # as it was


@pytest.mark.parametrize(
    ("place", "size", "ring"),
    [((0, 0), (20, 20), (5, 0)), ((199, 99), (21, 21), (15, 20)), ((500, 50), (21, 40), None)],
)
def test_a_crop_ends_where_the_screenshot_does(
    place: tuple[float, float], size: tuple[int, int], ring: tuple[int, int] | None
) -> None:
    picture = mark_place(Image.new("RGB", (200, 100), "white"), *place, SPEC)
    assert picture.size == size
    if ring is not None:
        assert picture.getpixel(ring) == (255, 0, 0)


def test_the_first_candidate_that_is_good_enough_ends_the_search() -> None:
    asked: list[float] = []

    def scores() -> Iterator[float]:
        for score in (0.2, 0.85, 0.99):
            asked.append(score)
            yield score

    assert first_good(scores(), 0.8) == (1, [0.2, 0.85])
    assert asked == [0.2, 0.85]  # the third was never computed


def test_where_none_is_good_enough_the_best_is_chosen_and_of_equals_the_first() -> None:
    assert first_good([0.3, 0.6, 0.5, 0.6], 0.9) == (1, [0.3, 0.6, 0.5, 0.6])
    assert first_good([0.4, 0.4], 0.9)[0] == 0


def test_a_score_is_the_share_of_true_of_both_answers(tmp_path: Path) -> None:
    policy = load_policy("builtin:tiny")
    renderer = make_renderer(policy, PolicyConfig(template="{instruction} click"))
    screen = Image.effect_noise((168, 168), 90).convert("RGB")
    found = Verifier(policy, renderer, SPEC).score(screen, "red button", 50, 60)
    picture = as_png(mark_place(screen, 50, 60, SPEC))
    prompt = renderer.render("red button", [], picture)
    values = logits(policy.model, policy.inputs([prompt.token_ids], [prompt.images]), last=1)
    p = np.exp(values[0, -1].detach().double().numpy())
    true, false = p[policy.encode("T")[0]], p[policy.encode("F")[0]]
    assert found == pytest.approx(true / (true + false), rel=1e-6)


def test_a_folder_without_its_file_is_no_verifier(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no verifier.*dart tune --data ROWS"):
        VerifierSpec.of(tmp_path)
    SPEC.write(tmp_path)
    assert VerifierSpec.of(tmp_path) == SPEC
    (tmp_path / VERIFIER).write_text('{"radius": 0}')
    with pytest.raises(ModelError, match=r"verifier.json"):
        VerifierSpec.of(tmp_path)


def test_a_screenshot_that_is_none_is_told() -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        open_screenshot(b"no picture")
