"""The study of exploring: questions are in other words than rows, screens are told apart, differences are of pairs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.learning.explore_cells import PER_SCREEN, asked_apart, known_as, questions_of
from benchmarks.learning.explore_summary import summarize
from benchmarks.learning.study import Cell
from bus.errors import UserError


def row(screen: str, picture: str, query: str, left: int = 0) -> dict[str, Any]:
    return {
        "screen_id": screen,
        "img_filename": picture,
        "instruction": query,
        "bbox": [left, 0, 9, 9],
    }


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ('click the "Sound" item', 'press the "Sound" item'),
        ('click "Sound"', 'press "Sound"'),
        ('open the "Sound" tab', 'press the "Sound" tab'),
        ('go to "Settings > Proxy"', 'open the page "Settings > Proxy"'),
        ('show "Volume" and "Mute"', 'let me see "Volume" and "Mute"'),
        ('make "Mute" go away', 'hide "Mute"'),
    ],
)
def test_a_question_is_in_other_words_than_the_row(query: str, asked: str) -> None:
    assert asked_apart(query) == asked


def test_a_query_of_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match="no query that dart explore rows writes"):
        asked_apart("tap Sound")


def test_of_a_screen_one_picture_is_asked_about_and_a_question_with_two_answers_is_not() -> None:
    many = [row("many", "m", f'click "{at}"', at) for at in range(PER_SCREEN + 3)]
    first = [row("s", "a", 'click "X"'), row("s", "a", 'click "Y"'), *many]
    second = [row("s", "b", 'click "X"'), row("s", "b", 'click "Y"'), *many]
    twice = [row("s", "a", 'click "Y"', 50), row("s", "b", 'click "Y"', 50)]
    found = questions_of([first, second, twice])
    of_s = [each for each in found if each["application"] == "s"]
    assert [each["instruction"] for each in of_s] == ['press "X"']
    assert sum(each["application"] == "many" for each in found) == PER_SCREEN
    assert found == questions_of([twice, second, first])


def test_screens_are_told_apart_by_what_the_arm_has_of_them() -> None:
    test = [row("s", "a", ""), row("t", "b", ""), row("u", "c", "")]
    arm = [row("s", "a", ""), row("t", "other", "")]
    assert known_as(test, arm) == {"s": "covered", "t": "another_state", "u": "never_seen"}


def cell(*hits: tuple[float, str]) -> dict[str, Any]:
    screens = {str(at): value for at, (value, _) in enumerate(hits)}
    known = {str(at): how for at, (_, how) in enumerate(hits)}
    return {"hits": {"screens": screens, "known": known}, "covered": 0.5, "cpu_s": 10.0}


def test_hits_are_means_over_screens_then_instances_and_differences_are_of_pairs() -> None:
    found = summarize(
        {
            "mail": {
                Cell("q", 0): cell((1.0, "covered"), (0.5, "never_seen"), (0.0, "never_seen")),
                Cell("random", 0): cell((0.2, "covered")),
                Cell("q", 1): cell((0.8, "another_state")),
                Cell("random", 1): cell((0.4, "never_seen")),
                Cell("q", 2): cell((0.2, "covered")),
            },
            "wiki": {Cell("q", 0): cell((0.3, "covered"))},
        }
    )
    mail = found["applications"]["mail"]
    assert found["instances"] == 4
    assert (mail["hit_qicrl"], mail["hit_random"], mail["hit_untuned"]) == (0.5, 0.3, None)
    assert mail["qicrl_minus_random"]["value"] == pytest.approx((0.3 + 0.4) / 2)
    assert mail["qicrl_minus_random"]["interval"] == [0.3, 0.4]
    assert mail["by_screen_qicrl"]["never_seen"] == {"hit": 0.25, "screens": 2}
    assert found["hit_qicrl"] == pytest.approx((0.5 + 0.8 + 0.2 + 0.3) / 4)
    assert found["applications"]["wiki"]["qicrl_minus_random"]["n"] == 0


def test_practice_with_rows_is_held_against_practice_without_in_the_same_instance() -> None:
    def run(before: float, after: float) -> dict[str, Any]:
        return {"before": before, "after": after}

    found = summarize(
        {
            "shop": {
                Cell("practised-q", 0): run(0.1, 0.5),
                Cell("practised-untuned", 0): run(0.0, 0.2),
                Cell("practised-q", 1): run(0.3, 0.7),
            }
        }
    )["applications"]["shop"]
    assert (found["rl_before_with"], found["rl_success_with"]) == (0.2, 0.6)
    assert (found["rl_before_without"], found["rl_success_without"]) == (0.0, 0.2)
    assert found["rl_with_minus_without"] == {"value": 0.3, "interval": None, "n": 1}
    assert found["hit_qicrl"] is None
