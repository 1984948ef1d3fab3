"""The study of a critic: its formulas against brute force, its head, a short run of each kind of arm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning.critic import Advantages, Plan, ValueHead, explained, generalized, play
from benchmarks.learning.study import Cell

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_generalized_advantages_are_the_sum_of_their_differences(share: float) -> None:
    rng = np.random.default_rng(0)
    for steps in (1, 2, 7):
        values, reward = rng.random(steps), float(rng.integers(2))
        ahead = [*values[1:], reward]
        differences = [after - value for after, value in zip(ahead, values, strict=True)]
        expected = [
            sum(share**k * differences[at + k] for k in range(steps - at)) for at in range(steps)
        ]
        assert generalized(values.tolist(), reward, share) == pytest.approx(expected, abs=1e-12)
    assert generalized([0.3, 0.6], 1.0, 1.0) == pytest.approx([0.7, 0.4])


def test_what_is_explained_is_one_less_the_share_of_variance_that_is_left() -> None:
    assert explained([0, 1, 0, 1], [0, 1, 0, 1]) == 1.0
    assert explained([0, 1, 0, 1], [0.5] * 4) == 0.0
    assert explained([1, 1], [0.2, 0.9]) is None
    assert explained([], []) is None


def test_the_head_begins_as_the_tracker_and_learns_what_states_tell() -> None:
    torch.manual_seed(0)
    states = torch.randn(600, 8)
    rewards = (states[:, 0] > 0).float()
    expected = torch.full((600,), 0.3)
    head = ValueHead(8, seed=0)
    assert torch.allclose(head.values(states, expected), expected)
    for part in range(20):
        some = slice(30 * part, 30 * part + 30)
        head.learn(states[some], expected[some], rewards[some])
    found = explained(rewards.tolist(), head.values(states, expected).tolist())
    assert found is not None
    assert found > 0.2


@pytest.mark.parametrize(
    ("arm", "value", "share", "placebo"),
    [
        ("tracker", False, 1.0, False),
        ("value", True, 1.0, False),
        ("gae-0.9", True, 0.9, False),
        ("placebo", True, 1.0, True),
        ("placebo-gae-0.5", True, 0.5, True),
    ],
)
def test_an_arm_is_its_name(arm: str, *, value: bool, share: float, placebo: bool) -> None:
    assert Advantages.of(arm) == Advantages(value, share, placebo)


@pytest.mark.parametrize("arm", ["tracker", "placebo-gae-0.9"])
def test_a_short_run_is_played_and_judged(arm: str, tmp_path: Path) -> None:
    plan = Plan(ROOT / "configs" / "quickstart.toml", trajectories=96, points=1, episodes=7)
    found = asyncio.run(play(plan, Cell(arm, 0), tmp_path))
    assert [each["trajectories"] for each in found["points"]] == [0, 96]
    assert 0 <= found["end"] <= 1
    assert found["updates"] >= 2
    assert len(found["explained"]) == 3
