"""The study of a critic: what an arm is, what a placebo is shown, a short run of each kind of arm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.learning.critic import Advantages, Plan, Shuffled, play
from benchmarks.learning.study import Cell
from dart_cli.train.critic import Steps

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("baseline", Advantages()),
        ("instance", Advantages(instance=True)),
        ("value", Advantages(1.0)),
        ("gae-0.9", Advantages(0.9)),
        ("placebo", Advantages(1.0, placebo=True)),
        ("placebo-gae-0.5", Advantages(0.5, placebo=True)),
    ],
)
def test_an_arm_is_its_name(arm: str, expected: Advantages) -> None:
    assert Advantages.of(arm) == expected
    assert bool(expected.sets()) == (expected.share is not None)


def test_a_placebo_is_shown_the_same_step_of_another_episode_of_the_task() -> None:
    tasks = {"a": "click", "b": "click", "c": "click", "d": "type"}
    keys = tuple(("g", name, step) for name in tasks for step in (0, 1))
    states = torch.arange(len(keys), dtype=torch.float32)[:, None].expand(-1, 4)
    nothing = torch.zeros(len(keys))
    steps = Steps(keys, nothing, nothing, nothing.double(), nothing.bool(), states)
    shown = Shuffled(4, 1.0, tasks)._shuffled(steps).states[:, 0].long().tolist()
    for key, index in zip(keys, shown, strict=True):
        _, name, step = key
        _, other, at = keys[index]
        assert tasks[other] == tasks[name]
        assert at == step or name == "d"
        assert (other == name) == (name == "d")


@pytest.mark.parametrize("arm", ["baseline", "placebo-gae-0.9", "instance"])
def test_a_short_run_is_played_and_judged(arm: str, tmp_path: Path) -> None:
    plan = Plan(
        ROOT / "configs" / "quickstart.toml", trajectories=96, points=1, episodes=7, extra=2
    )
    found = asyncio.run(play(plan, Cell(arm, 0), tmp_path))
    assert [each["trajectories"] for each in found["points"]] == [0, 96]
    assert 0 <= found["end"] <= 1
    assert found["updates"] >= 2
    assert len(found["explained"]) == 3
    by_baseline, by_arm = found["explained"][-1]
    assert (by_baseline == by_arm) == (arm == "baseline")
