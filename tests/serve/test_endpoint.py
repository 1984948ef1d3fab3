"""Promises of the endpoint, over a socket: sessions are episodes, requests are steps, verdicts are ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bus.errors import DeadlineError, EngineError, PromptError
from bus.messages import ActRequest, Completion
from envs.contract.blobs import content_hash
from tests.env.parts import Says
from tests.serve.parts import (
    Endpoint,
    GatedPolicy,
    endpoint,
    first,
    image_part,
    picture,
    text,
    user,
)
from tests.waiting import until


async def test_an_episode_is_filed_as_steps_and_a_verdict() -> None:
    async with endpoint(Says("click(500,500)", "done()")) as there:
        opened = await there.call("POST", "/v1/sessions", {"task": "mini/popup"})
        assert opened.body | {"id": "", "seed": 0} == {
            "object": "session",
            "id": "",
            "trajectory_id": "t-1",
            "group_id": "g-1",
            "task": "mini/popup",
            "seed": 0,
            "instruction": opened.body["instruction"],
            "max_steps": 8,
            "steps": 0,
            "train": True,
            "state": "open",
            "temperature": 1.0,
            "max_tokens": 16,
        }
        name = opened.body["id"]
        one = await there.chat(name, first(1))
        assert (one.content, one.body["usage"]["completion_tokens"]) == ("click(500,500)", 14)
        assert one.body["usage"]["prompt_tokens"] == 3
        assert one.body["dart"]["token_ids"] == list(b"click(500,500)")
        assert one.body["dart"]["versions"] == [[4, 0, 14]]
        messages = [
            *first(1),
            {"role": "assistant", "content": one.content},
            user(image_part(picture(2))),
        ]
        two = await there.chat(name, messages, logprobs=True)
        assert [each["logprob"] for each in two.body["choices"][0]["logprobs"]["content"]] == [
            -0.5
        ] * 6
        assert [record.step for record in there.data.steps] == [0], (
            "the newest step is still played"
        )
        end_reply = await there.end(name, reward=1, reason="the button was red")
        assert (end_reply.status, end_reply.body["outcome"], end_reply.body["accepted"]) == (
            200,
            "pass",
            True,
        )
        steps, [end] = there.data.steps, there.data.ends
        assert [record.screenshot for record in steps] == [picture(1), picture(2)]
        assert steps[1].image_hashes == [content_hash(picture(1)), content_hash(picture(2))]
        assert [record.action for record in steps] == [
            {"kind": "click", "x": 42, "y": 28, "button": "left"},
            {"kind": "done"},
        ]
        assert [record.instruction for record in steps] == ["pick red", ""]
        assert (end.steps, end.outcome, end.reward, end.stop_reason) == (2, "pass", 1.0, "done")
        assert end.reason == "the button was red"
        assert end.wall_s >= end.reset_s >= 0
        assert all(record.model_s >= 0 and record.env_s >= 0 for record in steps)
        late = await there.chat(name, first(3))
        assert (late.status, late.code) == (410, "session_over")


async def test_past_completions_of_the_session_are_their_tokens_and_others_text() -> None:
    policy = Says("click(1,1)", "click(1,1)", "done()")
    async with endpoint(policy) as there:
        name = await there.open()
        said = {"role": "assistant", "content": "click(1,1)"}
        other = {"role": "assistant", "content": "click(9,9)"}
        await there.chat(name, first(1))
        await there.chat(name, [*first(1), said, other, user(image_part(picture(2)))])
        await there.chat(name, [*first(1), said, said, said, user(image_part(picture(3)))])
        second, third = policy.requests[1].messages, policy.requests[2].messages
        assert [each.token_ids for each in second] == [[], list(b"click(1,1)"), [], []]
        assert [bool(each.token_ids) for each in third] == [False, False, True, True, False]


async def test_several_new_images_are_handed_in_once() -> None:
    async with endpoint() as there:
        name = await there.open()
        goal, one, two = picture(7), picture(1), picture(2)
        await there.chat(name, [user(image_part(goal), image_part(one), text("like the first"))])
        await there.chat(name, [user(image_part(goal), image_part(one), image_part(two))])
        await there.end(name, outcome="fail")
        assert [record.images for record in there.data.steps] == [[goal], []]
        assert [record.screenshot for record in there.data.steps] == [one, two]


async def test_a_text_in_a_language_of_the_agent_is_kept_without_an_action() -> None:
    async with endpoint(Says("Thought: press it. Action: tap <1>")) as there:
        name = await there.open()
        await there.chat(name, first())
        await there.end(name, outcome="pass")
        [record] = there.data.steps
        assert (record.action, record.error) == (None, "")
        assert record.text == "Thought: press it. Action: tap <1>"


@pytest.mark.parametrize(
    ("submitted", "outcome", "reward", "stop"),
    [
        ({"reward": 0.4}, "fail", 0.4, "done"),
        ({"reward": 0.4, "outcome": "pass"}, "pass", 0.4, "done"),
        ({"outcome": "fail", "stop_reason": "gave_up"}, "fail", 0.0, "gave_up"),
        ({"outcome": "invalid", "reason": "the browser died"}, "invalid", None, "environment"),
    ],
)
async def test_a_verdict_is_a_reward_or_an_outcome(
    submitted: dict[str, Any], outcome: str, reward: float | None, stop: str
) -> None:
    async with endpoint() as there:
        name = await there.open()
        await there.chat(name, first())
        await there.end(name, **submitted)
        [end] = there.data.ends
        assert (end.outcome, end.reward, end.stop_reason) == (outcome, reward, stop)


async def test_an_agent_that_opens_no_session_names_one() -> None:
    """By a header, by `user`, by metadata; its task by a header or the model's name."""
    async with endpoint() as there:
        path, body = "/v1/chat/completions", {"messages": first(), "model": "dart:mini/popup"}
        one = await there.call("POST", path, body | {"user": "episode-1"})
        two = await there.call(
            "POST",
            path,
            body | {"model": "gpt-4o"},
            {"x-dart-session": "b", "x-dart-task": "mini/tabs"},
        )
        three = await there.call(
            "POST", path, body | {"metadata": {"session": "c"}, "model": "any"}
        )
        sessions = [each.body["dart"] for each in (one, two, three)]
        assert [each["session"] for each in sessions] == ["episode-1", "b", "c"]
        assert [each["task"] for each in sessions] == ["mini/popup", "mini/tabs", "mini/menu"]
        assert [each.task for each in there.data.requests] == ["mini/popup", "mini/tabs", ""]
        await there.end("c", outcome="fail")
        of_litellm = {"session_id": "trial__agent", "return_token_ids": True, "model": "x"}
        four = await there.call("POST", path, {**body, **of_litellm})
        assert four.body["dart"]["session"] == "trial__agent"
        assert four.body["choices"][0]["token_ids"] == four.body["dart"]["token_ids"]
        assert four.body["prompt_token_ids"] == [1, 2, 3]
        again = await there.call("POST", path, body | {"user": "episode-1"})
        assert again.body["dart"]["step"] == 1
        other = await there.call(
            "POST", path, body | {"user": "episode-1", "model": "dart:mini/tabs"}
        )
        assert (other.status, "plays 'mini/popup', not 'mini/tabs'" in other.error) == (400, True)
        nameless = await there.call("POST", path, body)
        assert (nameless.status, nameless.code) == (400, "no_session")
        await there.end("b", outcome="fail")
        over = await there.call("POST", path, body | {"user": "b"})
        assert (over.status, "take another for the next" in over.error) == (410, True)


async def test_sessions_outside_training_file_nothing_and_sample_as_they_ask() -> None:
    policy = Says("click(1,1)")
    async with endpoint(policy) as there:
        name = await there.open(task="mini/popup", train=False)
        await there.chat(name, first(), temperature=0, max_tokens=5, seed=9)
        sampling = policy.requests[0].sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.0, 5, 9)
        await there.end(name, reward=1)
        assert (there.data.requests, there.data.steps, there.data.ends) == ([], [], [])


async def test_a_stream_is_one_chunk() -> None:
    async with endpoint() as there:
        name = await there.open()
        told = await there.chat(name, first(), stream=True, stream_options={"include_usage": True})
        assert told.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in told.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"]["content"] == "click(500,500)"
        assert chunks[1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[2]["usage"]["completion_tokens"] == 14


async def test_models_and_sessions_are_listed() -> None:
    async with endpoint() as there:
        name = await there.open()
        assert [each["id"] for each in (await there.call("GET", "/v1/models")).body["data"]] == [
            "dart"
        ]
        assert (await there.call("GET", "/v1/models/dart")).body["id"] == "dart"
        assert (await there.call("GET", "/v1/models/gpt-4o")).status == 404
        listed = (await there.call("GET", "/v1/sessions")).body["data"]
        assert [each["id"] for each in listed] == [name]
        assert (await there.call("GET", f"/v1/sessions/{name}")).body == listed[0]
        assert (await there.call("GET", "/v1/sessions/x")).code == "no_session"
        assert (await there.call("GET", "/v1/nothing")).status == 404


# --- what goes wrong ------------------------------------------------------------------------


async def test_two_requests_at_once_in_one_session_are_refused() -> None:
    policy = GatedPolicy("click(1,1)")
    async with endpoint(policy) as there:
        name = await there.open()
        asking = asyncio.create_task(there.chat(name, first(1)))
        await until(lambda: policy.requests)
        second = await there.chat(name, first(2))
        assert (second.status, second.code) == (409, "session_busy")
        assert second.headers["x-should-retry"] == "false"
        assert (await there.end(name, reward=1)).status == 409
        policy.may.set()
        assert (await asking).status == 200
        assert (await there.chat(name, first(2))).body["dart"]["step"] == 1


async def test_a_repeated_request_gets_the_answer_of_the_first() -> None:
    """OpenAI's clients repeat a request whose connection was lost, and say so."""
    policy, again = GatedPolicy("click(1,1)", "click(2,2)"), {"x-stainless-retry-count": "1"}
    async with endpoint(policy) as there:
        name = await there.open()
        asking = asyncio.create_task(there.chat(name, first(1)))
        await until(lambda: policy.requests)
        joined = asyncio.create_task(there.chat(name, first(1), again))
        policy.may.set()
        answers = [await asking, await joined, await there.chat(name, first(1), again)]
        assert {each.body["id"] for each in answers} == {answers[0].body["id"]}
        assert len(policy.requests) == 1
        assert (await there.chat(name, first(1))).content == "click(2,2)", (
            "without the header it is new"
        )


async def test_a_session_ends_with_its_steps() -> None:
    async with endpoint() as there:
        there.data.max_steps = 1
        name = await there.open()
        assert (await there.chat(name, first())).body["dart"]["steps_left"] == 0
        more = await there.chat(name, first(2))
        assert (more.status, more.code) == (400, "step_limit")
        await there.end(name, outcome="fail")
        assert there.data.ends[0].stop_reason == "step_limit"


async def test_an_agent_that_vanishes_leaves_an_invalid_trajectory() -> None:
    async with endpoint(idle_s=0.2) as there:
        name = await there.open()
        await there.chat(name, first())
        await until(lambda: there.data.ends)
        [end] = there.data.ends
        assert (end.outcome, end.stop_reason, end.steps) == ("invalid", "environment", 1)
        assert "no request for 0.2 s" in end.reason
        await until(lambda: not there.sessions.all())
        late = await there.end(name, reward=1)
        assert late.status == 410
        assert there.sessions.load().gauges["invalid"] == 1


async def test_a_session_that_is_answered_is_not_idle() -> None:
    policy = GatedPolicy("click(1,1)")
    async with endpoint(policy, idle_s=0.1) as there:
        name = await there.open()
        asking = asyncio.create_task(there.chat(name, first()))
        await until(lambda: policy.requests)
        await there.open()  # idle, and later than the other
        await until(lambda: there.data.ends)
        policy.may.set()
        assert (await asking).status == 200


async def test_sessions_are_bounded_and_slots_come_back() -> None:
    async with endpoint() as there:
        names = [await there.open() for _ in range(3)]
        full = await there.call("POST", "/v1/sessions", {})
        assert (full.status, full.headers["retry-after"]) == (429, "5")
        assert "serve.sessions = 3" in full.error
        deleted = await there.call("DELETE", f"/v1/sessions/{names[1]}")
        assert deleted.body["deleted"]
        assert [end.stop_reason for end in there.data.given_back] == ["cancelled"]
        await there.open()
        assert [request.slot for request in there.data.requests] == [0, 1, 2, 1]


async def test_what_data_refuses_names_the_cure() -> None:
    async with endpoint() as there:
        wrong = await there.call("POST", "/v1/sessions", {"task": "mini/none"})
        assert (wrong.status, wrong.error) == (400, "no training task 'mini/none' in this run")
        there.data.refusal = "24 groups play; data.max_open_groups = 24"
        none = await there.call("POST", "/v1/sessions", {})
        assert (none.status, none.code, none.headers["retry-after"]) == (503, "no_lease", "5")
        assert "data.max_open_groups = 24" in none.error
        there.data.refusal = ""
        await there.open()
        assert len(there.sessions) == 1


async def test_no_task_is_leased_that_cannot_be_played() -> None:
    async with endpoint(lease_wait_s=0.05) as there:
        there.router.ready.clear()
        none = await there.call("POST", "/v1/sessions", {})
        assert (none.status, none.code) == (503, "no_rollout")
        assert "start `dart rollout`" in none.error
        assert not there.data.requests


async def test_a_lease_that_data_took_back_is_told_at_the_next_request() -> None:
    async with endpoint() as there:
        there.data._lost_from = 0
        name = await there.open()
        await there.chat(name, first(1))
        await there.chat(name, first(2))
        lost = await there.chat(name, first(3))
        assert (lost.status, "its lease was taken back: expired" in lost.error) == (410, True)
        assert not there.sessions.all()


async def test_while_data_is_away_nothing_is_lost() -> None:
    async with endpoint() as there:
        name = await there.open()
        await there.chat(name, first(1))
        there.data.away.set()
        assert (await there.chat(name, first(2))).status == 200, "one step may be on its way"
        away = await there.chat(name, first(3))
        assert (away.status, away.headers["x-should-retry"]) == (503, "true")
        assert "dart data has not taken its step" in away.error
        assert (await there.end(name, reward=1)).status == 503
        there.data.back.set()
        end_reply = await there.end(name, reward=1)
        assert (end_reply.status, end_reply.body["outcome"]) == (200, "pass")
        assert (await there.end(name, reward=1)).body == end_reply.body, "asked again, the same"
        assert (await there.end(name, reward=0)).status == 410, "another verdict is too late"
        assert [record.step for record in there.data.steps] == [0, 1]
        assert len(there.data.ends) == 1
        assert there.sessions.load().gauges["episodes"] == 1


class Fails(Says):
    """Raises once, then answers."""

    def __init__(self, error: Exception) -> None:
        super().__init__("click(1,1)")
        self.error: Exception | None = error

    async def act(self, request: ActRequest) -> Completion:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return await super().act(request)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptError("needs 9000 positions"), 400, "invalid_prompt"),
        (EngineError("512 requests wait already"), 503, "unavailable"),
        (DeadlineError("no rollout worker is ready"), 503, "unavailable"),
    ],
)
async def test_a_completion_that_fails_is_no_step(error: Exception, status: int, code: str) -> None:
    async with endpoint(Fails(error)) as there:
        name = await there.open()
        failed = await there.chat(name, first(1))
        assert (failed.status, failed.code, failed.error) == (status, code, str(error))
        assert (await there.chat(name, first(1))).body["dart"]["step"] == 0
        await there.end(name, outcome="pass")
        assert there.data.ends[0].steps == 1


async def test_a_verdict_needs_a_step() -> None:
    async with endpoint() as there:
        name = await there.open()
        assert "has no step" in (await there.end(name, reward=1)).error
        assert (await there.end(name, outcome="invalid")).status == 200


async def test_leases_are_given_back_at_the_end() -> None:
    policy = GatedPolicy("click(1,1)")
    async with endpoint(policy) as there:
        await there.open()
        name = await there.open()
        asking = asyncio.create_task(there.chat(name, first(1)))
        await until(lambda: policy.requests)
        await there.sessions.give_back("dart serve was stopped")
        assert (await asking).status == 410
        assert {end.trajectory_id for end in there.data.given_back} == {"t-1", "t-2"}
        assert {end.stop_reason for end in there.data.given_back} == {"cancelled"}
        closed = await there.call("POST", "/v1/sessions", {})
        assert (closed.status, closed.error) == (503, "dart serve was stopped")


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BROKEN: list[tuple[bytes, int, str]] = [
    (b"{", 400, "no JSON"),
    (b"\xff\xfe{}", 400, "no JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b'{"messages": NaN}', 400, "no JSON"),
    (_nested(100_000), 400, "no JSON"),
    (b" " * (2**20 + 1), 413, "images in it"),
    (b'{"messages": [], "model": "dart"}', 400, "messages: List should have at least 1 item"),
    (b'{"messages": ["x"], "model": "dart"}', 400, "messages[0] must be a valid dictionary"),
]


@pytest.mark.parametrize(("body", "status", "told"), BROKEN)
async def test_a_body_that_is_no_chat_is_refused(body: bytes, status: int, told: str) -> None:
    async with endpoint() as there:
        name = await there.open()
        answer = await there.call("POST", f"/v1/sessions/{name}/chat/completions", body)
        assert answer.status == status
        assert told in answer.error
        assert (await there.chat(name, first())).status == 200, "the session goes on"


async def test_a_body_without_a_length_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        head = "POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(3):
            writer.write(piece)
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()


async def _refused(there: Endpoint, name: str, headers: dict[str, str]) -> int:
    return (await there.call("GET", f"/v1/{name}", headers=headers)).status


async def test_only_its_own_names_programs_and_the_token_are_let_in() -> None:
    async with endpoint() as there:
        assert await _refused(there, "models", {"host": "evil.example"}) == 421
        assert await _refused(there, "models", {"origin": "http://evil.example"}) == 403
        assert await _refused(there, "models", {"host": "localhost:1"}) == 200
        form = {"content-type": "text/plain"}
        assert (await there.call("POST", "/v1/sessions", b"{}", form)).status == 415
        assert (await there.call("PUT", "/v1/models")).status == 405
    async with endpoint(host="0.0.0.0", token="a-token-of-this-test") as there:
        assert await _refused(there, "models", {}) == 401
        wrong = await there.call("GET", "/v1/models", headers={"authorization": "Bearer wrong"})
        assert wrong.body["error"]["type"] == "authentication_error"
        assert (
            await _refused(there, "models", {"authorization": "Bearer a-token-of-this-test"}) == 200
        )
