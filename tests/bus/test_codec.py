"""Promises of the wire format: exact round trips, and refusals that name kind and field."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bus.codec
from bus.codec import decode, encode
from bus.errors import ProtocolError
from bus.messages import (
    PROTOCOL_VERSION,
    Ack,
    ActRequest,
    Batch,
    BatchReply,
    LeaseRequest,
    Message,
    Sample,
    Sampling,
    StatusReply,
    StepRecord,
    TrajectoryEnd,
    Turn,
    VersionSpan,
)

SHOT = os.urandom(40_000)


def step_record(**changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "trajectory_id": "t-1",
        "step": 3,
        "screenshot": SHOT,
        "media_type": "image/png",
        "image_hashes": ["a" * 32],
        "prompt_token_ids": list(range(60)),
        "token_ids": [1, 2],
        "behaviour_logprobs": [-0.5, -1e-9],
        "entropies": [0.25, 0.0],
        "version_spans": [VersionSpan(version=7, start=0, end=2)],
        "worker": "rollout-0",
        "text": "click 3 4 \N{SNOWMAN}",
        "action": {"kind": "drag", "path": [[1, 2], [3, 4]]},
        "error": "",
        "model_s": 0.1,
        "env_s": 0.01,
    }
    return StepRecord(**{**fields, **changes})


ACT = ActRequest(
    trajectory_id="t-1",
    step=1,
    instruction="open it",
    turns=[Turn(text="a", screenshot=b"first"), Turn(text="b"), Turn(text="c", screenshot=b"")],
    screenshot=SHOT,
    width=168,
    height=168,
    sampling=Sampling(temperature=1.0, max_tokens=8, seed=2**63),
)
BATCH = BatchReply(
    batch=Batch(
        batch_id=1,
        group_ids=["g"],
        temperature=1.0,
        samples=[
            Sample(
                trajectory_id="t-1",
                step=0,
                prompt_token_ids=[1],
                token_ids=[2],
                behaviour_logprobs=[-0.1],
                version_spans=[],
                image_hashes=["h1", "h2"],
                advantage=-0.5,
                weight=1.0,
            )
        ],
        images={"h1": b"one", "h2": b"two"},
    )
)
MESSAGES: list[Message] = [
    Ack(),
    LeaseRequest(worker="env-0", slot=0, suites=["mini"]),
    step_record(),
    ACT,
    BATCH,
    BatchReply(),
    StatusReply(snapshot={"nested": [{"blob": b"deep"}, [b"er"], {"x": None, "y": True}]}),
]


def header_of(message: Message) -> dict[str, Any]:
    return msgpack.unpackb(encode(message)[1])  # type: ignore[no-any-return]


def with_header(message: Message, header: object) -> list[bytes]:
    kind, _, *blobs = encode(message)
    return [kind, msgpack.packb(header), *blobs]


def with_body(message: Message, **changes: object) -> list[bytes]:
    header = header_of(message)
    header["body"].update(changes)
    return with_header(message, header)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_decoding_gives_back_the_message(message: Message) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_a_screenshot_is_a_raw_frame_and_never_in_the_header() -> None:
    frames = encode(ACT)
    assert frames[2:] == [b"first", b"", SHOT]
    assert frames[-1] is SHOT, "the very same object: nothing was copied"
    assert len(frames[1]) < 400


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "message of 0 frames"),
        ([b"Ack"], "message of 1 frames"),
        ([b"Acks", b""], "unknown message kind 'Acks'"),
        ([b"A" * 65, b""], "unknown message kind"),
        ([b"\xff\n", b""], "unknown message kind"),
        ([b"Batch", b""], "unknown message kind"),  # a part, not a message
        ([b"Ack", b""], "Ack: bad header"),
        ([b"Ack", b"\xc1"], "Ack: bad header"),
        ([b"Ack", msgpack.packb([1])], "Ack: bad header: not a map of v and body"),
        ([b"Ack", msgpack.packb({"v": 1})], "Ack: bad header: not a map of v and body"),
        ([b"Ack", b"\x91" * 5000], "Ack: bad header"),
        (with_header(Ack(), {"v": 99, "body": {}}), "Ack: protocol version 99, this side speaks"),
        (with_header(Ack(), {"v": True, "body": {}}), "Ack: protocol version True"),
        (with_header(Ack(), {"v": PROTOCOL_VERSION, "body": []}), "Ack: Input should be"),
        (with_body(Ack(), surprise=1), "Ack.surprise: Extra inputs"),
        (with_body(step_record(), step="3"), "StepRecord.step: Input should be a valid integer"),
        (with_body(step_record(), step=True), "StepRecord.step: Input should be a valid integer"),
        (with_body(step_record(), token_ids=[1, 2.5]), "StepRecord.token_ids.1: "),
        (with_body(ACT, instruction=msgpack.ExtType(1, b"\0\0\0\2"), screenshot=""), "ActRequest."),
        (
            with_body(step_record(), version_spans=[{"version": 1, "start": 0}]),
            "StepRecord.version_spans.0.end: Field required",
        ),
        (
            with_header(Ack(), {"v": 1, "body": {"note": msgpack.ExtType(1, b"\0\0\0\0")}}),
            "blob 0 is not there or used twice",
        ),
        (
            with_header(Ack(), {"v": 1, "body": {"note": msgpack.ExtType(9, b"\0\0\0\0")}}),
            "unknown extension type 9",
        ),
        ([*encode(Ack()), b"stray"], "Ack: blob 0 is used nowhere"),
        (with_body(step_record(), text=b"inline"), "StepRecord: bad header"),
    ],
)
def test_what_is_not_the_protocol_is_refused_by_kind_and_field(
    frames: list[bytes], words: str
) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(frames)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_field_is_named() -> None:
    header = header_of(step_record())
    del header["body"]["token_ids"]
    with pytest.raises(ProtocolError, match=r"^StepRecord\.token_ids: Field required$"):
        decode(with_header(step_record(), header))


def test_a_blob_used_twice_is_refused() -> None:
    header = header_of(ACT)
    header["body"]["turns"][0]["screenshot"] = header["body"]["screenshot"]
    with pytest.raises(ProtocolError, match="blob 2 is not there or used twice"):
        decode(with_header(ACT, header))


def test_a_hostile_field_name_stays_on_one_short_line() -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(with_body(Ack(), **{"\x1b[2J\n" + "x" * 10_000: 1}))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_HEADER_BYTES", 100, r"StepRecord: header of \d+ bytes, limit 100"),
        ("MAX_BLOBS", 0, "StepRecord: 1 blobs, limit 0"),
        ("MAX_BLOB_BYTES", 39_999, "StepRecord: blob of 40000 bytes, limit 39999"),
        ("MAX_TOTAL_BYTES", 40_000, r"StepRecord: \d+ bytes in all, limit 40000"),
    ],
)
def test_oversize_messages_are_refused_on_both_sides(
    limit: str, value: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = encode(step_record())
    monkeypatch.setattr(bus.codec, limit, value)
    with pytest.raises(ProtocolError, match=words):
        decode(frames)
    with pytest.raises(ProtocolError, match=words):
        encode(step_record())


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", {1, 2}])
def test_a_value_msgpack_cannot_carry_is_refused_by_kind(value: object) -> None:
    with pytest.raises(ProtocolError, match=r"^StatusReply: cannot be sent: "):
        encode(StatusReply(snapshot={"x": value}))


def test_only_kinds_of_the_protocol_are_sent() -> None:
    with pytest.raises(ProtocolError, match=r"^Turn: not a kind"):
        encode(Turn(text=""))


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    """Frames of a good message with a few bytes, or whole frames, changed."""
    frames = encode(draw(st.sampled_from(MESSAGES)))
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, min(len(frames) - 1, 1)))
        change = draw(st.sampled_from(["flip", "cut", "grow", "replace", "drop", "double"]))
        frame = frames[index]
        at = draw(st.integers(0, max(len(frame) - 1, 0)))
        match change:
            case "flip":
                new = bytes([draw(st.integers(0, 255))])
                frames[index] = frame[:at] + new + frame[at + 1 :]
            case "cut":
                frames[index] = frame[:at]
            case "grow":
                frames[index] = frame[:at] + draw(st.binary(min_size=1, max_size=9)) + frame[at:]
            case "replace":
                frames[index] = draw(st.binary(max_size=50))
            case "drop":
                frames = frames[:index] + frames[index + 1 :] or [b""]
            case "double":
                frames = [*frames, frames[-1]]
    return frames


@settings(deadline=None)
@given(damaged_frames())
def test_hostile_bytes_give_a_message_or_a_protocol_error_and_nothing_else(
    frames: list[bytes],
) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(frames), Message)


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.integers(-(2**63), 2**64 - 1),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_any_nested_value_comes_back_as_it_was(value: Any) -> None:
    assert decode(encode(StatusReply(snapshot={"x": value}))) == StatusReply(snapshot={"x": value})


def test_an_end_without_a_screenshot_has_no_blob() -> None:
    end = TrajectoryEnd(
        trajectory_id="t",
        steps=0,
        outcome="invalid",
        reason="",
        stop_reason="environment",
        screenshot=None,
        reset_s=0.0,
        wall_s=0.0,
    )
    assert len(encode(end)) == 2
    assert decode(encode(end)) == end
