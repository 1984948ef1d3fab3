"""Promises of the wire format: exact round trips, and refusals that name kind and field."""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bus.codec
from bus.codec import BATCH_LIMITS, LIMITS, decode, encode, limits_of
from bus.errors import OversizeError, ProtocolError
from bus.messages import (
    PROTOCOL_VERSION,
    Ack,
    ActRequest,
    Batch,
    BatchReply,
    Chain,
    Heartbeat,
    LeaseRequest,
    Message,
    PointerCandidate,
    PointerMap,
    Sample,
    SampledTokens,
    Sampling,
    StatusReply,
    StepRecord,
    TrajectoryEnd,
    Turn,
    VersionSpan,
)
from bus.packed import float64s, int32s
from tests.copies import copy_with

SHOT = os.urandom(40_000)


def step_record(**changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "trajectory_id": "t-1",
        "step": 3,
        "screenshot": SHOT,
        "media_type": "image/png",
        "image_hashes": ["a" * 32],
        "prompt_token_ids": list(range(60)),
        "sampled": SampledTokens(
            token_ids=[1, 2],
            behaviour_logprobs=[-0.5, -1e-9],
            entropies=[0.25, 0.0],
            version_spans=[VersionSpan(version=7, start=0, end=2)],
        ),
        "worker": "rollout-0",
        "text": "click 3 4 \N{SNOWMAN}",
        "action": {"kind": "drag", "path": [[1, 2], [3, 4]]},
        "error": "",
        "model_s": 0.1,
        "env_s": 0.01,
    }
    return StepRecord(**{**fields, **changes})


POINTED = copy_with(
    step_record(),
    patches=[-1, 3],
    pointed=[
        PointerMap(
            position=1,
            rows=2,
            columns=2,
            heat=b"\0\1\2\xff",
            candidates=[PointerCandidate(x=0.75, y=0.5, score=0.125)],
        )
    ],
)
ACT = ActRequest(
    trajectory_id="t-1",
    step=1,
    instruction="open it",
    turns=[
        Turn(text="a", screenshot=b"first"),
        Turn(text="b"),
        Turn(text="c", screenshot=b"third"),
    ],
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
        chains=[Chain(token_ids=int32s([1, 2]), image_hashes=["h1", "h2"])],
        samples=[
            Sample(
                group_id="g",
                trajectory_id="t-1",
                step=0,
                chain=0,
                start=1,
                end=2,
                images=2,
                behaviour_logprobs=float64s([-0.1]),
                version_spans=[],
                advantage=-0.5,
                weight=1.0,
                patches=[7],
            )
        ],
        images={"h1": b"one", "h2": b"two"},
    )
)
HEARTBEAT = Heartbeat(
    role="env",
    worker="env-0",
    host="here",
    pid=1,
    started_at=1.0,
    sent_at=2.0,
    endpoint="",
    policy_version=-1,
    state="ready",
    waiting_for="",
    waiting_s=0.0,
    gauges={"slots": 1e15, "seconds.idle": -1e15},
    trajectories=[],
)
MESSAGES: list[Message] = [
    Ack(),
    LeaseRequest(worker="env-0", slot=0, suites=["mini"]),
    step_record(),
    POINTED,
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


def with_sampled(**changes: object) -> list[bytes]:
    """A step whose tokens stand in the header, so that they can be changed."""
    record = copy_with(step_record(), token_ids=[], behaviour_logprobs=[], entropies=[])
    header = header_of(record)
    header["body"]["sampled"].update(changes)
    return with_header(record, header)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_decoding_gives_back_the_message(message: Message) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_a_screenshot_is_a_raw_frame_and_never_in_the_header() -> None:
    frames = encode(ACT)
    assert frames[2:] == [b"first", b"third", SHOT]
    assert frames[-1] is SHOT, "the same object: not copied"
    assert len(frames[1]) < 400


def test_empty_bytes_need_no_frame() -> None:
    turns = [Turn(text="a", screenshot=b""), Turn(text="b", screenshot=None)]
    message = ACT.model_copy(update={"turns": turns})
    frames = encode(message)
    assert frames[2:] == [SHOT]
    assert decode(frames) == message


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
        (with_header(Ack(), {"v": 99, "body": {}}), "Ack: protocol version 99, this side has"),
        (with_header(Ack(), {"v": True, "body": {}}), "Ack: protocol version True"),
        (with_header(Ack(), {"v": PROTOCOL_VERSION, "body": []}), "Ack: Input should be"),
        (with_body(Ack(), surprise=1), "Ack.surprise: Extra inputs"),
        (with_body(step_record(), step="3"), "StepRecord.step: Input should be a valid integer"),
        (with_body(step_record(), step=True), "StepRecord.step: Input should be a valid integer"),
        (with_sampled(token_ids=[1, 2.5]), "StepRecord.sampled.token_ids.1: "),
        (with_body(ACT, instruction=msgpack.ExtType(1, b"\0\0\0\2"), screenshot=""), "ActRequest."),
        (
            with_sampled(version_spans=[{"version": 1, "start": 0}]),
            "StepRecord.sampled.version_spans.0.end: Field required",
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
def test_frames_outside_the_protocol_are_refused_by_kind_and_field(
    frames: list[bytes], words: str
) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(frames)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e308, -1e308])
def test_a_gauge_is_a_finite_number_within_bounds(value: float) -> None:
    assert decode(encode(HEARTBEAT)) == HEARTBEAT
    with pytest.raises(ProtocolError, match=r"^Heartbeat\.gauges\.slots: "):
        decode(with_body(HEARTBEAT, gauges={"slots": value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, 11.0, -1.0, 1e-40])
def test_a_temperature_is_zero_or_large_enough_to_divide_logits(value: float) -> None:
    for good in (0.0, 1e-3, 10.0):
        assert Sampling(temperature=good, max_tokens=1, seed=0).temperature == good
    header = header_of(ACT)
    header["body"]["sampling"]["temperature"] = value
    with pytest.raises(ProtocolError, match=r"^ActRequest\.sampling\.temperature: "):
        decode(with_header(ACT, header))


def test_a_missing_field_is_named() -> None:
    header = header_of(step_record())
    del header["body"]["worker"]
    with pytest.raises(ProtocolError, match=r"^StepRecord\.worker: Field required$"):
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
    ("message", "limit", "value", "words"),
    [
        (BATCH, "frame", 100, r"BatchReply: header of \d+ bytes, limit 100"),
        (step_record(), "frame", 39_999, "StepRecord: blob of 40000 bytes, limit 39999"),
        (step_record(), "blobs", 0, "StepRecord: 5 blobs, limit 0"),
        (step_record(), "total_bytes", 40_000, r"StepRecord: \d+ bytes in all, limit 40000"),
        (BATCH, "blobs", 3, "BatchReply: 5 blobs, limit 3"),
        (BATCH, "packed_bytes", 15, r"BatchReply: packed numbers of \d+ bytes, limit 15"),
    ],
)
def test_oversize_messages_are_refused_on_both_sides(
    message: Message, limit: str, value: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = encode(message)
    if limit == "frame":
        monkeypatch.setattr(bus.codec, "MAX_FRAME_BYTES", value)
    else:
        for name in ("LIMITS", "BATCH_LIMITS"):
            small = replace(getattr(bus.codec, name), **{limit: value})
            monkeypatch.setattr(bus.codec, name, small)
    with pytest.raises(OversizeError, match=words):
        decode(frames, limits_of(type(message)))
    with pytest.raises(OversizeError, match=words):
        encode(message)


def large_batch(prompt: int, images: int) -> BatchReply:
    """6 groups of 8 trajectories of 36 steps that do not extend one another, 512-token completions, five
    screens a prompt."""
    assert BATCH.batch is not None
    sample = BATCH.batch.samples[0].model_copy(
        update={
            "start": prompt,
            "end": prompt + 512,
            "images": 5,
            "behaviour_logprobs": float64s([-0.1234567] * 512),
        }
    )
    chain = Chain(
        token_ids=int32s([151_655] * prompt + [100_000] * 512), image_hashes=["0" * 32] * 5
    )
    screen, steps = b"\x89PNG", 6 * 8 * 36
    return BatchReply.model_construct(
        batch=Batch.model_construct(
            batch_id=1,
            group_ids=["g000001"],
            temperature=1.0,
            chains=[chain] * steps,
            samples=[
                sample.model_copy(update={"step": step, "chain": step}) for step in range(steps)
            ],
            images={f"{index:032d}": screen for index in range(images)},
        ),
        retry_after_s=0.0,
        reason="",
    )


def test_a_batch_of_full_size_fits_several_times() -> None:
    frames = encode(large_batch(prompt=9000, images=6 * 8 * 36))
    header, packed, full_hd = len(frames[1]), sum(map(len, frames[2:])), 6 * 8 * 36 * 794_000
    assert 40 * header < bus.codec.MAX_FRAME_BYTES
    assert 6 * packed < BATCH_LIMITS.packed_bytes
    assert 5 * (header + packed + full_hd) < BATCH_LIMITS.total_bytes
    assert 8 * len(frames) < BATCH_LIMITS.blobs


def test_a_batch_beyond_the_common_limits_is_accepted_only_as_a_batch_reply() -> None:
    frames = encode(large_batch(prompt=1, images=20_000))
    assert isinstance(decode(frames, limits_of(BatchReply)), BatchReply)
    with pytest.raises(OversizeError, match="blobs, limit 16384"):
        decode(frames)
    assert limits_of(StepRecord) is LIMITS


def test_the_numbers_of_a_batch_are_raw_frames_and_come_back_exactly() -> None:
    batch = BATCH.model_copy(update={"batch": batch_of([151_655, 0, 2**31 - 1], [-0.1, -1e-300])})
    _, _, *blobs = frames = encode(batch)
    assert blobs[:2] == [
        bytes.fromhex("67500200 00000000 ffffff7f"),
        struct.pack("<2d", -0.1, -1e-300),
    ]
    decoded = decode(frames)
    assert decoded == batch
    assert isinstance(decoded, BatchReply)
    assert decoded.batch is not None
    assert isinstance(decoded.batch.chains[0].token_ids, array)
    assert isinstance(decoded.batch.samples[0].behaviour_logprobs, array)


def batch_of(token_ids: list[int], logprobs: list[float]) -> Batch:
    assert BATCH.batch is not None
    [sample], [chain] = BATCH.batch.samples, BATCH.batch.chains
    return BATCH.batch.model_copy(
        update={
            "chains": [chain.model_copy(update={"token_ids": int32s(token_ids)})],
            "samples": [sample.model_copy(update={"behaviour_logprobs": float64s(logprobs)})],
        }
    )


def test_a_demonstration_has_an_empty_array_of_log_probabilities() -> None:
    batch = BATCH.model_copy(update={"batch": batch_of([1, 2], [])})
    assert decode(encode(batch)) == batch


def test_packed_numbers_that_are_cut_or_do_not_fit_are_refused() -> None:
    frames = encode(BATCH)
    frames[2] += b"?"
    with pytest.raises(ProtocolError, match="blob 0 of 9 bytes holds no packed numbers"):
        decode(frames)
    with pytest.raises(ProtocolError, match=r"^StepRecord: cannot be sent: "):
        encode(copy_with(step_record(), token_ids=[2**31]))


def test_a_list_is_no_array_and_an_array_no_list() -> None:
    _, _, tokens, logprobs, *_ = encode(BATCH)
    header = header_of(BATCH)
    for kind, words in ((2, "BatchReply.batch.chains.0.token_ids: "), (5, "token_ids: ")):
        header["body"]["batch"]["chains"][0]["token_ids"] = msgpack.ExtType(kind, b"\0\0\0\0")
        with pytest.raises(ProtocolError, match=words):
            decode(with_header(BATCH, header))
    assert (len(tokens), len(logprobs)) == (8, 8)
    header = header_of(step_record())
    header["body"]["sampled"]["token_ids"] = msgpack.ExtType(4, b"\0\0\0\2")
    with pytest.raises(ProtocolError, match=r"StepRecord\.sampled\.token_ids: "):
        decode(with_header(step_record(), header))


def test_a_prompt_is_a_packed_array_however_it_was_given() -> None:
    given = step_record(prompt_token_ids=list(range(60)))
    assert given.prompt_token_ids == int32s(range(60))
    assert encode(given) == encode(step_record(prompt_token_ids=int32s(range(60))))
    assert len(encode(given)[2]) == 4 * 60  # a frame of its own, no part of the header
    received = decode(encode(given))
    assert isinstance(received, StepRecord)
    assert received.prompt_token_ids == int32s(range(60))
    for wrong in ([1.0], [True], [2**31], ["1"], (1, 2), float64s([1.0])):
        with pytest.raises(ValueError, match="prompt_token_ids"):
            step_record(prompt_token_ids=wrong)


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
def test_hostile_bytes_give_only_a_message_or_a_protocol_error(
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
def test_any_nested_value_comes_back_unchanged(value: Any) -> None:
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
