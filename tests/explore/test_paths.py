"""Ways through a graph against brute force, and the words for what is on a screen."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest

from dart_cli.explore.graph import Edge, Outcome, Screen
from dart_cli.explore.paths import paths_from, steady, tried
from dart_cli.explore.phrasing import (
    descriptive,
    labels_of,
    names_of,
    outcome,
    spoken,
    title_of,
)
from dart_cli.explore.tasks import goals_of
from envs.contract.elements import Element


def edge(step: int, before: str, place: str, after: str | None, outcome: Outcome = "moved") -> Edge:
    element = Element("button", place, (0, 0, 9, 9), ("click",), place)
    return Edge(step, 0, 1, before, element, "click", "", after, outcome, "", "", "")


def screen(
    key: str, route: str = "", names: str = "", *, application: str = "a", ended: bool = False
) -> Screen:
    elements = tuple(
        Element("button", name, (0, 10 * at, 9, 10 * at + 9), ("click",), f"{at}")
        for at, name in enumerate(names.split())
    )
    return Screen(key, application, key, route, "", "", 100, 100, elements, 0, 0, 1, ended)


@pytest.mark.parametrize("seed", range(5))
def test_paths_are_as_short_as_any_walk_finds(seed: int) -> None:
    rng = Random(seed)
    names = "abcdef"
    edges = [edge(at, rng.choice(names), f"{at}", rng.choice(names)) for at in range(1, 12)]
    edges = [each for each in edges if each.before != each.after]
    paths = paths_from("a", steady(edges))
    moves = {(each.before, each.after) for each in edges}
    for target in names[1:]:
        shortest = next(
            (
                length
                for length in range(1, 6)
                for way in product(names, repeat=length - 1)
                if all(pair in moves for pair in zip(["a", *way], [*way, target], strict=True))
            ),
            None,
        )
        assert (len(paths[target]) if target in paths else None) == shortest
        if target in paths:
            path = paths[target]
            ends = pairwise(path)
            assert all(one.after == other.before for one, other in ends)
            assert (path[0].before, path[-1].after) == ("a", target)


def test_steps_that_once_led_elsewhere_are_not_steady() -> None:
    edges = [
        edge(1, "a", "x", "b"),
        edge(2, "a", "y", "b"),
        edge(3, "a", "x", "c"),
        edge(4, "a", "z", "a", "none"),
        edge(5, "a", "y", "b"),
        edge(6, "a", "w", "c"),
        edge(7, "a", "w", None, "error"),
    ]
    assert {key: [each.step for each in found] for key, found in steady(edges).items()} == {
        "a": [2]
    }
    assert [each.step for each in tried(edges)["a", "y", "click"]] == [2, 5]


@pytest.mark.parametrize(
    ("role", "name", "first"),
    [
        ("push button", "Save", 'click the "Save" button'),
        ("tab", "Sound", 'open the "Sound" tab'),
        ("Combo", "  Text \n size ", 'open the "Text size" list'),
        ("canvas", "Map", 'click "Map"'),
        ("button", "", ""),
        ("button", "x" * 61, ""),
    ],
)
def test_an_element_is_asked_for_by_its_name_and_role(role: str, name: str, first: str) -> None:
    ways = descriptive(Element(role, name, (0, 0, 9, 9), ("click",), "0"))
    assert next(iter(ways), "") == first


@pytest.mark.parametrize(
    ("before", "after", "whole", "query"),
    [
        (screen("1", "Mail"), screen("2", "Mail > New"), True, 'go to "Mail > New"'),
        (screen("1", "a:1", "A"), screen("2", "b:1", "A B C D"), True, 'show "B" and "C"'),
        (screen("1", "Mail", "A B"), screen("2", "Mail", "A"), True, 'make "B" go away'),
        (screen("1", "Mail", "A B"), screen("2", "Mail", "A"), False, ""),
        (screen("1", "Mail", "A"), screen("2", "Mail", "A"), True, ""),
        (screen("1", "Mail", "A"), screen("2", "Mail", "B", ended=True), True, ""),
    ],
)
def test_an_outcome_is_told_by_what_is_new(
    before: Screen, after: Screen, whole: bool, query: str
) -> None:
    shows, had = names_of(after.elements), names_of(before.elements)
    other = Element("icon", "Z", (0, 0, 9, 9), ("click",), "9")
    assert outcome(before, after, other, shows=shows, had=had, whole=whole) == query


def test_an_outcome_never_names_the_element_itself() -> None:
    inbox, sent = screen("1", "mail/Inbox", "Sent New"), screen("2", "mail/Sent", "Sent Old Ann")

    def phrase_for(name: str) -> str:
        element = Element("item", name, (0, 0, 9, 9), ("click",), "0")
        names = {"shows": names_of(sent.elements), "had": names_of(inbox.elements)}
        return outcome(inbox, sent, element, **names)

    assert phrase_for("letters") == 'go to "Sent"'
    assert phrase_for("sent") == 'show "Old" and "Ann"'
    inbox, sent = screen("1", "Mail", "New"), screen("2", "Mail", "Old Ann")
    assert phrase_for("old") == 'show "Ann"'


@pytest.mark.parametrize(
    ("route", "title"),
    [
        ("Settings > Sound", "Settings > Sound"),
        ("mail/folder/Sent", "Sent"),
        ("mail/folder/Inbox + menu.Help", "Help"),
        ("mail/settings/Account + Check mail", "Check mail"),
        ("com.example.app/.Settings", "Settings"),
        ("com.example.app/.ui.Main", ""),
        ("a/index.html", ""),
        ("https://a.example/b", ""),
        ("page?x=1", ""),
        ("x" * 61, ""),
        ("", ""),
    ],
)
def test_a_route_in_words_is_a_title_and_an_address_is_none(route: str, title: str) -> None:
    assert title_of(screen("1", route)) == title


def test_screens_of_one_title_are_told_apart_by_what_is_rare_on_them() -> None:
    screens = [
        screen("1", "Mail", "Back Reply"),
        screen("2", "Mail", "Back Send"),
        screen("3", "Me"),
    ]
    assert labels_of(screens) == {"1": "Mail: Reply", "2": "Mail: Send", "3": "Me"}


def test_a_goal_is_true_of_its_screens_alone_and_never_of_the_start() -> None:
    start = screen("s", "Mail", "Menu Inbox")
    list_, new, send = (
        screen("l", "Mail", "Menu Sort"),
        screen("n", "Mail > New", "Menu To"),
        screen("m", "Mail > New", "Menu To Send"),
    )
    other = screen("o", "Mail", "Sort", application="b")
    last = screen("e", "Mail > New", "", ended=True)
    screens = [start, list_, new, send, other, last]

    def goal(each: Screen, path: list[Edge] | None = None) -> tuple[str, str] | None:
        found = next(iter(goals_of(each, start, screens, path or [])), None)
        return found and (found.text, "".join(one.id for one in found.screens))

    assert goal(list_) == ('go to the screen that shows "Sort"', "l")
    assert goal(send) == ('go to the screen that shows "Send"', "m")
    assert goal(new) == ('go to "Mail > New"', "nm")  # two screens fit, and either will do
    plain = screen("p", "Mail", "Menu")
    screens.append(plain)
    assert goal(plain) is None
    steps = [edge(1, "s", "Menu", "l"), edge(2, "l", "Sort", "p")]
    assert goal(plain, steps) == ('click the "Menu" button, then click the "Sort" button', "p")


def test_an_action_is_told_in_words() -> None:
    field = Element("field", "To", (0, 0, 9, 9), ("type",), "0")
    typed = Edge(1, 0, 1, "s", field, "type", "Ann", "t", "moved", "", "", "")
    assert spoken(typed) == 'type "Ann" into the "To" field'
    nameless = Element("canvas", "", (0, 0, 9, 9), ("scroll",), "0")
    scrolled = Edge(1, 0, 1, "s", nameless, "scroll", "", "t", "moved", "", "", "")
    assert spoken(scrolled) == "scroll the canvas"
