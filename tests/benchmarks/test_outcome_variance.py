"""The split of outcomes: unbiased against known variances, however the policy drifts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.learning.outcome_variance import Counted, shares_of, split_of, told


def played(rng: np.random.Generator, task: str, chances: np.ndarray, members: int) -> list[Counted]:
    """Groups of one task whose instances pass with these chances."""
    return [Counted(task, members, int(rng.binomial(members, chance))) for chance in chances]


def test_the_parts_of_one_task_are_unbiased() -> None:
    rng = np.random.default_rng(0)
    found = np.array(
        [split_of(played(rng, "a", rng.beta(1.0, 2.0, size=40), 4)) for _ in range(2_000)]
    )
    mean, between = 1 / 3, 2 / (9 * 4)  # of Beta(1, 2): ab / ((a + b)^2 (a + b + 1))
    within = mean * (1 - mean) - between
    error = found.std(axis=0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - [within, between]) < 4 * error)


def test_instances_alike_have_no_part_even_while_the_policy_improves() -> None:
    rng = np.random.default_rng(1)
    chances = np.linspace(0.1, 0.9, 400)
    found = [split_of(played(rng, "a", chances, 8))[1] for _ in range(300)]
    assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(len(found)) + 1e-5


def test_tasks_alike_have_no_part_and_tasks_apart_have_theirs() -> None:
    rng = np.random.default_rng(2)
    same, apart = [], []
    for _ in range(400):
        chances = {task: rng.choice([0.2, 0.8], size=20) for task in "abc"}
        same.append(
            shares_of([g for t, c in chances.items() for g in played(rng, t, c, 8)])["task"]
        )
        fixed = {"a": 0.2, "b": 0.8}
        groups = [g for t, c in fixed.items() for g in played(rng, t, np.full(30, c), 8)]
        apart.append(shares_of(groups)["task"])
    assert (
        abs(np.mean(same)) < 4 * np.std(same) / np.sqrt(len(same)) + 2e-3
    )  # a ratio: nearly unbiased
    assert np.mean(apart) == pytest.approx(0.09 / 0.25, abs=0.01)


def test_the_shares_sum_to_one_and_few_groups_tell_nothing() -> None:
    rng = np.random.default_rng(3)
    groups = played(rng, "a", rng.uniform(size=30), 8) + played(rng, "b", rng.uniform(size=5), 8)
    found = told(groups, 2)
    assert [part["groups"] for part in found["parts"]] == [18, 17]
    for part in found["parts"]:
        assert part["task"] + part["instance"] + part["within"] == pytest.approx(1, abs=2e-3)
    assert list(found["by_task"]) == ["a"]
    bounds = [part["within"] / (part["within"] + part["instance"]) for part in found["parts"]]
    assert found["bound_trajectories_ratio"] == pytest.approx(np.mean(bounds), abs=1e-3)
    assert shares_of(groups[:1])["groups"] == 0
    assert told(groups[:1], 2)["bound_trajectories_ratio"] is None
