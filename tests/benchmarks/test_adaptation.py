"""Adapting to an application: arms train on as many rows, never on what the test shows, and figures are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.adaptation import (
    Adaptation,
    Place,
    equal_rows,
    summarize,
    together,
    unseen,
)
from benchmarks.learning.study import Cell
from bus.errors import UserError


def rows(*pictures: str) -> list[dict[str, Any]]:
    return [
        {"img_filename": name, "instruction": f"{name} {at}"} for at, name in enumerate(pictures)
    ]


def test_arms_train_on_equally_many_rows_and_on_no_picture_of_the_test() -> None:
    training = {"q": rows("a", "t", "b", "c", "d"), "random": rows("a", "a", "t", "e")}
    test = rows("t", "u")
    found = equal_rows({arm: unseen(each, test) for arm, each in training.items()})
    assert [row["img_filename"] for row in found["q"]] == ["a", "b", "c"]
    assert [row["img_filename"] for row in found["random"]] == ["a", "a", "e"]
    with pytest.raises(UserError, match="explore further"):
        equal_rows({"q": rows("a"), "random": unseen(rows("t"), test)})


def test_a_query_that_two_explorations_found_is_asked_once() -> None:
    found = together([rows("a", "b"), rows("a", "c"), []])
    assert [row["instruction"] for row in found] == ["a 0", "b 1", "c 1"]


def hits(application: float, other: float, outcome: float) -> dict[str, Any]:
    by_query = {"outcome": {"hit_1": outcome, "n": 4}}
    return {
        "hits": {
            "application": {"hit_1": application, "by_query": by_query},
            "other": {"hit_1": other, "by_query": {}},
            "known": {"hit_1": 1.0, "by_query": {}},
        }
    }


def run(*successes: float) -> dict[str, Any]:
    return {"points": [{"success": each} for each in successes]}


def test_figures_are_means_over_applications_and_seeds() -> None:
    told = summarize(
        {
            "shop": {
                Cell("none", 0): hits(0.1, 0.5, 0.0),
                Cell("none", 1): hits(0.3, 0.5, 0.5),
                Cell("q", 0): hits(0.8, 0.2, 0.75),
                Cell("rl-q", 0): run(0.2, 0.4, 0.7),
                Cell("rl-none", 0): run(0.0, 0.1),
                Cell("rl-tasks", 0): run(0.3, 0.9)
                | {"elsewhere": {"sampled_tasks": {"success": 0.8}}},
            },
            "mail": {Cell("q", 0): hits(0.6, 0.4, 0.25)},
        }
    )
    assert told["hit_before"] == 0.2
    assert told["hit_after"] == 0.7
    assert told["hit_after_random_data"] is None
    assert told["adaptation"]["q"]["other"] == 0.3
    assert told["adaptation"]["q"]["by_query"] == {"outcome": 0.5}
    assert told["rl_success_before"] == 0.2
    assert told["rl_success_after"] == 0.7
    assert told["rl_success_after_untuned"] == 0.1
    assert told["rl_tasks_success_before"] == 0.3
    assert told["rl_tasks_success_after"] == 0.9
    assert told["rl_tasks_own_success_after"] == 0.8
    assert told["adaptation_cells"]["mail"]["q-0"]["hits"]["application"]["hit_1"] == 0.6


def test_what_rl_alone_depends_on_leaves_the_hit_rates_valid() -> None:
    place = Place("shop", "apps", "apps/shop-*")
    short, long = (
        Adaptation(Path(), Path(), place, place, trajectories=count) for count in (64, 128)
    )
    assert short.settings(Cell("q", 0)) == long.settings(Cell("q", 0))
    assert short.settings(Cell("rl-q", 0)) != long.settings(Cell("rl-q", 0))
    shown = Adaptation(Path(), Path(), place, place, demonstrations=4)
    assert short.settings(Cell("q", 0)) == shown.settings(Cell("q", 0))
    assert short.settings(Cell("rl-q", 0)) != shown.settings(Cell("rl-q", 0))
    other = Adaptation(Path(), Path(), place, place, seconds=1.0)
    assert short.settings(Cell("q", 0)) != other.settings(Cell("q", 0))
