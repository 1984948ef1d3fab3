"""Episodes on a worker over HTTP: verdicts are the worker's own, and what breaks is invalid with the cure."""

from __future__ import annotations

import json
from random import Random
from urllib.request import urlopen

import pytest

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import Click, Done, Fail, KeyDown, Scroll, Type
from envs.contract.registry import check_parts, make_env
from tests.examples.cuabench.worker_process import worker

QUICK = {"connect_s": 0.0, "step_s": 20.0}


@pytest.fixture
def env(suite, url):
    env = make_env(suite, url=url, **QUICK)
    yield env
    env.close()


def square(index: int) -> Click:
    """The click that does task `index`; see worker_server.py."""
    rng = Random(index)
    x, y = rng.randrange(4, 64 - 16), rng.randrange(4, 48 - 16)
    return Click(x=x + 5, y=y + 5)


def reset(env, task="square-0"):
    return env.reset(seed=1, options={"task": f"cuabench/{task}"})


def requests_at(url: str) -> list[dict]:
    with urlopen(f"{url}/seen") as answer:
        return json.load(answer)["seen"]


def test_a_task_that_is_done_passes_with_the_workers_reward(env):
    screen, info = reset(env, "square-1")
    assert (screen.width, screen.height, screen.media_type) == (64, 48, "image/png")
    assert info["instruction"] == "Click the square."
    after, reward, over, truncated, _ = env.step(square(1))
    assert after.screenshot != screen.screenshot
    assert (reward, over, truncated) == (0.0, False, False)
    assert env.step(Done())[1:4] == (1.0, True, False)
    assert (env.evaluate().outcome, env.evaluate().reward) == ("pass", 1.0)


def test_a_task_that_is_not_done_fails_whatever_the_policy_says(env):
    for claim in (Done(), Fail()):
        reset(env)
        assert env.step(claim)[2]
        assert env.evaluate().outcome == "fail"


def test_steps_that_run_out_are_judged_too(env):
    reset(env)
    env.step(square(0))
    assert env.evaluate().outcome == "pass"


def test_a_part_of_a_reward_is_no_pass(env):
    reset(env)
    env.step(square(0))
    env.step(Type(text="x"))
    verdict = env.evaluate()
    assert (verdict.outcome, verdict.reward) == ("fail", 0.5)


def test_an_action_that_a_worker_has_not_sends_nothing_and_changes_nothing(env, url):
    screen, _ = reset(env)
    before = len(requests_at(url))
    assert env.step(KeyDown(key="ctrl"))[0] is screen
    assert len(requests_at(url)) == before
    env.step(Scroll(x=5, y=5, dy=1))
    assert [each["action"]["type"] for each in requests_at(url)[before:]] == [
        "MoveToAction",
        "ScrollAction",
    ]


def test_an_idle_episode_is_never_ended_by_the_worker(env, url):
    reset(env)
    assert requests_at(url)[-1]["timeout"] >= 24 * 3600


def test_closing_ends_the_episode_and_gives_the_worker_back(suite, url):
    first, second = (make_env(suite, url=url, **QUICK) for _ in range(2))
    reset(first)
    with pytest.raises(EnvError, match="in use by slots"):
        reset(second)
    first.close()
    assert requests_at(url)[-1]["path"] == "/shutdown"
    reset(second)
    second.close()
    second.close()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("full", r"503: No available environments.*start the worker"),
        ("reset", r"500: create_sandbox was never called"),
        ("redirect", r"redirect \(307\); name the address itself"),
        ("image", r"no PNG, JPEG or WebP"),
        ("big", r"more than 1 MiB; env\.options\.reply_mb"),
    ],
)
def test_a_reset_that_breaks_says_why(suite, url, fault, why):
    env = make_env(suite, url=url, reply_mb=1, **QUICK)
    with pytest.raises(EnvError, match=why):
        reset(env, f"{fault}-0")
    assert env.evaluate().outcome == "invalid"
    env.close()


def test_a_worker_that_answers_too_late_makes_the_episode_invalid(suite):
    with worker() as address:
        env = make_env(suite, url=address, connect_s=0, step_s=0.2)
        reset(env, "hang-0")
        with pytest.raises(EnvError, match=r"no whole answer in 0\.2 s"):
            env.step(Click(x=1, y=1))
        assert env.evaluate().outcome == "invalid"
        env.close()


def test_a_reward_that_is_none_is_invalid(env):
    reset(env, "reward-0")
    env.step(Done())
    assert env.evaluate().outcome == "invalid"
    assert "7" in env.evaluate().reason


def test_another_clients_reset_is_named(env, url, suite):
    reset(env)
    body = json.dumps({"env_path": "faults/reset", "task_index": 0}).encode()
    with pytest.raises(OSError, match="500"):
        urlopen(f"{url}/reset", body)
    with pytest.raises(EnvError, match=r"404.*each slot needs its own worker"):
        env.step(Click(x=1, y=1))
    reset(env)
    env.step(square(0))
    assert env.evaluate().outcome == "pass"


def test_a_worker_that_restarts_is_found_again(suite):
    with worker() as address:
        env = make_env(suite, url=address, **QUICK | {"connect_s": 60.0})
        reset(env, "exit-0")
        with pytest.raises(EnvError):
            env.step(Click(x=1, y=1))
        assert env.evaluate().outcome == "invalid"
    with worker(int(address.rpartition(":")[2])):
        reset(env)
        env.step(square(0))
        assert env.evaluate().outcome == "pass"
        env.close()


def test_another_worker_is_taken_where_one_is_down(suite, url):
    for urls in (["http://127.0.0.1:1", url], [url, "http://127.0.0.1:1"]):  # slots begin at either
        env = make_env(suite, url=urls, connect_s=20.0)
        reset(env)
        env.close()


def test_the_token_travels_in_the_header_and_in_no_error(suite, url, monkeypatch):
    monkeypatch.setenv("WORKER_TOKEN", "hush-hush")
    env = make_env(suite, url=url, token_env="WORKER_TOKEN", **QUICK)
    reset(env)
    assert requests_at(url)[-1]["authorization"] == "Bearer hush-hush"
    with pytest.raises(EnvError) as error:
        reset(env, "reset-0")
    assert "hush" not in repr(error.value)
    env.close()


def test_no_worker_is_found_before_a_run(suite, url):
    check_parts(suite, {"url": [url, "http://127.0.0.1:1"]})
    with pytest.raises(
        MissingPartError, match=r"no server answers there.*worker_server --port 8001"
    ):
        check_parts(suite, {"url": "http://127.0.0.1:1"})
    with pytest.raises(TaskError, match="step_s must be greater than 0"):
        make_env(suite, url=url, step_s=0)
