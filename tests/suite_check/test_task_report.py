"""A task's report says what its episodes show."""

from __future__ import annotations

from bus.messages import Outcome
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import make_async_env
from dart_cli.suite_check.probes import Probe, ProbeEpisode, play_probe
from dart_cli.suite_check.task_report import (
    Bounds,
    TaskReport,
    difference,
    percentile,
    report_on_task,
)
from tests.env.scored_suite import SUITE as SCORED
from tests.env.scored_suite import ScoredSuite
from tests.suite_check.lax_suite import LaxSuite, screen


def probed(
    probe: Probe, seed: int, outcome: Outcome | None, reward: float | None = None
) -> ProbeEpisode:
    return ProbeEpisode(probe=probe, seed=seed, outcome=outcome, reward=reward)


def test_one_lucky_click_does_not_make_a_task_guessable() -> None:
    task = LaxSuite.tasks["lax/sound"]
    played = [probed("random", seed, "pass" if seed == 0 else "fail") for seed in range(3)]
    assert not report_on_task(task, played, Bounds()).guessable
    played = [probed("random", seed, "pass") for seed in range(3)]
    assert report_on_task(task, played, Bounds()).guessable
    assert not report_on_task(task, played, Bounds()).wrong


def test_a_pass_without_a_reward_or_with_less_than_a_failure_must_be_fixed() -> None:
    task = LaxSuite.tasks["lax/sound"]

    def rewarded(*judged: tuple[Outcome, float]) -> TaskReport:
        played = [
            probed("random", seed, outcome, reward) for seed, (outcome, reward) in enumerate(judged)
        ]
        return report_on_task(task, played, Bounds())

    own_threshold = rewarded(("pass", 0.95), ("pass", 1.0), ("fail", 0.89))
    assert not own_threshold.wrong
    assert own_threshold.partial_passes, "only reported"
    less = rewarded(("pass", 0.3), ("fail", 0.8))
    assert less.odd_rewards == [
        "seed 0, random: passes with reward 0.3, a failure has 0.8 (seed 1, random)"
    ]
    assert less.wrong
    assert rewarded(("pass", 0.0)).wrong
    assert not rewarded(("pass", 1.0), ("fail", 0.0)).partial_passes


async def test_rewards_out_of_range_and_broken_by_the_action_are_told_apart() -> None:
    env = make_async_env(EnvConfig(suite=SCORED), "check/0")
    try:
        wrong = await play_probe(env, ScoredSuite.tasks["scored/7.0"], 0, "random")
        broken = await play_probe(env, ScoredSuite.tasks["scored/breaks"], 0, "random")
    finally:
        await env.close()
    assert (wrong.outcome, broken.outcome) == ("invalid", "fail")
    assert "a reward in [0, 1], got float 7.0" in wrong.reason
    assert report_on_task(ScoredSuite.tasks["scored/7.0"], [wrong], Bounds()).errors


def test_a_task_without_an_oracle_that_no_episode_passed_is_unproven() -> None:
    task = LaxSuite.tasks["lax/sound"]
    unsolved = probed("oracle", 0, None)
    failed, passed = probed("random", 0, "fail"), probed("random", 1, "pass")
    assert report_on_task(task, [unsolved, failed], Bounds()).unproven
    assert not report_on_task(task, [unsolved, failed], Bounds()).wrong
    assert not report_on_task(task, [unsolved, failed, passed], Bounds()).unproven
    assert not report_on_task(task, [probed("oracle", 0, "fail"), failed], Bounds()).unproven
    assert not report_on_task(task, [failed], Bounds()).unproven, "no oracle was asked"


def test_percentiles_and_differences_of_pictures() -> None:
    assert percentile([], 0.95) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile(list(map(float, range(100))), 0.95) == 95.0
    assert difference(screen(1), screen(1)) == 0
    assert difference(screen(1), screen(2)) == 1
