"""Episodes on OpenEnv's real server: verdicts are the environment's own, and what breaks is invalid."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError
from envs.contract.actions import Click, Done, KeyPress, Scroll, Type
from envs.contract.registry import check_parts, make_env
from tests.envs.suites.openenv.servers import needs_openenv, real_server
from tests.envs.suites.openenv.square_screen import pixels_of, square_of

pytestmark = needs_openenv

QUICK = {"connect_s": 0.0, "step_s": 30.0}


@pytest.fixture(scope="module")
def server():
    with real_server() as address:
        yield address


@pytest.fixture
def env(profile, server):
    env = make_env(profile("base64"), url=f"{server}/base64", **QUICK)
    yield env
    env.close()


def reset(env, task="click", seed=5):
    return env.reset(seed=seed, options={"task": f"square/{task}"})


def square(seed: int) -> Click:
    x, y = square_of(seed)
    return Click(x=x + 5, y=y + 5)


@pytest.mark.parametrize("encoding", ["list", "flat", "base64", "data_url"])
def test_screens_in_every_encoding_are_those_of_the_environment(encoding, profile, server):
    env = make_env(profile(encoding), url=f"{server}/{encoding}", **QUICK)
    screen, info = reset(env, seed=5)
    pixels = np.asarray(Image.open(io.BytesIO(screen.screenshot)).convert("RGB"))
    np.testing.assert_array_equal(pixels, pixels_of(square_of(5), clicked=False))
    assert info["instruction"] == "Click the square."
    env.close()


def test_a_task_that_is_done_passes_as_the_server_says(env):
    reset(env)
    assert env.evaluate().outcome == "fail"
    assert env.step(Click(x=0, y=0))[1:4] == (0.0, False, False)
    assert env.step(square(5))[1:4] == (1.0, True, False)
    assert (env.evaluate().outcome, env.evaluate().reward) == ("pass", 1.0)
    with pytest.raises(EnvError, match="call reset"):
        env.step(square(5))


def test_a_claim_is_no_pass(env):
    reset(env)
    assert env.step(Done())[2]
    assert env.evaluate().outcome == "fail"


def test_the_same_seed_is_the_same_screen_and_a_session_is_kept(env):
    screens = [reset(env, seed=seed)[0].screenshot for seed in (5, 6, 5)]
    assert screens[0] == screens[2] != screens[1]


def test_other_actions_arrive_and_those_without_a_template_do_not(env):
    screen, _ = reset(env)
    assert env.step(KeyPress(keys=["a"]))[0] is screen
    env.step(Type(text='"; DROP'))
    env.step(Scroll(x=3, y=3, dy=1))
    assert env.step(square(5))[2]


@pytest.mark.parametrize(
    ("fault", "why"),
    [("reset", "EXECUTION_ERROR: no browser"), ("blind", r"observation\.screen: .* no screenshot")],
)
def test_a_reset_that_breaks_says_why(env, fault, why):
    with pytest.raises(EnvError, match=why):
        reset(env, fault)
    assert env.evaluate().outcome == "invalid"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("step", "EXECUTION_ERROR: the page crashed"),
        ("refuses", "refuses the action click: unknown action; start it with coordinates"),
    ],
)
def test_a_step_that_breaks_says_why_and_the_next_episode_begins(env, fault, why):
    reset(env, fault)
    with pytest.raises(EnvError, match=why):
        env.step(Click(x=1, y=1))
    assert env.evaluate().outcome == "invalid"
    reset(env)
    env.step(square(5))
    assert env.evaluate().outcome == "pass"


@pytest.mark.parametrize(("fault", "why"), [("null", "no reward"), ("seven", "outside reward.low")])
def test_rewards_that_say_nothing_are_invalid(env, fault, why):
    reset(env, fault)
    env.step(square(5))
    assert env.evaluate().outcome == "invalid"
    assert why in env.evaluate().reason


def test_an_end_without_success_fails(env):
    reset(env, "done")
    assert env.step(Click(x=0, y=0))[2]
    assert env.evaluate().outcome == "fail"


def test_a_full_server_is_named_and_free_again_after_a_close(profile, server):
    first, second = (make_env(profile("base64"), url=f"{server}/single", **QUICK) for _ in range(2))
    reset(first)
    with pytest.raises(EnvError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
        reset(second)
    first.close()
    second = make_env(profile("base64"), url=f"{server}/single", connect_s=30.0)
    reset(second)
    second.close()


def test_another_server_is_taken_where_one_is_full_or_down(profile, server):
    first = make_env(profile("base64"), url=f"{server}/single", **QUICK)
    reset(first)
    urls = [f"{server}/single", "http://127.0.0.1:1", f"{server}/base64"]
    others = [make_env(profile("base64"), url=urls, **QUICK) for _ in range(3)]
    for env in others:
        reset(env)
    for env in (first, *others):
        env.close()


def test_a_server_that_restarts_is_found_again(profile):
    with real_server() as address:
        env = make_env(profile("base64"), url=f"{address}/base64", step_s=30, connect_s=90)
        reset(env, "exit")
        with pytest.raises(EnvError, match="closed the connection"):
            env.step(Click(x=1, y=1))
        assert env.evaluate().outcome == "invalid"
    with real_server(int(address.rpartition(":")[2])):
        reset(env)
        env.step(square(5))
        assert env.evaluate().outcome == "pass"
        env.close()


def test_a_server_is_found_before_a_run(profile, server):
    check_parts(profile("base64"), {"url": [f"{server}/base64", "http://127.0.0.1:1"]})
    with pytest.raises(MissingPartError, match="start the environment's server"):
        check_parts(profile("base64"), {"url": "http://127.0.0.1:1"})
