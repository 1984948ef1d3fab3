"""The set from our own environments: its boxes are where a click works, and its splits are apart."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import UserError
from dart_cli.grounding.items import Box
from dart_cli.grounding.reader import read_set
from envs.contract.registry import load_suite, make_env
from scripts import make_grounding_set as made
from scripts.make_grounding_set import SOURCES, Split, held_out, make_set

COUNTS: dict[Split, int] = {"train": 40, "test": 40, "test_application": 40, "test_layout": 40}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both embedded suites."""
    out = tmp_path_factory.mktemp("made") / "set"
    make_set(out, ["mini", "desk"], COUNTS)
    return out


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in folder.glob("*.json") for row in json.loads(path.read_text())]


def test_each_split_is_a_set_in_screenspots_layout(sets: Path) -> None:
    for split in COUNTS:
        told = read_set(sets / split)
        assert (told.layout.name, told.malformed, len(told.items)) == ("screenspot", [], 80)
        assert {item.traits["environment"] for item in told.items} == {("mini",), ("desk",)}
        assert all(item.traits["size"] == ("{}x{}".format(*item.size),) for item in told.items)
        assert {item.traits["element"] for item in told.items} == {("text",), ("icon",)}
    listed = json.loads((sets / "set.json").read_text())["splits"]
    assert {name: each["rows"] for name, each in listed.items()} == dict.fromkeys(COUNTS, 80)


def test_a_row_leads_to_its_screen_again_and_its_box_to_the_widget(sets: Path) -> None:
    """The middle of the box is on the widget that its instruction names; so is no other's."""
    seen = 0
    for row in rows(sets / "test_layout")[::8]:
        suite, kind, seed, steps, size = row["screen_id"].split("/")
        env: Any = make_env(suite, size=size)
        shot, _ = env.reset(seed=int(seed), options={"task": f"{suite}/{kind}"})
        for _ in range(int(steps)):
            shot, *_ = env.step(env.oracle_action())
        image = sets / "test_layout" / "screenspot_imgs" / row["img_filename"]
        assert image.read_bytes() == shot.screenshot
        x, y, width, height = row["bbox"]
        here = [
            each for each in SOURCES[suite].targets(env) if each.instruction == row["instruction"]
        ]
        assert [Box(*each.box) for each in here] == [Box(x, y, x + width, y + height)]
        holding = [
            widget
            for widget in env.widgets()
            if widget.bbox.contains(round(x + width / 2), round(y + height / 2))
        ]
        assert holding
        seen += 1
    assert seen >= 8


def test_splits_hold_what_training_never_saw(sets: Path) -> None:
    by = {split: rows(sets / split) for split in COUNTS}
    trained = {(row["environment"], row["application"]) for row in by["train"]}
    apart = {(row["environment"], row["application"]) for row in by["test_application"]}
    assert trained
    assert not trained & apart
    assert apart == {(name, each) for name in ("mini", "desk") for each in held_out(SOURCES[name])}

    def sizes(split: Split) -> set[str]:
        return {row["screen_id"].rpartition("/")[2] for row in by[split]}

    assert sizes("train") == sizes("test") == sizes("test_application") == {"168x168", "448x336"}
    assert not sizes("train") & sizes("test_layout")
    assert len(sizes("test_layout")) == 6
    seeds = {split: [int(row["screen_id"].split("/")[2]) for row in by[split]] for split in by}
    assert max(seeds["train"]) < 1_000_000
    assert all(min(seeds[split]) >= 1_000_000 for split in by if split != "train")
    for listed in by.values():
        keys = [(row["img_filename"], row["instruction"]) for row in listed]
        assert len(set(keys)) == len(keys)


def test_the_same_arguments_make_the_same_set(sets: Path, tmp_path: Path) -> None:
    make_set(tmp_path / "again", ["mini", "desk"], {"test": 40})
    assert rows(tmp_path / "again" / "test") == rows(sets / "test")
    make_set(tmp_path / "other", ["mini", "desk"], {"test": 40}, seed=1)
    assert rows(tmp_path / "other" / "test") != rows(sets / "test")


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(UserError, match="exists; name a folder"):
        make_set(tmp_path / "full", ["mini"], {"test": 1})
    with pytest.raises(UserError, match="no environment 'osworld' here; there are mini, desk"):
        make_set(tmp_path / "new", ["osworld"], {"test": 1})


def test_pages_are_asked_for_what_is_written_on_them(tmp_path: Path) -> None:
    suite: Any = load_suite("miniwob")
    try:
        suite.check_parts()
    except UserError as error:
        pytest.skip(str(error))
    make_set(tmp_path / "set", ["miniwob"], {"test": 3})
    told = read_set(tmp_path / "set" / "test")
    assert [item.traits["group"] for item in told.items] == [("web",)] * 3
    assert all(item.size == (160, 210) for item in told.items)


def test_applications_are_asked_by_what_they_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a desktop: what is hidden, disabled, nameless or of another role is no target."""
    from envs.suites.desktop import accessibility

    widget = {
        "role": "push button",
        "name": "Save",
        "text": "",
        "box": [10, 20, 24, 24],
        "showing": True,
        "sensitive": True,
    }
    reported = [
        widget,
        {**widget, "role": "menu item", "name": "Open", "box": [0, 0, 90, 20]},
        {**widget, "showing": False},
        {**widget, "sensitive": False},
        {**widget, "name": " "},
        {**widget, "role": "frame"},
        {**widget, "box": None},
    ]
    monkeypatch.setattr(accessibility, "read_widgets", lambda _: reported)
    found = made.SOURCES["desktop"].targets(SimpleNamespace(desktop=None))
    assert [(each.instruction, each.box, each.has_text) for each in found] == [
        ('click "Save"', (10, 20, 34, 44), False),
        ('click "Open" in the menu', (0, 0, 90, 20), True),
    ]


def test_the_script_makes_a_set_and_ends_with_2_for_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_grounding_set.py"

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", [str(script), "--out", str(tmp_path / "set"), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return int(ended.value.code or 0)

    assert run("--envs", "mini,nowhere") == 2
    assert "no environment 'nowhere' here" in capsys.readouterr().err
    assert run("--envs", "mini", "--items", "4", "--train", "2") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"train": 2, "test": 4, "test_application": 4, "test_layout": 4}
    assert run("--envs", "mini") == 2
    assert "exists; name a folder" in capsys.readouterr().err
