"""What a server may say instead of an observation: each is an EnvError that names it and its cure."""

from __future__ import annotations

import base64
import json

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Response

from bus.errors import EnvError, TaskError
from envs.contract.actions import Click
from envs.contract.registry import make_env
from tests.envs.suites.openenv.servers import error, observation, says, scripted_server
from tests.envs.suites.openenv.square_screen import pixels_of, png_of

SCREEN = base64.b64encode(png_of(pixels_of((4, 4), clicked=False))).decode()


def play(suite, handle, **options):
    """Reset and one step at a server that does `handle`; the error of either, as text, or the reward."""
    server = {key: options.pop(key) for key in ("process_request",) if key in options}
    with scripted_server(handle, **server) as url:
        env = make_env(
            suite, url=url, **{"connect_s": 0.0, "step_s": 20.0, "reset_s": 20.0} | options
        )
        try:
            env.reset(seed=1, options={"task": "square/click"})
            return env.step(Click(x=1, y=1))[1]
        except EnvError as told:
            assert env.evaluate().outcome == "invalid"
            return str(told)
        finally:
            env.close()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["no json"], "no JSON: no json"),
        (["[1, 2]"], "no observation, but [1, 2]"),
        ([{"type": "state", "data": {}}], "no observation, but"),
        ([observation(SCREEN, done="yes")], "no observation, but"),
        ([observation(SCREEN, reward="1")], "the reward is '1'"),
        (
            ['{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}'],
            "is nan",
        ),
        ([observation(SCREEN, done=True)], "over at its reset"),
        ([observation(None)], "observation.screen: the server sent no screenshot"),
        ([observation("AAAA")], "observation.screen: 3 bytes that are no PNG"),
        ([observation([[[1, 2, 3]]])], "observation.screen is list"),
        (
            [error("FACTORY_ERROR", "Square failed")],
            "FACTORY_ERROR: Square failed; the server cannot make",
        ),
        ([error("SESSION_ERROR", "gone")], "SESSION_ERROR: gone"),
        ([error("EXECUTION_ERROR", "boom\n" * 99)], "EXECUTION_ERROR: boom boom"),
        ([error("UNKNOWN_TYPE")], "does not support OpenEnv's messages"),
        (
            [error("VALIDATION_ERROR", errors=[{"loc": ["x"], "msg": "Field required"}])],
            "x: Field required; the environment does not take this payload: correct [actions]",
        ),
        ([{"type": "error", "data": None}], "UNKNOWN: no message"),
        ([], "the server closed the connection"),
        ([observation(SCREEN)], "the server closed the connection"),
        ([observation(SCREEN), error("CAPACITY_REACHED", "1/1")], "CAPACITY_REACHED: 1/1"),
    ],
)
def test_what_is_no_observation_is_an_error_that_names_it(profile, answers, why):
    assert why in play(profile("base64"), says(*answers))


def test_a_session_that_ended_between_episodes_is_opened_anew(profile):
    with scripted_server(says(observation(SCREEN))) as url:  # each connection answers once
        env = make_env(profile("base64"), url=url, connect_s=0.0)
        for _ in range(3):
            env.reset(seed=1, options={"task": "square/click"})
        env.close()


def test_a_last_step_without_a_screenshot_keeps_the_one_before(profile):
    answers = says(observation(SCREEN), observation(None, reward=1, done=True))
    assert play(profile("base64"), answers) == 1.0


def test_true_is_a_reward(profile):
    answers = says(observation(SCREEN), observation(SCREEN, reward=True))
    assert play(profile("base64"), answers) == 1.0


def test_a_server_that_is_full_at_first_is_waited_for(profile):
    waiting = [
        says(observation(SCREEN), observation(SCREEN)),
        says(error("CAPACITY_REACHED", "1/1")),
    ]

    def next_of(connection):
        waiting.pop()(connection)

    assert play(profile("base64"), next_of, connect_s=60.0) == 0.0
    assert not waiting


def test_an_error_that_was_sent_before_any_request_is_read(profile):
    def full(connection):
        connection.send(json.dumps(error("CAPACITY_REACHED", "1/1")))

    assert "CAPACITY_REACHED: 1/1" in play(profile("base64"), full)


def test_an_answer_that_is_too_large_or_too_late_is_refused(profile):
    large = says(observation("A" * (2 << 20)))
    assert "more than 1 MiB; env.options.reply_mb" in play(profile("base64"), large, reply_mb=1)

    def silent(connection):
        for _ in connection:
            pass

    assert "reset: no answer in 0.1 s" in play(profile("base64"), silent, reset_s=0.1)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (302, "answers with a redirect; name the address itself"),
        (401, "answers 401; set env.options.token_env"),
        (404, "answers 404; is it the address of an OpenEnv server?"),
    ],
)
def test_a_handshake_that_is_refused_says_why(profile, status, why):
    def refuse(_connection, _request):
        return Response(
            status, "no", Headers({"Location": "ws://127.0.0.1:1/ws", "Content-Length": "0"})
        )

    assert why in play(profile("base64"), says(), process_request=refuse)


def test_the_token_travels_in_the_handshake_and_in_no_error(profile, monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "hush-hush")
    headers = []

    def refuse(_connection, request):
        headers.append((request.path, request.headers["Authorization"]))
        return Response(403, "no", Headers({"Content-Length": "0"}))

    told = play(profile("base64"), says(), process_request=refuse, token_env="SERVER_TOKEN")
    assert headers == [("/ws", "Bearer hush-hush")]
    assert "hush" not in told


def test_numbers_that_are_no_even_list_are_read_as_any_json(profile):
    assert "different lengths" in play(profile("list"), says(observation([[[1], [2]], [[3]]])))
    assert "outside 0 to 255" in play(profile("list"), says(observation([[[1, 2, 256]]])))


@pytest.mark.parametrize(
    "option", [{"url": ""}, {"url": "box"}, {"connect_s": -1}, {"reply_mb": "1"}]
)
def test_options_that_cannot_be_used_are_refused(profile, option):
    with pytest.raises(TaskError, match=next(iter(option))):
        make_env(profile("base64"), **{"url": "http://127.0.0.1:1"} | option)
