"""Episodes played in this process: spread evenly, each with a seed of its own, and repeatable."""

from __future__ import annotations

from pathlib import Path

from dart_cli.config.load import load_config
from dart_cli.config.task_split import trained_tasks
from dart_cli.evaluation.in_process import planned, play_all
from dart_cli.rollout.worker import load_model


def test_episodes_are_spread_evenly_and_no_two_share_a_seed(config_path: Path) -> None:
    config = load_config(config_path)
    tasks = trained_tasks(config)
    episodes = planned(tasks, 12, config.eval.seed)
    assert [sum(each.task == task for each in episodes) for task in tasks] == [6, 6]
    assert len({each.seed for each in episodes}) == 12
    assert min(each.seed for each in episodes) >= 1_000_000
    assert planned([], 12, 0) == []


async def test_the_same_seeds_give_the_same_episodes(config_path: Path) -> None:
    config = load_config(config_path)
    episodes = planned(trained_tasks(config), 8, config.eval.seed)
    runs = []
    for _ in range(2):
        model = load_model(config)
        played = await play_all(config, model.responder, episodes, "sampled")
        await model.engine.close()
        runs.append({each.lease.task_seed: (each.end.outcome, each.end.steps) for each in played})
    assert len(runs[0]) == 8
    assert runs[0] == runs[1]
