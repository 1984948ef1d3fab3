"""Patterns name tasks: ids, globs, exclusions; a pattern without a match is an error with the closest name."""

from __future__ import annotations

import pytest

from bus.errors import TaskError
from envs.contract.base import Task
from envs.contract.registry import select_tasks, tasks_of


def names(patterns: list[str], among: list[Task] | None = None) -> list[str]:
    return [task.id.removeprefix("mini/") for task in select_tasks("mini", patterns, among)]


def test_no_pattern_names_all_and_ids_keep_the_order_they_are_given_in() -> None:
    assert names([]) == [task.id.removeprefix("mini/") for task in tasks_of("mini")]
    assert names(["mini/popup", "mini/click"]) == ["popup", "click"]


def test_a_glob_names_each_task_once_in_the_order_of_the_suite() -> None:
    assert names(["mini/confirm", "mini/*+confirm"]) == [
        *("confirm", "menu+confirm", "page+confirm", "folder+confirm", "popup+page+confirm")
    ]
    assert names(["mini/popup", "mini/popup*", "mini/popup"])[0] == "popup"
    assert len(names(["mini/popup", "mini/popup*"])) == len(names(["mini/popup*"]))


def test_exclusions_count_in_any_position_and_alone_leave_all_others() -> None:
    assert names(["!mini/*+*", "mini/popup*"]) == ["popup"]
    assert names(["!mini/click"]) == [name for name in names([]) if name != "click"]


def test_globs_choose_from_one_split_and_ids_from_the_whole_suite() -> None:
    train = tasks_of("mini", "train")
    assert names(["mini/popup*"], train) == ["popup"]
    assert names(["mini/popup+menu"], train) == ["popup+menu"]
    assert names(["!mini/popup+menu"], train) == [t.id.removeprefix("mini/") for t in train]
    with pytest.raises(TaskError, match="the other split"):
        names(["mini/popup+*"], train)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("mini/poppup", "did you mean 'mini/popup'"),
        ("!mini/poppup", "did you mean 'mini/popup'"),
        ("popup*", "did you mean 'mini/popup\\*'"),
        ("mini/clic?s", "no task like 'mini/clic\\?s'; did you mean 'mini/click'"),
    ],
)
def test_a_pattern_without_a_match_is_answered_with_the_closest_id(
    pattern: str, message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        names([pattern])


def test_exclusions_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(TaskError, match="nothing is left"):
        names(["mini/popup", "!mini/pop*"])
