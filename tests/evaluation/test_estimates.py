"""Scores of episodes against plain sums and enumeration."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import fmean

import pytest

from dart_cli.evaluation.scores import mode_score
from tests.evaluation.parts import episode


def test_pass_at_k_over_tasks_equals_enumeration_of_attempts() -> None:
    rng = Random(4)
    rows = [
        episode(task, seed, attempt, "pass" if rng.random() < 0.4 else "fail")
        for task, seeds in (("a", 3), ("b", 1), ("c", 2))
        for seed in range(seeds)
        for attempt in range(5)
    ]
    score = mode_score(rows, ["a", "b", "c"], [], 5)
    for estimate in score.pass_at:
        some, every = [], []
        for task in "abc":
            seeds = sorted({row.seed for row in rows if row.task_id == task})
            chosen = [
                [row.outcome == "pass" for row in rows if (row.task_id, row.seed) == (task, seed)]
                for seed in seeds
            ]
            parts = [list(combinations(each, estimate.k)) for each in chosen]
            some.append(fmean(fmean(map(any, part)) for part in parts))
            every.append(fmean(fmean(map(all, part)) for part in parts))
            [told] = [each for each in score.tasks if each.task_id == task]
            assert told.pass_at[estimate.k] == pytest.approx(some[-1])
            assert told.pass_hat[estimate.k] == pytest.approx(every[-1])
        assert estimate.any == pytest.approx(fmean(some))
        assert estimate.every == pytest.approx(fmean(every))
        assert estimate.any_interval is None  # of three tasks it would be too narrow
        assert (estimate.tasks, estimate.instances) == (3, 6)
    assert [each.k for each in score.pass_at] == [1, 2, 4, 5]


def test_invalid_episodes_are_in_no_rate_and_leave_their_instance_out_of_larger_k() -> None:
    rows = [
        *(episode("a", 1, 0, "pass"), episode("a", 1, 1, "invalid")),
        *(episode("a", 2, 0, "fail"), episode("a", 2, 1, "pass")),
        episode("m", 9, 0, "fail", heldout=True),
    ]
    score = mode_score(rows, ["a", "never"], ["m"], 2)
    [task, empty] = score.tasks
    assert (task.episodes, task.passed, task.invalid, task.steps) == (3, 2, 1, 6)
    assert task.ends == {"done": 3, "gave_up": 1}
    assert (empty.episodes, empty.pass_at) == (0, {})
    assert [(each.k, each.any, each.instances) for each in score.pass_at] == [
        (1, 0.75, 2),
        (2, 1.0, 1),
    ]
    assert [(each.k, each.any) for each in score.heldout_pass_at] == [(1, 0.0)]
