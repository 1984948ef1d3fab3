"""What an explorer asks of an environment comes through a thread and through a process alike."""

from __future__ import annotations

import pytest

from bus.errors import EnvError
from dart_cli.config.schema import EnvConfig
from dart_cli.env import calls
from dart_cli.env.async_env import make_async_env
from envs.contract.actions import Click
from envs.contract.registry import find_task, make_env
from tests.env.unruly_suite import SUITE, UnrulySuite

TASK = find_task("mini", "mini/popup")


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_elements_and_state_are_those_of_the_environment(isolation: str) -> None:
    beside = make_env("mini")
    beside.reset(seed=3, options={"task": TASK})
    env = make_async_env(EnvConfig(suite="mini", isolation=isolation), "a/0")
    await env.reset(TASK, 3)
    looked = await env.look()
    await env.close()
    assert looked is not None
    assert looked[1]
    assert looked == (beside.state(), beside.elements())


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_one_without_a_tree_says_so(isolation: str) -> None:
    env = make_async_env(EnvConfig(suite=SUITE, isolation=isolation), "a/0")
    await env.reset(UnrulySuite.tasks["unruly/well"], 0)
    assert await env.look() is None
    await env.close()


def test_wrong_answers_are_the_environments_errors() -> None:
    env = make_env("mini")
    env.reset(seed=3, options={"task": TASK})
    env.elements = lambda: ["a button"]
    with pytest.raises(EnvError, match="must return a list of Element"):
        calls.look(env)
    env.state = lambda: "home"
    with pytest.raises(EnvError, match="must return a ScreenState"):
        calls.look(env)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_free_episode_goes_on_beyond_goal_and_limit(isolation: str) -> None:
    env = make_async_env(EnvConfig(suite="mini", isolation=isolation), "a/0")
    await env.reset(TASK, 3, free=True)
    steps = [await env.step((await env.solve())[0])]  # the goal
    steps += [await env.step(Click(x=0, y=0)) for _ in range(TASK.max_steps + 1)]
    assert not any(step.terminated or step.truncated for step in steps)
    await env.reset(TASK, 3)
    results = [await env.step(Click(x=0, y=0)) for _ in range(TASK.max_steps)]
    await env.close()
    assert results[-1].terminated or results[-1].truncated
