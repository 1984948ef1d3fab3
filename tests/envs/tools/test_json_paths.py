"""Promises of paths into JSON values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envs.tools.json_paths import JsonPath, NothingThereError, first_difference, same, without

STATE: dict[str, Any] = {
    "cards": [{"title": "Milk", "tags": ["a", "b"]}, {"title": "Rent [due]", "done": True}],
    "users": {"a.b": {"n": 3}},
    "empty": None,
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (".", STATE),
        ("cards[0].title", "Milk"),
        ("cards[-1].done", True),
        ("cards[title=Milk].tags[1]", "b"),
        ("cards[*].title", ["Milk", "Rent [due]"]),
        ("cards[done=true].title", "Rent [due]"),
        ('users["a.b"].n', 3),
        ("empty", None),
    ],
)
def test_a_path_names_a_value(path: str, value: object) -> None:
    assert JsonPath.of(path).value(STATE) == value


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("card", "the value has no 'card'; did you mean 'cards'?"),
        ("cards[2]", "'cards' has 2 entries, none at 2"),
        ("cards[title=Bread].tags", "'cards' has no entry whose title is 'Bread'"),
        ("cards.title", "'cards' is a list, which has no 'title'"),
        ("users[0]", "'users' is an object, no list"),
        ("empty.x", "'empty' is null, which has no 'x'"),
    ],
)
def test_a_path_that_names_nothing_says_where_it_ends(path: str, reason: str) -> None:
    with pytest.raises(NothingThereError) as error:
        JsonPath.of(path).value(STATE)
    assert str(error.value) == reason


@pytest.mark.parametrize("path", ["", ".a.", "a..b", "a[", "a[x]", "[", "a]"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        JsonPath.of(path)


def test_a_value_with_any_characters_is_filled_into_a_path_that_was_read() -> None:
    values = {"{card}": "Rent [due]", "{name}": "a.b"}

    def fill(text: str) -> str:
        return values.get(text, text)

    assert JsonPath.of("cards[title={card}].done").filled(fill).value(STATE) is True
    assert JsonPath.of("users.{name}.n").filled(fill).value(STATE) == 3


def test_parts_of_a_value_are_left_out_of_a_copy() -> None:
    before = json.dumps(STATE)
    paths = [JsonPath.of(path) for path in ("cards[*].title", "users", "nothing.there")]
    assert without(STATE, paths) == {"cards": [{"tags": ["a", "b"]}, {"done": True}], "empty": None}
    assert without(STATE, [JsonPath.of("cards[title=Milk]")])["cards"] == STATE["cards"][1:]
    assert without(STATE, [JsonPath.of("cards[*]")])["cards"] == []
    assert without(STATE, [JsonPath.of(".")]) is None
    assert json.dumps(STATE) == before


def test_true_and_one_are_not_the_same() -> None:
    assert not same(True, 1)
    assert not same({"a": [0]}, {"a": [False]})
    assert same({"a": [1, None]}, {"a": [1.0, None]})


@pytest.mark.parametrize(
    ("after", "difference"),
    [
        ({"a": [1, {"b": "x"}]}, ""),
        ({"a": [1, {"b": "y"}]}, 'a[1].b: "x" -> "y"'),
        ({"a": [1]}, "a had 2 entries, has 1"),
        ({}, "it lost 'a'"),
        ({"a": [1, {"b": "x"}], "c": 2}, "it has a new 'c': 2"),
        ({"a": {"0": 1}}, 'a: [1, {"b": "x"}] -> {"0": 1}'),
    ],
)
def test_the_first_difference_of_two_values_is_named(after: object, difference: str) -> None:
    assert first_difference({"a": [1, {"b": "x"}]}, after) == difference
