"""The explorer's contract: places, reading order, which screens are one."""

from __future__ import annotations

import pytest
from PIL import Image, ImageDraw

from envs.contract.actions import Click, Scroll, TripleClick, Type
from envs.contract.elements import (
    Box,
    Element,
    Explorable,
    GridEnv,
    Node,
    as_explorable,
    coarse_key,
    elements_of,
    grid_elements,
    performing,
    state_of,
)
from envs.contract.registry import make_env
from tests.simulated import SUITE

BOX: Box = (0, 0, 10, 10)


def leaf(role: str, name: str = "", box: Box | None = BOX, **more: bool) -> Node:
    return Node(role, name, box, ("click",), **more)


def group(*children: Node, role: str = "", box: Box | None = BOX) -> Node:
    return Node(role, "", box, (), list(children))


def test_texts_and_boxes_do_not_make_another_state() -> None:
    one = group(leaf("button", "Buy"), leaf("link", "Home"))
    other = group(leaf("button", "Sell", (5, 5, 9, 9)), leaf("link", "Start"))
    assert state_of("shop", [one]).id == state_of("shop", [other]).id


@pytest.mark.parametrize(
    "other",
    [
        group(leaf("button"), leaf("button")),
        group(leaf("link"), leaf("button")),
        group(leaf("button"), leaf("link", enabled=False)),
        group(leaf("button"), leaf("link", current=True)),
        group(leaf("button"), leaf("link", box=None)),
        group(leaf("button"), group(leaf("link"), leaf("button"))),
    ],
    ids=["role", "order", "disabled", "open", "out of sight", "more"],
)
def test_another_skeleton_is_another_state(other: Node) -> None:
    here = state_of("shop", [group(leaf("button"), leaf("link"))])
    assert state_of("shop", [other]).id != here.id


def test_another_route_is_another_state_and_the_reason_names_it() -> None:
    here, there = (state_of(route, [leaf("button")]) for route in ("inbox", "sent"))
    assert here.id != there.id
    assert "'inbox'" in here.reason


def test_a_list_is_one_state_however_long_and_a_row_of_buttons_is_not() -> None:
    def lists(rows: int) -> str:
        return state_of("", [group(*[leaf("row", str(at)) for at in range(rows)], role="view")]).id

    def cards(count: int) -> str:
        groups = [group(leaf("link"), leaf("button")) for _ in range(count)]
        return state_of("", [group(*groups, leaf("field"))]).id

    def bars(count: int) -> str:
        return state_of("", [group(*[leaf("button") for _ in range(count)])]).id

    assert lists(2) == lists(7) != lists(0)
    assert cards(2) == cards(5)
    assert bars(2) != bars(3)


def test_layout_around_one_node_is_neither_in_the_state_nor_in_the_place() -> None:
    plain = [group(leaf("button"), leaf("link"))]
    wrapped = [group(group(group(leaf("button")), group(group(leaf("link")), group())))]
    assert state_of("", plain).id == state_of("", wrapped).id
    assert [e.place for e in elements_of(plain)] == [e.place for e in elements_of(wrapped)]


def test_what_is_below_the_depth_does_not_count() -> None:
    def deep(role: str, levels: int) -> str:
        node = leaf(role)
        for _ in range(levels):
            node = group(node, role="panel")
        return state_of("", [node]).id

    assert deep("button", 9) != deep("link", 9)
    assert deep("button", 10) == deep("link", 10)


def test_a_place_stays_while_the_screen_is_scrolled() -> None:
    top = group(*[leaf("row", f"{at}", BOX if at < 3 else None) for at in range(6)], role="view")
    end = group(*[leaf("row", f"{at}", BOX if at > 1 else None) for at in range(6)], role="view")
    before = {e.name: e.place for e in elements_of([top])}
    after = {e.name: e.place for e in elements_of([end])}
    assert set(before) == {"0", "1", "2"}
    assert before["2"] == after["2"]
    assert len(set(after.values())) == 4


def test_elements_are_in_reading_order_also_beside_a_tall_view() -> None:
    view = Node("view", "all", (0, 0, 100, 100), ("scroll",))
    nodes = [
        leaf("button", "d", (5, 90, 40, 99)),
        leaf("button", "b", (60, 12, 90, 30)),
        leaf("button", "c", (60, 60, 90, 85)),
        leaf("button", "a", (5, 10, 40, 30)),
    ]
    names = [each.name for each in elements_of([view, *nodes])]
    assert [name for name in names if name != "all"] == ["a", "b", "c", "d"]


def test_what_cannot_be_used_is_no_element() -> None:
    hidden, off = leaf("button", box=None), leaf("button", enabled=False)
    assert elements_of([group(hidden, off, Node("text", "Hello", BOX))]) == []


def test_an_action_is_performed_in_the_middle() -> None:
    field = Element("field", "To", (10, 20, 31, 41), ("click", "type"), "0")
    assert performing(field, "click") == [Click(x=20, y=30)]
    assert performing(field, "type", "a@b.org") == [TripleClick(x=20, y=30), Type(text="a@b.org")]
    assert isinstance(performing(field, "scroll")[0], Scroll)


def test_the_grid_covers_the_screen_once() -> None:
    *cells, screen = grid_elements(101, 67, columns=7, rows=5)
    assert len(cells) == 35
    assert sum((e.box[2] - e.box[0]) * (e.box[3] - e.box[1]) for e in cells) == 101 * 67
    assert len({e.place for e in [*cells, screen]}) == 36
    assert screen.actions == ("scroll",)


def test_an_environment_without_a_tree_gets_a_grid() -> None:
    embedded = make_env("mini")
    assert as_explorable(embedded) == (embedded, embedded)
    env, explorable = as_explorable(make_env(SUITE))
    assert isinstance(explorable, GridEnv)
    assert isinstance(explorable, Explorable)
    observation, _ = env.reset(seed=1, options={"task": next(iter(_timed_tasks()))})
    assert all(e.box[2] <= observation.width for e in explorable.elements())
    assert explorable.state() == explorable.state()
    env.close()


def test_a_coarse_key_forgives_a_letter_and_not_a_window() -> None:
    def screen(text: str, window: bool) -> str:
        image = Image.new("RGB", (480, 320), "white")
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, 480, 24), fill="navy")
        draw.text((60, 100), text, fill="black")
        if window:
            draw.rectangle((150, 80, 330, 240), fill="grey")
        return coarse_key(image)

    assert screen("hello", window=False) == screen("hello.", window=False)
    assert screen("hello", window=False) != screen("hello", window=True)


def _timed_tasks() -> list[object]:
    from envs.contract.registry import tasks_of

    return [*tasks_of(SUITE)]
