"""What an environment's reward, threshold and blame make of an episode, in a thread and in a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.messages import TrajectoryEnd
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import AsyncEnv, make_async_env
from dart_cli.env.episode import play_episode
from envs.contract.base import Verdict
from tests.env.parts import Memory, Says, action_spec, lease
from tests.env.scored_suite import SUITE, ScoredSuite


async def play(env: AsyncEnv, what: str, sink: Memory | None = None) -> TrajectoryEnd:
    """An episode of `scored/WHAT`."""
    task = ScoredSuite.tasks[f"scored/{what}"]
    return await play_episode(env, lease(), task, Says("wait()"), sink or Memory(), action_spec())


@asynccontextmanager
async def scored_env(isolation: str) -> AsyncIterator[AsyncEnv]:
    """An environment of suite `scored`."""
    config = EnvConfig.model_validate({"suite": SUITE, "isolation": isolation})
    env = make_async_env(config, "env-0/0")
    try:
        yield env
    finally:
        await env.close()


in_both = pytest.mark.parametrize("isolation", ["thread", "process"])


@in_both
async def test_rewards_travel_and_decide_where_there_is_no_outcome(
    isolation: str,
) -> None:
    async with scored_env(isolation) as env:
        for what, outcome, reward in (
            ("0.0", "fail", 0.0),
            ("0.4", "fail", 0.4),
            ("1.0", "pass", 1.0),
            ("judged-0.3", "pass", 0.3),  # the environment's own outcome stands
        ):
            end = await play(env, what)
            assert (end.outcome, end.reward) == (outcome, reward), what


@in_both
async def test_what_the_policys_action_broke_has_failed_and_is_no_invalid_episode(
    isolation: str,
) -> None:
    async with scored_env(isolation) as env:
        for what, reason in (
            ("breaks", "closed the only window"),
            ("judge-breaks", "what is judged"),
        ):
            sink = Memory()
            end = await play(env, what, sink)
            assert (end.outcome, end.stop_reason, end.reward) == ("fail", "broken", 0.0), what
            assert reason in end.reason
            assert end.steps == len(sink.steps) == (1 if what == "breaks" else 2), "all to train on"
        end = await play(env, "gives-way")
        assert (end.outcome, end.stop_reason, end.reward) == ("invalid", "environment", None)


@in_both
async def test_a_reward_out_of_range_is_refused(isolation: str) -> None:
    async with scored_env(isolation) as env:
        for what, message in (
            ("7.0", "evaluate must return a reward in [0, 1], got float 7.0 ("),
            ("odd-step", "step must return a finite number or None as its reward, got float nan"),
        ):
            end = await play(env, what)
            assert (end.outcome, end.stop_reason) == ("invalid", "environment"), what
            assert message in end.reason


@in_both
async def test_rewards_of_steps_are_kept_with_the_steps(isolation: str) -> None:
    async with scored_env(isolation) as env:
        sink = Memory()
        end = await play(env, "milestones", sink)
        assert [record.reward for record in sink.steps] == [0.25, 0.0]
        assert end.reward == 0.0, "the verdict's is no sum of them"


def test_a_reward_that_is_left_out_follows_from_the_outcome() -> None:
    assert [Verdict("pass", "").reward, Verdict("fail", "").reward] == [1.0, 0.0]
    assert Verdict("invalid", "", 0.5).reward is None
    assert Verdict.scored(0.99, "").outcome == "fail"
