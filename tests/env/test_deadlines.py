"""Which deadline a call of an environment has: an evaluator keeps its own, wherever it runs."""

from __future__ import annotations

from typing import Literal

import pytest

from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import make_async_env
from envs.contract.actions import Action, Answer, Click, Done, Fail
from tests.env.parts import RecordedWaits
from tests.env.unruly_suite import SUITE, UnrulySuite

ELSEWHERE = Click(x=30, y=30)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(
    ("actions", "last_s"),
    [
        ([ELSEWHERE, ELSEWHERE], 20.0),
        ([ELSEWHERE, Done()], 70.0),
        ([Fail()], 70.0),
        ([Answer(text="5")], 70.0),
        ([ELSEWHERE] * 3, 70.0),  # the task's last step
    ],
)
async def test_a_step_that_ends_its_episode_may_take_the_evaluators_time_too(
    isolation: Literal["thread", "process"], actions: list[Action], last_s: float
) -> None:
    waits = RecordedWaits()
    config = EnvConfig(
        suite=SUITE,
        isolation=isolation,
        reset_deadline_s=60.0,
        step_deadline_s=20.0,
        evaluate_deadline_s=50.0,
    )
    env = make_async_env(config, "env-0/0", waits)
    try:
        await env.reset(UnrulySuite.tasks["unruly/well"], 0)
        for action in actions:
            await env.step(action)
        await env.evaluate()
    finally:
        await env.close()
    steps = [("step", 20.0)] * (len(actions) - 1) + [("step", last_s)]
    calls = [(wait.what.split()[2], wait.deadline_s) for wait in waits.all]
    calls = [call for call in calls if call[0] != "close"]
    assert calls == [("reset", 60.0), *steps, ("evaluate", 50.0)]
