"""A chat server's failures are told apart: what to repeat, when, what the user must fix, what was refused."""

from __future__ import annotations

import asyncio
import email.utils
import threading
import time
from typing import Any

import pytest

from bus.errors import EngineError, NoAnswerError, RefusalError, UserError
from dart_cli.chat import asking
from dart_cli.chat.asking import answer, ask_again
from dart_cli.chat.server import ChatReply, ChatServer, Sampled, SettingNames, chat_server
from tests.chat.chat_server import Raw, Says, chat, message

PAGE = b"<!DOCTYPE html><html><body>Sign in</body></html>"
NAMES = SettingNames("teacher.url", "teacher.name", "teacher.key_env")


def server(url: str, **settings: Any) -> ChatServer:
    return ChatServer(url, "eyes", names=NAMES, **settings)


def ask(says: Says, sampled: Sampled | None = None) -> ChatReply:
    with chat(says) as url:
        return server(url).ask([("user", ["hello"])], sampled or Sampled())


def test_a_request_has_the_settings_that_are_set_and_no_others() -> None:
    bodies: list[dict[str, Any]] = []

    def says(body: dict[str, Any]) -> str:
        bodies.append(body)
        return "hi"

    ask(says, Sampled(max_tokens=5))
    ask(says, Sampled(max_tokens=5, temperature=0.0, seed=3, template={"enable_thinking": True}))
    plain = {"model": "eyes", "messages": [{"role": "user", "content": "hello"}]}
    plain["max_completion_tokens"] = 5
    assert bodies == [
        plain,
        plain | {"temperature": 0.0, "seed": 3, "chat_template_kwargs": {"enable_thinking": True}},
    ]


@pytest.mark.parametrize(
    ("status", "kind", "is_worth_repeating"),
    [
        (400, NoAnswerError, False),
        (413, NoAnswerError, False),
        (429, NoAnswerError, True),
        (500, NoAnswerError, True),
        (503, NoAnswerError, True),
        (401, UserError, None),
        (402, UserError, None),
        (404, UserError, None),
        (302, UserError, None),
    ],
)
def test_a_status_says_whether_another_request_could_help(
    status: int, kind: type[Exception], is_worth_repeating: bool | None
) -> None:
    with pytest.raises(kind, match=f"answers {status}") as raised:
        ask(lambda _: status)
    if isinstance(raised.value, NoAnswerError):
        assert raised.value.is_worth_repeating is is_worth_repeating


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_is_left_alone_for_as_long_as_it_asks(
    as_date: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = email.utils.formatdate(time.time() + 20, usegmt=True) if as_date else "20"
    answers = iter([Raw(429, b"{}", {"Retry-After": header}), Raw(503), "hi"])
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asking.asyncio, "sleep", note)

    async def run(url: str) -> ChatReply:
        return await ask_again(
            lambda: answer(server(url), [("user", ["hello"])], Sampled()),
            attempts=3,
            back_off_s=1.5,
            name="eyes",
        )

    with chat(lambda _: next(answers)) as url:
        assert asyncio.run(run(url)).text == "hi"
    asked, backed_off = pauses
    assert 17 <= asked <= 20
    assert backed_off == 3.0  # the second pause, twice the first


def test_a_server_that_asks_for_too_long_a_pause_is_not_waited_for() -> None:
    calls: list[int] = []

    def says(_: dict[str, Any]) -> Raw:
        calls.append(1)
        return Raw(429, b"{}", {"Retry-After": "86400"})

    async def run(url: str) -> None:
        def ask() -> Any:
            return answer(server(url), [("user", ["hello"])], Sampled())

        await ask_again(ask, attempts=4, back_off_s=0.0, name="eyes")

    with chat(says) as url, pytest.raises(EngineError, match="no answer to 1 request; the last"):
        asyncio.run(run(url))
    assert len(calls) == 1


@pytest.mark.parametrize("wish", ["", "soon", "-3", "Wed, 99 Foo"])
def test_a_wish_that_cannot_be_read_is_none(wish: str) -> None:
    with pytest.raises(NoAnswerError) as raised:
        ask(lambda _: Raw(429, b"{}", {"Retry-After": wish}))
    assert raised.value.after_s == 0.0


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (message(None, refusal="I cannot help with that."), "I cannot help with that"),
        (message("", "content_filter"), "filters"),
    ],
)
def test_a_refusal_is_told_with_what_it_cost_and_never_repeated(raw: Raw, why: str) -> None:
    calls: list[int] = []

    def says(_: dict[str, Any]) -> Raw:
        calls.append(1)
        return raw

    async def run(url: str) -> None:
        def ask() -> Any:
            return answer(server(url), [("user", ["hello"])], Sampled())

        await ask_again(ask, attempts=4, back_off_s=0.0, name="eyes")

    with chat(says) as url, pytest.raises(RefusalError, match=why) as raised:
        asyncio.run(run(url))
    assert (raised.value.prompt_tokens, raised.value.completion_tokens) == (100, 7)
    assert len(calls) == 1


def test_thoughts_that_a_server_takes_out_and_answers_that_are_cut_off_are_told() -> None:
    reply = ask(lambda _: message("click(1,2)", reasoning_content="It is red."))
    assert reply == ChatReply("click(1,2)", 100, 7, "It is red.")
    assert ask(lambda _: message(None, "length", reasoning="Hm")) == ChatReply(
        "", 100, 7, "Hm", is_cut_off=True
    )


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[]", b"{}", b'{"choices": []}', b'{"choices": [3]}', PAGE, b"[" * 10**5]
)
def test_nonsense_is_no_answer(body: bytes) -> None:
    with pytest.raises(NoAnswerError, match=r"message\.content") as raised:
        ask(lambda _: Raw(200, body))
    assert ("page of HTML" in str(raised.value)) == (body == PAGE)


def test_a_page_with_an_error_is_not_printed() -> None:
    with pytest.raises(NoAnswerError, match="answers 502 Bad Gateway: a page of HTML"):
        ask(lambda _: Raw(502, PAGE))


def test_a_key_is_sent_and_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    keys: list[str | None] = []
    wrong = Raw(401, b'{"error": "Incorrect API key provided: sk-secret"}')
    with chat(lambda _: wrong, models=wrong, keys=keys) as url:
        asked = chat_server(url, "eyes", key_variable="TEACHER_KEY", names=NAMES)
        for call in (asked.probe, lambda: asked.ask([("user", ["hello"])])):
            with pytest.raises(UserError, match=r"\(key\).*teacher\.key_env") as raised:
                call()
            assert "sk-secret" not in str(raised.value) + repr(asked)
    assert keys == 2 * ["Bearer sk-secret"]


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (Raw(200, b'{"data": []}'), ""),
        (Raw(404), ""),
        (Raw(405), ""),
        (Raw(429), ""),
        (Raw(500), ""),
        (Raw(403), "403"),
        (Raw(302, b"", {"Location": "http://localhost/login"}), "302"),
        (Raw(200, PAGE), "page of HTML; check teacher.url"),
    ],
)
def test_a_probe_refuses_what_no_request_can_mend(models: Raw, why: str) -> None:
    with chat(lambda _: "never asked", models=models) as url:
        if why:
            with pytest.raises(UserError, match=why):
                server(url).probe()
        else:
            server(url).probe()


def test_a_server_that_is_not_there_or_says_nothing_is_told_with_the_key_to_check() -> None:
    with chat(lambda _: "") as url:
        pass
    with pytest.raises(UserError, match=r"start the server, or check teacher\.url"):
        server(url).probe()
    over = threading.Event()

    def says(_: dict[str, Any]) -> str:
        over.wait(60)
        return ""

    async def run(url: str) -> None:
        try:
            await answer(server(url, answer_s=0.05), [("user", ["hello"])], Sampled())
        finally:
            over.set()

    with chat(says) as url, pytest.raises(NoAnswerError, match=r"no answer in 0\.05 s|timed out"):
        asyncio.run(run(url))
