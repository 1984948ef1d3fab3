"""benchmarks/peers: what is counted of a run, and that the plain loop learns from what it played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers.one_screen import OneScreenSuite
from benchmarks.peers.peers import NEWEST, Run, ratios
from benchmarks.peers.plain_loop import PlainLoop
from dart_cli.config.load import load_config
from envs.contract.actions import Click

ROOT = Path(__file__).parents[2]


def run(passed_from: int, count: int) -> Run:
    """A trajectory a second; all pass from one on; two CPU seconds a second, loading took ten."""
    used = [(float(at), 2.0 * at + 10, 100.0 + at) for at in range(count + 2)]
    ended: list[tuple[float, bool | None]] = [
        (float(at + 1), at >= passed_from) for at in range(count)
    ]
    return Run(used, 0.0, ended)


def test_a_level_is_reached_by_the_newest_trajectories_and_loading_costs_nothing() -> None:
    found = run(200, 600).figures()
    assert found["trajectories_to"] == {
        level: 200 + -(-NEWEST * int(level[2:]) // 10) for level in ("0.6", "0.8", "0.9")
    }
    assert found["cpu_s_to"]["0.8"] == 2.0 * found["trajectories_to"]["0.8"]
    assert found["trajectories_s"] == 1.0
    assert found["trajectories_cpu_s"] == 0.5
    assert found["peak_mb"] == 701
    assert run(600, 600).figures()["cpu_s_to"] == {"0.6": None, "0.8": None, "0.9": None}


def test_a_trajectory_that_was_chosen_by_success_counts_and_tells_nothing() -> None:
    plain = run(200, 600)
    doubled = [each for at, one in plain.episodes for each in ((at, one), (at, None))]
    found, expected = Run(plain.used, plain.began, doubled).figures(), plain.figures()
    assert found["trajectories"] == 1200
    assert found["success_end"] == expected["success_end"]
    assert found["cpu_s_to"] == expected["cpu_s_to"]
    assert found["trajectories_to"]["0.8"] == 2 * expected["trajectories_to"]["0.8"] - 1


def test_a_ratio_is_of_means_and_missing_where_a_run_did_not_get_there() -> None:
    early, late, never = (run(at, 600).figures() for at in (0, 200, 600))
    found = ratios([early, early], [late, late])
    expected = early["trajectories_to"]["0.8"] / late["trajectories_to"]["0.8"]
    assert found["trajectories_to_080_ratio"] == pytest.approx(expected, abs=1e-3)
    assert found["trajectories_s_ratio"] == 1.0
    assert ratios([early], [never])["cpu_s_to_080_ratio"] is None
    assert ratios([early, never], [late, late])["cpu_s_to_080_ratio"] is None


def test_the_plain_loop_moves_weights_where_a_group_differs(tmp_path: Path) -> None:
    sets = ["data.groups_per_batch=4", "data.group_size=4", f"run.dir={tmp_path}"]
    loop = PlainLoop(load_config(ROOT / "configs" / "quickstart.toml", sets), seed=0)
    before = [each.detach().clone() for each in loop.trained]
    rewards = torch.tensor(loop.update()).view(4, 4)
    moved = any(
        not torch.equal(one, other) for one, other in zip(before, loop.trained, strict=True)
    )
    assert moved == bool((rewards != rewards[:, :1]).any())
    assert 0 < rewards.mean() < 1  # seed 0: the tiny model passes some of them


def test_one_screen_asks_for_one_click() -> None:
    suite = OneScreenSuite()
    [task] = suite.tasks.values()
    env = suite.make_env()
    _, info = env.reset(seed=3, options={"task": task})
    action = env.oracle_action()
    assert isinstance(action, Click)
    _, reward, terminated, _, _ = env.step(action)
    assert (reward, terminated) == (1.0, True)
    env.reset(seed=3, options={"task": task})
    _, reward, terminated, truncated, _ = env.step(Click(x=action.x, y=(action.y + 28) % 112))
    assert reward == 0.0
    assert terminated or truncated
    assert env.goal in info["instruction"]
