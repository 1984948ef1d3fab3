"""Rows of an exploration: a query names one box, a screen is in one split whole, what did nothing is dropped."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from bus.errors import UserError
from dart_cli.explore.graph import GraphReader, Sight, open_graph, read_graph, screen_id
from dart_cli.explore.options import RowOptions
from dart_cli.explore.phrasing import descriptive
from dart_cli.explore.rows import is_held_out, make_rows, rows_of
from dart_cli.grounding.reader import read_set
from envs.contract.blobs import content_hash
from envs.contract.elements import Element, ScreenState, performing
from envs.contract.registry import load_suite, make_env
from tests.explore.parts import OPTIONS, walk
from tests.view.parts import png

ALL = RowOptions(per_element=0, per_screen=0, test_share=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explored") / "desk"
    walk(folder, 160)
    return folder


@pytest.fixture(scope="module")
def graph(folder: Path) -> Any:
    with read_graph(folder) as graph:
        yield graph


def test_a_query_that_names_an_element_names_no_other_of_its_screen(graph: GraphReader) -> None:
    rows = [row for row in rows_of(graph, ALL).rows if row.kind == "descriptive"]
    assert len(rows) > 40
    for row in rows:
        named = [each for each in row.screen.elements if row.query in descriptive(each)]
        assert named == [row.element], row.query
        assert row.screenshot == row.screen.screenshot


def test_a_click_on_the_box_of_an_outcome_row_leads_where_its_query_says(
    graph: GraphReader,
) -> None:
    """Each is played again: the walk to the screen, then the click."""
    screens = {each.id: each for each in graph.screens()}
    rows = [row for row in rows_of(graph, ALL).rows if row.kind == "outcome"]
    assert len(rows) > 8
    env: Any = make_env("desk", **OPTIONS)
    starts = {each.episode: each for each in graph.starts()}
    steps_played = 0
    for edge in graph.edges():
        row = next(
            (
                each
                for each in rows
                if (each.screen.id, each.screenshot, each.element)
                == (edge.before, edge.shot_before, edge.element)
                and edge.outcome == "moved"
                and edge.action in ("click", "double_click")
            ),
            None,
        )
        if row is None or steps_played == 6:
            continue
        rows.remove(row)
        steps_played += 1
        start = starts[edge.episode]
        observation, _ = env.reset(
            seed=start.seed, options={"task": load_suite("desk").tasks[start.task], "free": True}
        )
        for step in graph.edges(episode=edge.episode):
            if step.step == edge.step:
                break
            for action in performing(step.element, step.action, step.text):  # type: ignore[arg-type]
                observation, *_ = env.step(action)
        assert content_hash(observation.screenshot) == row.screenshot
        before = {name for each in env.elements() for name in [each.name]}
        [action] = performing(row.element, edge.action)  # type: ignore[arg-type]
        env.step(action)
        quoted = row.query.split('"')[1::2]
        if row.query.startswith("go to"):
            assert env.state().route == screens[str(edge.after)].route == quoted[0]
        else:
            after = {each.name for each in env.elements()}
            shows = row.query.startswith("show")
            assert set(quoted) <= (after - before if shows else before - after), row.query
    env.close()
    assert steps_played == 6


def test_what_did_nothing_is_no_row(graph: GraphReader) -> None:
    outcomes = defaultdict(set)
    for edge in graph.edges():
        outcomes[edge.before, edge.element.place].add(edge.outcome)
    still = {key for key, result in outcomes.items() if result == {"none"}}
    assert still
    result = rows_of(graph, ALL)
    assert not still & {(row.screen.id, row.element.place) for row in result.rows}
    assert result.left_out["nothing happened"] > 0


def test_a_screen_is_in_one_split_whole_and_stays_there_when_more_is_explored(
    folder: Path, graph: GraphReader, tmp_path: Path
) -> None:
    walk(tmp_path / "less", 60)
    splits: dict[str, set[str]] = defaultdict(set)
    pictures: dict[str, set[str]] = defaultdict(set)
    with read_graph(tmp_path / "less") as less:
        for result in (rows_of(graph, ALL), rows_of(less, ALL)):
            for row in result.rows:
                splits[row.screen.id].add(row.split)
                pictures[row.split].add(row.screenshot)
    assert all(len(each) == 1 for each in splits.values())
    assert Counter(next(iter(each)) for each in splits.values()).keys() == {"train", "test"}
    assert not pictures["train"] & pictures["test"]


def test_the_share_that_is_held_out_is_the_one_asked_for() -> None:
    ids = [content_hash(f"{at}".encode()) for at in range(4000)]
    for share in (0.0, 0.2, 1.0):
        assert sum(is_held_out(each, share) for each in ids) / 4000 == pytest.approx(
            share, abs=0.02
        )
    assert {each for each in ids if is_held_out(each, 0.1)} < {
        each for each in ids if is_held_out(each, 0.2)
    }


def test_caps_bound_rows_of_an_element_and_of_a_screen(graph: GraphReader) -> None:
    options = RowOptions(per_element=1, per_screen=3, limit=20, test_share=0.3)
    result = rows_of(graph, options)
    elements = Counter(
        (row.split, row.kind, row.screen.application, row.element.role, row.element.name)
        for row in result.rows
    )
    assert max(elements.values()) == 1
    assert max(Counter((row.kind, row.screen.id) for row in result.rows).values()) == 3
    assert sum(row.split == "train" for row in result.rows) == 20
    assert result.left_out["cap of its element"] > 0
    assert result.left_out["cap of its screen"] > 0
    assert result.left_out["limit"] > 0


def test_a_set_is_read_without_a_word(graph: GraphReader, tmp_path: Path) -> None:
    report = make_rows(graph, tmp_path / "set", ALL)
    for split in ("train", "test"):
        plain = read_set(tmp_path / "set" / split)
        assert (plain.layout.name, plain.malformed) == ("screenspot", [])
        assert len(plain.items) == report["splits"][split]["rows"] > 0
        kinds = Counter(item.traits["query"][0] for item in plain.items)
        assert kinds == report["splits"][split]["queries"]
    assert json.loads((tmp_path / "set" / "set.json").read_text()) == report


def by_hand(folder: Path, screens: dict[str, tuple[str, tuple[tuple[str, str], ...]]]) -> None:
    """A graph of starts alone: state -> colour of its picture, and role and name of its elements."""
    with open_graph(folder) as graph:
        for state, (colour, named) in screens.items():
            elements = tuple(
                Element(role, name, (10, 20 * at, 90, 20 * at + 16), ("click",), f"{at}")
                for at, (role, name) in enumerate(named)
            )
            sight_fields = ScreenState(state, "", ""), elements, png(320, 200, colour), 320, 200
            graph.add_start("task", 0, 0, Sight("app", *sight_fields))


def test_of_two_elements_with_one_name_none_is_asked_for_by_it(tmp_path: Path) -> None:
    elements = (("button", "Save"), ("button", "Save"), ("button", "Mail"), ("tab", "Mail"))
    by_hand(tmp_path / "graph", {"a": ("teal", elements)})
    with read_graph(tmp_path / "graph") as graph:
        found = rows_of(graph, ALL)
    assert {row.query for row in found.rows} == {'click the "Mail" button', 'open the "Mail" tab'}
    assert found.left_out["named like another element"] == 2


def test_a_picture_of_the_test_split_is_in_no_row_for_training(tmp_path: Path) -> None:
    """Where two screens look alike, and one of them is held out."""
    is_in_test = {state: is_held_out(screen_id("app", state), 0.3) for state in map(str, range(40))}
    out, in_train, other = (
        next(state for state, is_out in is_in_test.items() if is_out),
        *[state for state, is_out in is_in_test.items() if not is_out][:2],
    )
    name = (("button", "Save"),)
    by_hand(
        tmp_path / "graph", {out: ("teal", name), in_train: ("teal", name), other: ("navy", name)}
    )
    with read_graph(tmp_path / "graph") as graph:
        result = rows_of(graph, ALL)
    assert {(row.screen.state, row.split) for row in result.rows} == {
        (out, "test"),
        (other, "train"),
    }
    assert result.left_out["its picture is held out"] == 1


def test_mistakes_are_told_before_anything_is_written(graph: GraphReader, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="name a folder that is not there yet"):
        make_rows(graph, tmp_path / "full", ALL)
    with open_graph(tmp_path / "empty") as empty, pytest.raises(UserError, match="gives no rows"):
        make_rows(empty, tmp_path / "out", ALL)
    assert not (tmp_path / "out").exists()
