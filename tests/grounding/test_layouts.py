"""Published layouts: each is read as its own evaluator reads it, and what is wrong is named by row."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from bus.errors import UserError
from dart_cli.grounding.items import Box, Polygon, pictures_digest
from dart_cli.grounding.layouts import LAYOUTS
from dart_cli.grounding.reader import read_set
from tests.grounding.sets import (
    BOX,
    FILE,
    SETS,
    SIZE,
    read,
    screen,
    screenspot_parquet,
    write,
)


def test_every_layout_has_a_set_here() -> None:
    assert [layout.name for layout in LAYOUTS] == list(SETS)


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_known_by_its_files_and_its_boxes_are_pixels(name: str, tmp_path: Path) -> None:
    SETS[name](tmp_path)
    told = read_set(tmp_path)
    assert (told.layout.name, told.malformed) == (name, [])
    assert len(told.items) >= 2
    for item in told.items:
        assert item.size == SIZE
        assert Image.open(io.BytesIO(item.image.read_bytes())).size == SIZE
        assert item.instruction == "click the red button"
        if isinstance(item.region, Box) and not item.id.endswith("L2_annotations.json[2]"):
            assert item.region == Box(*BOX)
    assert len({item.id for item in told.items}) == len(told.items)
    assert read_set(tmp_path, name) == told


def traits(folder: Path) -> list[dict[str, Any]]:
    return [dict(item.traits) for item in read_set(folder).items]


def test_scores_are_told_by_what_each_set_says_of_a_row(tmp_path: Path) -> None:
    for name, make in SETS.items():
        make(tmp_path / name)
    assert traits(tmp_path / "screenspot")[1] == {
        "platform": ("gitlab",),
        "group": ("web",),
        "element": ("icon",),
        "group, element": ("web, icon",),
    }
    assert traits(tmp_path / "screenspot-v2-new")[0]["group, element"] == ("desktop, text",)
    assert traits(tmp_path / "screenspot-pro")[0] == {
        "platform": ("windows",),
        "group": ("CAD",),
        "application": ("blender",),
        "element": ("icon",),
        "group, element": ("CAD, icon",),
    }
    assert traits(tmp_path / "osworld-g")[0] == {
        "type": ("Button", "Label"),
        "category": ("text_matching",),
    }
    assert traits(tmp_path / "osworld-g")[1]["category"] == ("unclassified",)
    assert traits(tmp_path / "ui-vision")[1] == {
        "application": ("VSCode",),
        "element": ("Button",),
        "category": ("spatial",),
    }
    assert traits(tmp_path / "mmbench-gui-l2")[1] == {
        "platform": ("os_ios",),
        "application": ("calendar",),
        "element": ("icon",),
        "category": ("advanced",),
    }


def test_a_polygon_a_refusal_and_a_missing_edge(tmp_path: Path) -> None:
    SETS["osworld-g"](tmp_path / "g")
    told = read_set(tmp_path / "g")
    assert told.items[1].region == Polygon(((40, 20), (100, 20), (40, 50)))
    assert told.items[2].region is None
    assert told.refusals == 1
    SETS["mmbench-gui-l2"](tmp_path / "m")
    assert read_set(tmp_path / "m").items[2].region == Box(0, 0, 100, 50)


def test_a_file_that_repeats_the_others_is_read_where_it_is_alone(tmp_path: Path) -> None:
    SETS["screenspot-pro"](tmp_path)
    both = read_set(tmp_path)
    for path in (tmp_path / "annotations").iterdir():
        if path.name != "all.json":
            path.unlink()
    alone = read_set(tmp_path)
    assert len(both.items) == len(alone.items) == 2
    assert [item.id for item in alone.items] == [f"annotations/all.json[{i}]" for i in range(2)]


def test_a_folder_of_no_set_or_of_several_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no known set .*screenspot-pro: annotations/\*\.json"):
        read_set(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        read_set(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no such layout; did you mean 'screenspot-pro'\?"):
        read_set(tmp_path, "screenspot-por")
    with pytest.raises(UserError, match=r"has no OSWorld-G\.json"):
        read_set(tmp_path, "osworld-g")
    SETS["osworld-g"](tmp_path)
    SETS["osworld-g-refined"](tmp_path)
    with pytest.raises(UserError, match="any of osworld-g, osworld-g-refined; choose one with"):
        read_set(tmp_path)
    assert read_set(tmp_path, "osworld-g-refined").layout.name == "osworld-g-refined"


def altered(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda row: {**row, **changes}


def lacking(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: {name: value for name, value in row.items() if name != key}


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no object": ("screenspot", lambda _: [1, 2], "must be an object"),
    "no key": ("screenspot", lacking("bbox"), "has no 'bbox'"),
    "no text": ("screenspot", altered(instruction=" "), "instruction must be a text, got ' '"),
    "no picture": ("screenspot", altered(img_filename="b.png"), "no picture screenspot_imgs/b.png"),
    "outside": ("screenspot", altered(img_filename="../../a.png"), "leads out of the set's folder"),
    "absolute": ("screenspot", altered(img_filename="/etc/a.png"), "leads out of the set's folder"),
    "three numbers": ("screenspot", altered(bbox=[1, 2, 3]), "must have four numbers, has 3"),
    "no numbers": ("screenspot", altered(bbox="1 2 3 4"), "must be a list of numbers"),
    "true": ("screenspot", altered(bbox=[1, 2, 3, True]), "must be a list of numbers"),
    "not finite": ("screenspot", altered(bbox=[1, 2, 3, float("nan")]), "must be a list of number"),
    "negative": ("screenspot", altered(bbox=[50, 50, -9, 9]), "width and height must be >= 0"),
    "beside": ("screenspot", altered(bbox=[900, 50, 9, 9]), "lies outside of 200x100 pixels"),
    "shares": (
        "screenspot",
        altered(bbox=[0.84, 0.79, 0.15, 0.04]),
        "holds no pixel of 200x100: no click can hit it; are its numbers shares of the sides?",
    ),
    "at the edge": ("screenspot", altered(bbox=[200, 50, 9, 9]), "holds no pixel of 200x100"),
    "below the edge": ("screenspot", altered(bbox=[50, 100, 9, 9]), "holds no pixel of 200x100"),
    "between pixels": ("screenspot", altered(bbox=[10.5, 10.5, 0.4, 0.4]), "no click can hit it"),
    "thin triangle": (
        "osworld-g",
        altered(box_type="polygon", box_coordinates=[10.2, 10.2, 10.8, 10.2, 10.5, 19.9]),
        "no click can hit it",
    ),
    "xywh": ("screenspot-pro", altered(bbox=[60, 40, 30, 20]), "left must be <= right"),
    "other size": ("screenspot-pro", altered(img_size=[400, 200]), "has 200x100 pixels"),
    "two corners": (
        "osworld-g",
        altered(box_type="polygon", box_coordinates=[1, 2, 3, 4]),
        "three corners or more",
    ),
    "other box": ("osworld-g", altered(box_type="circle"), "must be one of bbox, polygon, refusal"),
    "no types": ("osworld-g", altered(GUI_types="Button"), "GUI_types must be a list of texts"),
    "platform": ("mmbench-gui-l2", altered(platform="../x"), "leads out of the set's folder"),
}


def test_pictures_of_a_parquet_file_are_those_of_their_rows(tmp_path: Path) -> None:
    """Over several row groups, whatever is asked for first."""
    screenspot_parquet(tmp_path, rows=7)
    told = read_set(tmp_path)
    assert [item.id for item in told.items] == [f"{FILE}[{i}]" for i in range(7)]
    for index in (6, 0, 3, 5, 1, 6, 2, 4):
        picture = Image.open(io.BytesIO(told.items[index].image.read_bytes()))
        assert picture.getpixel((199, 99)) == (index, 0, 0)


def test_a_parquet_file_without_pictures_is_refused(tmp_path: Path) -> None:
    screenspot_parquet(tmp_path, rows=1)
    table = pq.read_table(tmp_path / FILE)
    pq.write_table(table.drop_columns(["image"]), tmp_path / FILE)
    with pytest.raises(UserError, match="has no column 'image'"):
        read_set(tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_set(tmp_path)


def test_shares_beyond_the_screen_are_a_mistake(tmp_path: Path) -> None:
    screenspot_parquet(tmp_path, rows=2, box=[10.0, 20.0, 30.0, 40.0])
    told = read_set(tmp_path)
    assert not told.items
    assert told.malformed[1].startswith(f"{FILE}[1]: bbox [10.0, 20.0, 30.0, 40.0]: must be shares")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_malformed_row_is_named_by_file_and_index(mistake: str, tmp_path: Path) -> None:
    name, change, reason = MISTAKES[mistake]
    SETS[name](tmp_path)
    [path, *_] = read_set(tmp_path).layout.paths(tmp_path)
    [good, *_] = read(path)
    write(path, [good, change(good), good])
    told = read_set(tmp_path, name)
    [line] = told.malformed
    assert line.startswith(f"{path.relative_to(tmp_path)}[1]: ")
    assert reason in line
    assert "\n" not in line
    kept = [item.id for item in told.items if item.id.startswith(f"{path.relative_to(tmp_path)}[")]
    assert [place[-3:] for place in kept] == ["[0]", "[2]"]


def test_a_picture_that_cannot_be_read_is_its_rows_mistake(tmp_path: Path) -> None:
    SETS["screenspot"](tmp_path)
    (tmp_path / "screenspot_imgs" / "web.png").write_bytes(b"not a picture")
    told = read_set(tmp_path)
    assert [line.partition(":")[0] for line in told.malformed] == ["screenspot_web.json[0]"]
    assert "web.png is no picture" in told.malformed[0]


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    SETS["screenspot"](tmp_path)
    for content in ("{", '{"rows": []}'):
        (tmp_path / "screenspot_web.json").write_text(content)
        with pytest.raises(UserError, match=r"screenspot_web\.json"):
            read_set(tmp_path)


def test_classes_of_another_form_are_refused(tmp_path: Path) -> None:
    SETS["osworld-g"](tmp_path)
    write(tmp_path / "classification_result.json", {"text_matching": ["a"]})
    with pytest.raises(UserError, match=r"classification_result\.json must be"):
        read_set(tmp_path)


def test_other_pictures_of_the_same_names_are_another_set(tmp_path: Path) -> None:
    SETS["screenspot"](tmp_path)
    items = read_set(tmp_path).items
    before = pictures_digest(items)
    assert pictures_digest(items) == before
    picture = items[0].image.path
    Image.new("RGB", SIZE, "lime").save(picture)
    assert pictures_digest(read_set(tmp_path).items) != before


def test_other_annotations_are_another_set(tmp_path: Path) -> None:
    SETS["screenspot"](tmp_path)
    before = read_set(tmp_path).digest
    screen(tmp_path / "screenspot_imgs" / "more.png")
    assert read_set(tmp_path).digest == before
    [row] = read(tmp_path / "screenspot_web.json")
    write(tmp_path / "screenspot_web.json", [{**row, "instruction": "click the other"}])
    assert read_set(tmp_path).digest != before
