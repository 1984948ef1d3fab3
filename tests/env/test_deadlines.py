"""Which deadline a call of an environment has: an evaluator keeps its own, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

from dart_cli.config.schema import EnvConfig
from dart_cli.env.isolated import hosted
from envs.actions import Action, Answer, Click, Done, Fail
from tests.env.unruly_suite import SUITE, UnrulySuite

ELSEWHERE = Click(x=30, y=30)


class Told:
    """What was called, with which deadline."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float | None]] = []

    @contextmanager
    def waiting(
        self, what: str, deadline_s: float | None = None, *, on: str = ""
    ) -> Iterator[None]:
        self.calls.append((what.split()[2], deadline_s))
        yield


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
    told = Told()
    config = EnvConfig(
        suite=SUITE,
        isolation=isolation,
        reset_deadline_s=60.0,
        step_deadline_s=20.0,
        evaluate_deadline_s=50.0,
    )
    env = hosted(config, "env-0/0", told)
    try:
        await env.reset(UnrulySuite.tasks["unruly/well"], 0)
        for action in actions:
            await env.step(action)
        await env.evaluate()
    finally:
        await env.close()
    steps = [("step", 20.0)] * (len(actions) - 1) + [("step", last_s)]
    calls = [call for call in told.calls if call[0] != "close"]
    assert calls == [("reset", 60.0), *steps, ("evaluate", 50.0)]
