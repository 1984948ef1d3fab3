"""Episodes played in this process: spread evenly, each with a seed of its own, and repeatable."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import EnvError
from dart_cli.config.load import load_config
from dart_cli.config.schema import TRAIN_SEEDS, Config, LoraConfig
from dart_cli.config.task_split import trained_tasks
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.env import async_env, carriers
from dart_cli.player.chosen_model import loaded_model
from dart_cli.player.episodes import (
    PlayedEpisode,
    answered_by,
    each_of,
    env_of_suite,
    plan_episodes,
    play,
)
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.rollout.worker import load_model
from tests.env.unruly_suite import SUITE, UnrulySuite
from tests.weights.sets import publish


def test_episodes_are_spread_evenly_and_no_two_share_a_seed(config_path: Path) -> None:
    config = load_config(config_path)
    tasks = trained_tasks(config)
    episodes = plan_episodes(tasks, 12, TRAIN_SEEDS)
    assert [sum(each.task == task for each in episodes) for task in tasks] == [6, 6]
    assert len({each.seed for each in episodes}) == 12
    assert min(each.seed for each in episodes) >= 1_000_000
    assert plan_episodes([], 12, 0) == []


async def test_the_same_seeds_give_the_same_episodes(config_path: Path) -> None:
    config = load_config(config_path)
    episodes = plan_episodes(trained_tasks(config), 8, TRAIN_SEEDS)
    runs = []
    for _ in range(2):
        model = load_model(config)
        played: list[PlayedEpisode] = []
        answered = answered_by(config, model.responder)
        await play(config, each_of(episodes), answered, played.append, most=8)
        await model.engine.close()
        runs.append({each.lease.task_seed: (each.end.outcome, each.end.steps) for each in played})
    assert len(runs[0]) == 8
    assert runs[0] == runs[1]


async def test_a_slot_that_can_make_no_more_environments_ends_the_plan_and_spoils_no_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (carriers, async_env):
        monkeypatch.setattr(module, "MOST_HUNG", 2)
    env = {"suite": SUITE, "slots": 1, "reset_deadline_s": 0.1}
    config = Config.model_validate({"run": {"dir": tmp_path}, "env": env})
    episodes = plan_episodes([UnrulySuite.tasks["unruly/reset-hang"]], 8, TRAIN_SEEDS)
    played: list[PlayedEpisode] = []
    with pytest.raises(EnvError, match="eval/0: 2 of its environments hang"):
        await play(config, each_of(episodes), answered_by(config, None), played.append, most=8)
    assert [each.end.outcome for each in played] == ["invalid"] * 2


@pytest.mark.parametrize("now", [LoraConfig(rank=2, alpha=8.0), LoraConfig(), None], ids=str)
async def test_adapters_are_played_with_the_settings_that_are_stored_with_them(
    tmp_path: Path, now: LoraConfig | None
) -> None:
    pytest.importorskip("peft")
    lora = LoraConfig(rank=2, alpha=4.0)
    config = Config.model_validate({"run": {"dir": tmp_path}, "model": {"lora": now}})
    adapters = weight_tensors(load_policy(config.model.path, lora=lora).model)
    made = publish(adapters, tmp_path / "weights", 1, lora=lora)
    async with loaded_model(config, made.path, 1) as model:
        assert isinstance(model.engine, TransformersEngine)
        assert model.engine.policy.lora == lora
        assert model.engine.policy_version == 1


@pytest.mark.parametrize(
    ("suite", "options", "deadline_s"),
    [
        ("mini", {}, 60.0),
        ("osworld", {"vm": "Ubuntu.qcow2"}, 360.0),
        ("osworld", {"vm": "Ubuntu.qcow2", "boot_s": 90.0}, 150.0),
        ("osworld", {"url": "http://127.0.0.1:5000"}, 60.0),
        ("browsergym", {}, 115.0),
    ],
)
def test_without_a_configuration_a_reset_may_take_what_the_suites_options_allow(
    suite: str, options: dict[str, object], deadline_s: float
) -> None:
    env = env_of_suite(suite, options)
    assert (env.suite, env.options, env.reset_deadline_s) == (suite, options, deadline_s)
