"""Runs of a folder compared: their curves over one axis, the settings that differ, what was noted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_store
from dart_cli.view.compare_pages import MOST_COMPARED
from tests.data.parts import (
    a_batch,
    batch_trained,
    make_ledger,
    next_batch,
    play_group,
    small_config,
)
from tests.view.parts import Bones, Server, serving
from tests.view.test_charts import readings
from tests.view.test_hostile import HOSTILE

ODD = "b <i>&'\" #1"
BOTH = f"run=a&run={'b%20%3Ci%3E%26%27%22%20%231'}"


def play_run(run_dir: Path, updates: int, *, minutes: float, **train: object) -> None:
    """Play a run of so many updates, each after so many minutes, and two groups of which one member passed."""
    config = small_config(run_dir, train=train)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for version in range(updates):
            for _ in range(2):
                play_group(ledger, ["pass", "fail", "fail", "fail"], version=version)
            batch = a_batch(next_batch(ledger, version, 60 * minutes * (version + 1)))
            ledger.batch_trained(batch_trained(batch.batch_id, version + 1))
        store.commit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    play_run(folder / "a", 4, minutes=1, lr=0.25)
    play_run(folder / ODD, 2, minutes=5, lr=0.5)
    (folder / "a" / "notes.md").write_text(f"A note.\n{HOSTILE}", encoding="utf-8")
    (folder / "broken").mkdir()
    (folder / "broken" / "run.db").write_bytes(b"no database" * 1000)
    for at, name in enumerate(("broken", "a", ODD)):  # the newest comes first
        os.utime(folder / name / "run.db", (at, at))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


def loss(page: str) -> list[list[str]]:
    """What the chart of the loss shows under the pointer."""
    return readings(page.partition("<b>loss</b>")[2].partition("</figure>")[0])


def test_the_list_of_runs_is_the_form_that_chooses_some(server: Server) -> None:
    page = server.page("/")
    values = re.findall(r'<input type="checkbox" name="run" value="([^"]*)"', page)
    assert sorted(values) == [
        "a",
        "b &lt;i&gt;&amp;&#39;&#34; #1",
    ]  # not the one that cannot be read
    assert 'action="/compare"' in page
    assert "A note." in page
    chooser = Bones.of(server.page("/compare"))
    assert "Choose two runs or more" in chooser.text


def test_the_page_shows_what_differs_and_what_was_noted(server: Server) -> None:
    bones = Bones.of(server.page(f"/compare?{BOTH}"))
    assert "train.lr 0.5 0.25" in bones.text
    assert "run.dir" not in bones.text
    assert "data.group_size" not in bones.text
    assert "A note." in bones.text
    assert not {tag for tag, _ in bones.elements} & {"i", "script", "iframe"}
    assert not [name for _, names in bones.elements for name in names if name.startswith("on")]
    same = Bones.of(server.page("/compare?run=a&run=a")).text
    assert "Choose two runs or more" in same


def test_the_lines_of_both_runs_are_over_the_axis_that_is_asked_for(server: Server) -> None:
    versions = loss(server.page(f"/compare?{BOTH}"))
    assert [first for first, *_ in versions] == [f"policy version: {at}" for at in (1, 2, 3, 4)]
    assert {len(each) for each in versions[:2]} == {3}  # both runs are there
    assert {len(each) for each in versions[2:]} == {2}  # the shorter one has ended
    minutes = loss(server.page(f"/compare?{BOTH}&x=minutes"))
    assert [first for first, *_ in minutes] == [
        f"training, min: {at}" for at in (1, 2, 3, 4, 5, 10)
    ]
    ended = loss(server.page(f"/compare?{BOTH}&x=trajectories"))
    assert [first for first, *_ in ended] == [f"trajectories ended: {at}" for at in (8, 16, 24, 32)]


def test_a_part_of_the_axis_is_shown_alone(server: Server) -> None:
    part = loss(server.page(f"/compare?{BOTH}&x=minutes&from=2.5&to=5"))
    assert [first for first, *_ in part] == [f"training, min: {at}" for at in ("2.5", 3, 4, 5)]
    assert "Nothing is in this part" in server.page(f"/compare?{BOTH}&from=90")
    whole = Bones.of(server.page(f"/compare?{BOTH}&x=minutes&from=2.5")).links
    assert any(link.startswith("?run=a&run=b") and link.endswith("x=minutes") for link in whole)


def test_one_task_may_be_compared_instead_of_their_mean(server: Server) -> None:
    assert "Success of mini/click" in Bones.of(server.page(f"/compare?{BOTH}&task=mini/click")).text


def test_a_run_that_cannot_be_read_is_reported_beside_the_others(server: Server) -> None:
    text = Bones.of(server.page("/compare?run=a&run=broken")).text
    assert "broken: " in text
    assert "file is not a database" in text


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("run=nothing", "there is no such run"),
        ("run=a&x=versoin", "did you mean 'version'"),
        ("run=a&from=3&to=2", "want from < to"),
        ("run=a&from=nan", "want a number"),
        ("run=a&to=1e999", "want a number"),
        (
            "run=" + "&run=".join(map(str, range(MOST_COMPARED + 1))),
            f"want {MOST_COMPARED} at most",
        ),
    ],
)
def test_a_query_for_what_cannot_be_says_what_can(words: str, cure: str, server: Server) -> None:
    answer = server.get(f"/compare?{words}")
    assert answer.status == 400
    assert cure in Bones.of(answer.text).text


def test_an_unknown_task_is_not_found(server: Server) -> None:
    answer = server.get("/compare?run=a&task=mini/clik")
    assert answer.status == 404
    assert "did you mean 'mini/click'" in Bones.of(answer.text).text


def test_the_pages_of_a_run_have_the_same_axes(server: Server) -> None:
    run = server.page("/runs/a/?x=minutes&to=3")
    assert [first for first, *_ in loss(run)] == [f"training, min: {at}" for at in (1, 2, 3)]
    assert "/compare?run=a" in Bones.of(run).links
    task = server.page("/runs/a/tasks/mini/click?x=minutes")
    assert readings(task)[0][0].startswith("training, min: ")
    for path in ("/runs/a/", "/runs/a/tasks/mini/click"):
        assert server.get(f"{path}?x=hours").status == 400
