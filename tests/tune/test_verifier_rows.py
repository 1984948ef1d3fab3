"""Rows for a verifier: which places are marked, and what is kept of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image

from bus.errors import UserError
from dart_cli.cli.main import main
from dart_cli.grounding.items import Box, Item, Picture
from dart_cli.grounding.reader import read_set
from dart_cli.policy.verifier import VerifierSpec, as_png, load_verifier, mark_place
from dart_cli.tune.verifier_rows import ROWS, make_rows, marks, reach_of, read_rows

SPEC = VerifierSpec(radius=4, width=2, reach=60, prompt="{instruction} ?")


def item(x: float, y: float, side: float = 20.0, name: str = "a") -> Item:
    box = Box(x, y, x + side, y + side)
    return Item(name, Picture(Path("a.png")), (200, 100), "click", box)


def test_right_marks_are_in_the_region_and_wrong_ones_are_not() -> None:
    asked, near, far = item(50, 40), item(80, 40, name="b"), item(160, 10, name="c")
    kinds: Counter[str] = Counter()
    neighbours: Counter[tuple[float, float]] = Counter()
    for seed in range(300):
        found = marks(asked, [asked, near, far], Random(seed))
        assert [kind for kind, _ in found] == ["centre", "inside", "neighbour", "beside"]
        for kind, place in found:
            kinds[kind] += 1
            assert asked.region is not None
            assert asked.region.contains(place) == (kind in ("centre", "inside"))
            assert 0 <= place[0] < 200
            assert 0 <= place[1] < 100
        neighbours[found[2][1]] += 1
        assert 6 <= math.dist(found[3][1], (60, 50)) < 60  # just beside
    assert neighbours[90, 50] > neighbours[170, 20] > 0  # the nearest one most often


def test_an_element_within_the_region_is_no_wrong_place() -> None:
    outer, inner = item(20, 20, 60), item(45, 45, 10, name="b")
    kinds = [kind for kind, _ in marks(outer, [outer, inner], Random(0))]
    assert kinds == ["centre", "inside", "beside", "beside"]


def test_a_region_that_is_the_whole_screen_has_no_wrong_place() -> None:
    whole = replace(item(0, 0), region=Box(0, 0, 200, 100))
    assert [kind for kind, _ in marks(whole, [whole], Random(0))] == ["centre", "inside"]


def test_rows_are_the_pictures_that_a_verifier_sees_in_use(
    grounding_set: Path, tmp_path: Path
) -> None:
    counts = make_rows(grounding_set / "train", tmp_path / "rows", SPEC, limit=3)
    assert counts["centre"] == counts["inside"] == 3
    assert counts.get("neighbour", 0) + counts["beside"] == 6
    rows = json.loads((tmp_path / "rows" / ROWS).read_text())
    told = {each.id: each for each in read_set(grounding_set / "train").items}
    read = read_rows(tmp_path / "rows")
    for row, kept in zip(rows, read.items, strict=True):
        source = told[row["source"]]
        with Image.open(source.image.path) as opened:
            picture = as_png(mark_place(opened, *row["point"], SPEC))
        assert picture == kept.image.read_bytes()
        assert (kept.region is not None) == row["correct"]
    again = tmp_path / "again"
    make_rows(grounding_set / "train", again, SPEC, limit=3)
    assert read_rows(again).digest == read.digest


def test_a_crop_is_a_third_of_the_middle_screenshot(
    grounding_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = sorted(min(each.size) for each in read_set(grounding_set / "train").items)
    expected = round(sides[len(sides) // 2] / 6)
    assert reach_of(grounding_set / "train") == expected
    with pytest.raises(SystemExit):
        main(
            [
                "model",
                "verifier-rows",
                str(grounding_set / "train"),
                str(tmp_path / "rows"),
                "--limit",
                "1",
            ]
        )
    assert "centre" in capsys.readouterr().out
    assert VerifierSpec.of(tmp_path / "rows").reach == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correct": "perhaps"}, r"rows.json\[1.correct\]"),
        ({"img_filename": "../a.png"}, r"rows.json\[1\].*no picture"),
        ({"img_filename": "none.png"}, r"rows.json\[1\].*no picture"),
    ],
)
def test_a_malformed_row_is_told_by_its_index(
    grounding_set: Path, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    make_rows(grounding_set / "train", tmp_path / "rows", SPEC, limit=1)
    rows = json.loads((tmp_path / "rows" / ROWS).read_text())
    rows[1] |= change
    (tmp_path / "rows" / ROWS).write_text(json.dumps(rows))
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / "rows")


def test_a_trained_verifier_is_asked_as_its_rows_were_made(
    tune: Callable[..., Any], grounding_set: Path, tmp_path: Path
) -> None:
    make_rows(grounding_set / "train", tmp_path / "rows", SPEC, limit=2)
    out = tmp_path / "verifier"
    keys = {"tune.epochs": 6.0, "tune.batch": 8, "tune.lr": 1e-3}
    result = tune({"tune.data": [str(tmp_path / "rows")], "tune.out": out} | keys)
    assert result is not None
    assert result.curve[-1]["lm"] < result.curve[0]["lm"]
    verifier = load_verifier(out, "float32", torch.device("cpu"))
    assert verifier.spec == SPEC
    row = json.loads((tmp_path / "rows" / ROWS).read_text())[0]
    [first, *_] = read_set(grounding_set / "train").items
    with Image.open(first.image.path) as opened:
        assert 0 < verifier.score(opened, row["instruction"], *row["point"]) < 1
