"""What a chat request may be: anything else is refused, with the field's name and a cure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import Sampling
from dart_cli.serve.errors import ApiError
from dart_cli.serve.requests import read_chat
from dart_cli.serve.sampling import settle
from tests.serve.parts import image_part, picture, text, url, user

RUN = Sampling(temperature=1.0, max_tokens=16, seed=7)


def body(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages), **fields}).encode()


def refusal(*messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read_chat(body(*messages, **fields))
    return raised.value


def test_messages_come_through_with_their_images_in_order() -> None:
    request = read_chat(
        body(
            {"role": "developer", "content": "be brief"},
            user(image_part(picture(1)), text("like this?")),
            {"role": "assistant", "content": [text("wa"), text("it()")]},
            {"role": "assistant", "content": None},
            user(text("now"), {"type": "image_url", "image_url": url(picture(2))}),
        )
    )
    assert [message.role for message in request.messages] == [
        *("system", "user", "assistant", "assistant", "user"),
    ]
    parts = [[part.text or part.is_image for part in each.parts] for each in request.messages]
    assert parts == [["be brief"], [True, "like this?"], ["wa", "it()"], [False], ["now", True]]
    assert request.images == [picture(1), picture(2)]


PICTURE = image_part(picture(1))


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([user(text("hi"))], "messages", "show no image"),
        ([user(PICTURE), {"role": "assistant", "content": "x"}], "messages", "last .* the user's"),
        (
            [{"role": "tool", "content": "x"}],
            "messages[0].role",
            "'system', .* 'user' or 'assistant'",
        ),
        ([{"content": "x"}], "messages[0].role", "is missing"),
        ([{"role": "user"}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be a valid list"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", "valid dictionary"),
        ([user({"type": "video_url"})], "messages[0].content[0]", "type text or image_url"),
        ([user({"type": "text"})], "messages[0].content[0].text", "must be a string"),
        ([{"role": "system", "content": [PICTURE]}], "messages[0].content", "only .* the user"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            "messages[0].tool_calls",
            "write the call as the model did",
        ),
    ],
)
def test_a_message_that_cannot_be_shown_is_refused(
    messages: list[Any], param: str, message: str
) -> None:
    error = refusal(*messages)
    assert error.param == param
    with pytest.raises(ApiError, match=message):
        raise error


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://example.org/screen.png", "are not fetched"),
        ("file:///etc/passwd", "are not fetched"),
        ("data:image/png,abc", "must be a data URL"),
        ("data:image/png;base64,%%%", "is no base64"),
        ("data:image/png;base64,", "0 bytes that are no PNG, JPEG or WebP"),
        (url(b"GIF89a and so on", "gif"), "no PNG, JPEG or WebP; encode it"),
        (None, "must be a string"),
        (7, "must be a string"),
    ],
)
def test_an_image_that_is_none_is_refused(address: object, message: str) -> None:
    error = refusal(user({"type": "image_url", "image_url": {"url": address}}))
    assert message in str(error)
    assert error.param == "messages[0].content[0].image_url"


def test_lone_surrogates_and_line_breaks_in_base64_do_no_harm() -> None:
    broken = url(picture(1))[:60] + "\n" + url(picture(1))[60:]
    request = read_chat(
        body(user({"type": "image_url", "image_url": {"url": broken}}, text("\ud800")))
    )
    assert request.images == [picture(1)]
    assert request.messages[0].parts[1].text == "?"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "messages"]),
            inner | st.sampled_from(["user", "text", "image_url", "assistant"]),
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(fields=st.dictionaries(st.sampled_from(["messages", "model", "stream", "logprobs"]), _json))
def test_any_json_is_a_request_or_an_error(fields: dict[str, Any]) -> None:
    refused = ""
    try:
        read_chat(json.dumps(fields).encode())
    except ApiError as error:
        refused = str(error)
    assert "\n" not in refused


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1, "max_tokens": 16, "top_p": 1.0, "n": 1, "stop": None, "tools": []},
        {"max_completion_tokens": 16, "stream": True, "metadata": {}, "user": "x", "store": False},
        {"presence_penalty": 0, "response_format": {"type": "text"}, "logit_bias": {}},
    ],
)
def test_settings_that_are_the_runs_are_taken(settings: dict[str, Any]) -> None:
    assert settle(settings, RUN, is_trained=True, ignores=False) == RUN


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"temperature": 0.5}, "temperature", "rollout.temperature = 1"),
        ({"max_tokens": 2000}, "max_tokens", "rollout.max_tokens = 16"),
        ({"seed": 4}, "seed", "leave it out"),
        ({"top_p": 0.9}, "top_p", "set it to 1"),
        ({"stop": ["\n"]}, "stop", "not supported"),
        ({"guided_regex": "x"}, "guided_regex", 'serve.sampling = "ignore"'),
    ],
)
def test_settings_that_training_does_not_sample_by_are_refused_or_ignored(
    settings: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as raised:
        settle(settings, RUN, is_trained=True, ignores=False)
    assert raised.value.param == param
    assert settle(settings, RUN, is_trained=True, ignores=True) == RUN


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 2},
        {"n": True},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 5},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 1e-9},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"seed": -1},
    ],
)
def test_what_has_no_answer_is_always_refused(settings: dict[str, Any]) -> None:
    for is_trained in (True, False):
        with pytest.raises(ApiError):
            settle(settings, RUN, is_trained=is_trained, ignores=True)


def test_outside_training_a_request_samples_as_it_says() -> None:
    settings = {"temperature": 0, "max_tokens": 99, "seed": 3}
    expected = Sampling(temperature=0.0, max_tokens=99, seed=3)
    assert settle(settings, RUN, is_trained=False, ignores=False) == expected
    assert settle({}, RUN, is_trained=False, ignores=False) == RUN
