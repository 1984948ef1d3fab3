"""Promises of the engine that takes a GPU's time and computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.simulation.engine import TimedEngine, TimedReply, check_complete, random_replies
from benchmarks.simulation.times import Times
from bus.errors import EngineError, WeightsError
from bus.messages import ActRequest, SampledTokens, Sampling, VersionSpan
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.scripted import ScriptedResponder
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.weights.manifest import WEIGHTS
from tests.waiting import until
from tests.weights.sets import publish

FAST = Times(speedup=200.0)
SLOW = Times(prefill_s=0.01, prefill_cached_s=0.01, decode_s=0.002, decode_each_s=0.0)


@contextlib.asynccontextmanager
async def serving(
    timing: Times, action_parser: str = "uitars", **options: int
) -> AsyncIterator[TimedEngine]:
    engine = TimedEngine(
        random_replies(action_parser, timing),
        timing,
        check_weights=check_complete,
        **{"policy_version": 0, **options},
    )
    try:
        yield engine
    finally:
        await engine.close()


def ask(
    seed: int, *, max_tokens: int = 200, partial: SampledTokens | None = None
) -> GenerateRequest:
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed)
    return GenerateRequest(f"t-{seed}/0", [1], [], sampling, partial=partial)


def partial_of(generation: Generation) -> SampledTokens:
    return generation.sampled


async def decoded(engine: TimedEngine, requests: int) -> None:
    """Wait until so many requests are in work."""
    await until(lambda: engine.gauges()["in_flight"] >= requests)


@pytest.mark.parametrize("action_parser", ["compact", "uitars"])
async def test_every_reply_is_an_action_as_long_as_drawn_and_follows_the_seed(
    action_parser: str,
) -> None:
    coordinates = make_coordinate_map("thousandths", 448, 336)
    async with serving(FAST, action_parser) as engine:
        first, second = [
            await asyncio.gather(*(engine.generate(ask(seed)) for seed in range(200)))
            for _ in range(2)
        ]
        gauges = engine.gauges()
    texts = [bytes(generation.sampled.token_ids).decode() for generation in first]
    assert [generation.sampled.token_ids for generation in second] == [
        g.sampled.token_ids for g in first
    ]
    assert {make_action_parser(action_parser).parse(text, coordinates).kind for text in texts} == {
        "click"
    }
    assert {generation.stop for generation in first} == {"end"}
    lengths = sorted(map(len, texts))
    if action_parser == "uitars":
        assert 60 <= lengths[100] <= 80  # completion_tokens = 70 is the median
        assert lengths[-1] <= 200
    assert gauges["prefills"] == 400
    assert gauges["prefills_cached"] > 0
    assert gauges["tokens"] / 400 == pytest.approx(76, rel=0.1)


async def test_max_tokens_is_never_passed() -> None:
    async with serving(FAST) as engine:
        capped = await engine.generate(ask(1, max_tokens=60))
        cut = await engine.generate(ask(1, max_tokens=20))
    assert capped.stop == "end"
    assert len(capped.sampled.token_ids) <= 60
    assert (cut.stop, len(cut.sampled.token_ids)) == ("length", 20)


@pytest.mark.parametrize("action_parser", ["compact", "uitars"])
async def test_suspended_and_resumed_elsewhere_the_reply_is_the_same(action_parser: str) -> None:
    requests = [ask(seed) for seed in range(12)]
    async with serving(FAST, action_parser) as engine:
        straight = [await engine.generate(request) for request in requests]
    found: dict[int, Generation] = {}
    slower = SLOW.model_copy(update={"decode_s": 0.004})
    async with (
        serving(slower, action_parser, max_batch=4) as one,
        serving(slower, action_parser, max_batch=4) as two,
    ):
        engines = [one, two]
        while len(found) < len(requests):
            engine = engines[0]
            engines.reverse()
            left = [i for i in range(len(requests)) if i not in found]
            asks = [asyncio.create_task(engine.generate(requests[i])) for i in left]
            # On a busy machine the last iterations may all be over at the first look.
            await until(
                lambda engine=engine, asks=asks: (
                    engine.gauges()["in_flight"] >= 1 or all(ask.done() for ask in asks)
                )
            )
            await asyncio.sleep(0.06)
            engine.interrupt()
            for i, generation in zip(left, await asyncio.gather(*asks), strict=True):
                if generation.stop == "suspended":
                    requests[i] = replace(requests[i], partial=partial_of(generation))
                else:
                    found[i] = generation
    assert any(request.partial and request.partial.token_ids for request in requests)
    for i, expected in enumerate(straight):
        assert found[i].sampled.token_ids == expected.sampled.token_ids
        assert found[i].sampled.version_spans == expected.sampled.version_spans
        assert (
            len(found[i].sampled.behaviour_logprobs)
            == len(found[i].sampled.entropies)
            == len(found[i].sampled.token_ids)
        )


async def test_a_request_suspended_again_and_again_makes_progress() -> None:
    """One byte stands for 40 iterations of 4 ms here, and each time there are 100 ms for it."""
    text = b"click"
    timing = SLOW.model_copy(update={"decode_s": 0.004})
    engine = TimedEngine(
        lambda request: TimedReply(text, 40 * len(text)),
        timing,
        check_weights=check_complete,
        policy_version=0,
    )
    request, lengths = ask(0), []
    while True:
        asking = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.1)
        engine.interrupt()
        generation = await asking
        lengths.append(len(generation.sampled.token_ids))
        if generation.stop == "end":
            break
        request = replace(request, partial=partial_of(generation))
    await engine.close()
    assert bytes(generation.sampled.token_ids) == text
    assert lengths == sorted(lengths)


async def test_weights_are_taken_in_flight_and_the_versions_cover_the_tokens(
    tmp_path: Path,
) -> None:
    timing = SLOW.model_copy(update={"decode_s": 0.02, "transfer_s": 0.02, "pause_s": 0.03})
    good = publish({"w": torch.ones(3)}, tmp_path, 7)
    async with serving(timing) as engine:
        asks = [asyncio.create_task(engine.generate(ask(seed))) for seed in range(8)]
        await decoded(engine, 8)
        took = await engine.update_weights(good.path, 7)
        assert engine.policy_version == 7
        generations = await asyncio.gather(*asks)
        gauges = engine.gauges()
    assert took.transfer_s >= 0.02
    assert took.pause_s == pytest.approx(0.03)
    assert gauges["seconds.syncing"] == pytest.approx(0.03)
    mixed = [generation for generation in generations if len(generation.sampled.version_spans) == 2]
    assert mixed
    for generation in mixed:
        first, second = generation.sampled.version_spans
        assert (first.version, second.version) == (0, 7)
        assert 0 == first.start < first.end == second.start < second.end
        assert second.end == len(generation.sampled.token_ids)


async def test_a_set_that_is_not_whole_is_refused_while_requests_run(tmp_path: Path) -> None:
    cut, flipped, other = (publish({"w": torch.ones(3)}, tmp_path, i) for i in (1, 2, 3))
    (cut.path / WEIGHTS).write_bytes((cut.path / WEIGHTS).read_bytes()[:-1])
    (flipped.path / WEIGHTS).write_bytes((flipped.path / WEIGHTS).read_bytes()[:-4] + b"\0" * 4)
    async with serving(SLOW) as engine:
        asking = asyncio.create_task(engine.generate(ask(1)))
        for path, version, cause in (
            (cut.path, 1, "bytes, but [0-9]+ by its header"),
            (flipped.path, 2, "digest differs"),
            (other.path, 4, " is v3"),
            (tmp_path / "absent", 5, "never complete"),
        ):
            with pytest.raises(WeightsError, match=cause):
                await engine.update_weights(path, version)
        assert engine.policy_version == 0
        assert (await asking).sampled.version_spans[0].version == 0


async def test_cancelling_frees_the_place_and_closing_ends_what_waits() -> None:
    endless = Times(prefill_s=0.0, decode_s=60.0)
    async with serving(endless, max_batch=1) as engine:
        asks = [asyncio.create_task(engine.generate(ask(seed))) for seed in range(3)]
        await decoded(engine, 1)
        asks[1].cancel()
        await until(lambda: engine.gauges()["waiting"] == 1)
    outcomes = await asyncio.gather(*asks, return_exceptions=True)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert all(isinstance(outcomes[i], EngineError) for i in (0, 2))
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask(1))


async def test_screens_are_answered_through_the_same_responder() -> None:
    request = ActRequest(
        trajectory_id="t-1",
        step=3,
        instruction="click anywhere",
        turns=[],
        screenshot=b"png",
        width=448,
        height=336,
        sampling=Sampling(temperature=1.0, max_tokens=100, seed=1),
    )
    async with serving(FAST) as engine:
        completion = await ScriptedResponder(engine).answer(request)
    assert completion.text.startswith("Thought: ")
    assert completion.engine_s > 0


@pytest.mark.parametrize("action_parser", ["compact", "uitars"])
async def test_any_partial_is_continued(action_parser: str) -> None:
    """Also one that this engine would not have made: its tokens stay, the rest is its own."""
    async with serving(FAST, action_parser) as engine:
        for seed in range(8):
            whole = await engine.generate(ask(seed))
            for length in range(1, len(whole.sampled.token_ids), 3):
                foreign = SampledTokens(
                    token_ids=[120] * length,
                    behaviour_logprobs=[-1.0] * length,
                    entropies=[0.5] * length,
                    version_spans=[VersionSpan(version=9, start=0, end=length)],
                )
                rest = await engine.generate(ask(seed, partial=foreign))
                assert rest.sampled.token_ids == [120] * length + whole.sampled.token_ids[length:]
                assert rest.sampled.version_spans[0].version == 9
                assert rest.sampled.version_spans[-1].end == len(rest.sampled.token_ids)
