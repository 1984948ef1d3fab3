"""Published protocols: what deviates is told line by line."""

from __future__ import annotations

from typing import get_args

from dart_cli.config.load import default_config
from dart_cli.config.schema.eval import Protocol
from dart_cli.evaluation.episodes import step_limit
from dart_cli.evaluation.protocols import check, overrides, protocols
from dart_cli.evaluation.results import EpisodeRow
from tests.evaluation.parts import episode


def rows(tasks: int, seeds: int, screen: tuple[int, int]) -> list[EpisodeRow]:
    return [
        episode(f"t{task}", seed, 0, "pass").model_copy(update={"screen": screen})
        for task in range(tasks)
        for seed in range(seeds)
    ]


def test_the_table_has_every_protocol_that_can_be_named() -> None:
    assert {"none", *protocols()} == set(get_args(Protocol))
    assert all(each.sources and each.uncertain for each in protocols().values())


def test_an_evaluation_as_published_deviates_in_nothing() -> None:
    config = default_config([*overrides("osworld-verified", "osworld"), "env.suite=osworld"])
    assert step_limit(config) == 15
    found = check(config, rows(369, 1, (1920, 1080)), [50] * 369)
    assert found is not None
    assert found.deviations == []
    assert found.left_to_model == ["temperature 1 of mode sampled"]
    config = default_config([*overrides("miniwob", "miniwob"), "env.suite=miniwob"])
    assert config.env.options == {"metric": "published"}
    assert check(config, rows(125, 5, (500, 320)), [10]).deviations == []  # type: ignore[union-attr]


def test_each_deviation_is_a_line() -> None:
    config = default_config(
        ["eval.protocol=webarena", "eval.attempts=4", "env.suite=mini", "rollout.temperature=0.5"]
    )
    played = [*rows(2, 3, (448, 336)), episode("t0", 0, 1, "invalid")]
    played.append(played[0].model_copy(update={"mode": "greedy"}))
    assert check(config, played, [30, 31]).deviations == [  # type: ignore[union-attr]
        "suite mini, published browsergym",
        "max_steps 30, 31, published 30",
        "screen 1x1, 448x336, published 1280x720",
        "temperature 0.5 in mode sampled, published 1",
        "temperature 0 in mode greedy, published 1",
        "attempts 4, published 1",
        "tasks 2, published 812",
        "instances of a task 3, published 1",
        "1 episodes are invalid and not in the rates; the benchmark has a result for each",
    ]


def test_limits_of_each_task_s_own_are_told() -> None:
    config = default_config([*overrides("androidworld", "android"), "env.suite=android"])
    assert step_limit(config) == 0
    found = check(config, rows(116, 1, (1080, 2400)), [10, 25])
    assert found is not None
    assert found.deviations == []
    assert "max_steps 10, 25, each task's own" in found.left_to_model


def test_no_protocol_is_no_check() -> None:
    assert check(default_config([]), [], []) is None
