"""Honest intervals, and evaluations that can be read again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bus.errors import RunDirectoryError
from dart_cli.algo.statistics import wilson
from dart_cli.evaluation.results import EpisodeRow, ModeScore, TaskScore, read_evaluation, total
from tests.evaluation.parts import episode


@pytest.mark.parametrize(("passed", "episodes"), [(0, 10), (1, 7), (5, 10), (340, 400), (9, 9)])
def test_the_interval_is_where_the_score_test_is_indifferent(passed: int, episodes: int) -> None:
    """The bounds p solve (share - p)^2 = z^2 p (1 - p) / episodes, by a quadratic's roots."""
    share, z2 = passed / episodes, 1.959963984540054**2
    roots = np.roots([1 + z2 / episodes, -(2 * share + z2 / episodes), share**2]).real
    low, high = wilson(passed, episodes)
    assert math.isclose(low, max(0.0, min(roots)), abs_tol=1e-7)
    assert math.isclose(high, min(1.0, max(roots)), abs_tol=1e-7)


def test_without_episodes_the_interval_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    empty = TaskScore(task_id="a", episodes=0, passed=0, invalid=3, steps=0)
    assert empty.success is None
    assert empty.mean_steps is None


def test_invalid_episodes_are_in_no_proportion() -> None:
    scores = [
        TaskScore(task_id="a", episodes=4, passed=3, invalid=6, steps=8),
        TaskScore(task_id="b", episodes=6, passed=1, invalid=0, steps=12),
    ]
    whole = total("all", scores)
    assert (whole.success, whole.invalid, whole.mean_steps) == (0.4, 6, 2.0)


def test_evaluations_of_before_rewards_have_one_for_each_pass() -> None:
    old = TaskScore.model_validate_json(
        '{"task_id": "a", "episodes": 4, "passed": 3, "invalid": 0, "steps": 8}'
    )
    assert (old.mean_reward, old.is_partial) == (0.75, False)
    new = TaskScore(task_id="b", episodes=4, passed=0, invalid=0, steps=8, rewards=1.0)
    assert (new.mean_reward, new.is_partial) == (0.25, True)
    assert total("all", [old, new]).mean_reward == 0.5


def test_evaluations_that_call_held_out_tasks_compositions_can_be_read() -> None:
    score = {"task_id": "a+b", "episodes": 4, "passed": 3, "invalid": 0, "steps": 8}
    mode = ModeScore.model_validate({"tasks": [], "compositions": [score], "composed_pass_at": []})
    assert mode.heldout_overall.success == 0.75
    row = episode("a+b", 1, 0, "pass", heldout=True).model_dump(mode="json")
    row["composed"] = row.pop("heldout")
    assert EpisodeRow.model_validate_json(json.dumps(row)).heldout


def test_a_broken_evaluation_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "before.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="remove it and run it again"):
        read_evaluation(tmp_path, "before")
    assert read_evaluation(tmp_path, "after") is None


def test_an_interval_always_holds_its_share() -> None:
    """Rounding gave 0.9999999 for 100 of 100, of which no error bar can be drawn."""
    for episodes in range(1, 500):
        for passed in (0, 1, episodes - 1, episodes):
            low, high = wilson(passed, episodes)
            assert 0 <= low <= passed / episodes <= high <= 1
