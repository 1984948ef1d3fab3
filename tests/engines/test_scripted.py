"""Promises of the engine without a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import EngineError, WeightsError
from bus.messages import Sampling, VersionSpan
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.completions import version_spans
from dart_cli.engines.scripted import ScriptedEngine, random_clicks, say
from dart_cli.policy.codec import make_codec
from dart_cli.policy.coordinates import make_coordinate_map
from tests.waiting import PATIENCE_S, until


def ask(request_id: str = "t-1/0", *, seed: int = 0, max_tokens: int = 64) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        images=[],
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed),
    )


async def test_the_script_is_the_sample_with_its_own_numbers() -> None:
    engine = ScriptedEngine(lambda request: say("ab", logprob=-0.5, entropy=0.7))
    generation = await engine.generate(ask())
    assert bytes(generation.sampled.token_ids) == b"ab"
    assert generation.sampled.behaviour_logprobs == [-0.5, -0.5]
    assert generation.sampled.entropies == [0.7, 0.7]
    assert generation.stop == "end"
    assert engine.gauges()["tokens"] == 2
    await engine.close()


async def test_a_script_longer_than_max_tokens_is_cut() -> None:
    engine = ScriptedEngine(lambda request: say("abcdef"))
    generation = await engine.generate(ask(max_tokens=3))
    assert (bytes(generation.sampled.token_ids), generation.stop) == (b"abc", "length")


@pytest.mark.parametrize("codec", ["compact", "uitars"])
async def test_random_clicks_are_actions_and_follow_the_seed(codec: str) -> None:
    engine = ScriptedEngine(random_clicks(codec))
    texts = [
        bytes((await engine.generate(ask(seed=seed, max_tokens=99))).sampled.token_ids).decode()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    coordinates = make_coordinate_map("thousandths", 168, 168)
    assert make_codec(codec).parse(texts[0], coordinates).kind == "click"


async def test_an_update_in_mid_completion_shows_in_the_version_spans(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}", encoding="ascii")
    engine = ScriptedEngine(lambda request: say("x" * 50), policy_version=3, token_s=0.002)
    asking = asyncio.create_task(engine.generate(ask()))
    await until(lambda: engine.gauges()["tokens"] >= 5)
    assert engine.gauges()["in_flight"] == 1
    await engine.update_weights(tmp_path, 4)
    spans = (await asking).sampled.version_spans
    assert [span.version for span in spans] == [3, 4]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 50)
    assert engine.policy_version == 4


async def test_a_weight_set_without_a_manifest_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: say(""), policy_version=3)
    with pytest.raises(WeightsError, match=r"no readable manifest\.json"):
        await engine.update_weights(tmp_path, 4)
    assert engine.policy_version == 3


async def test_requests_beyond_the_batch_wait_and_closing_ends_them() -> None:
    engine = ScriptedEngine(lambda request: say("x"), token_s=60, max_batch=2)
    asks = [asyncio.create_task(engine.generate(ask(f"t-{i}/0"))) for i in range(3)]
    await until(lambda: engine.gauges()["waiting"] == 1)
    asks[0].cancel()
    await until(lambda: engine.gauges()["waiting"] == 0)
    await engine.close()
    results = await asyncio.gather(*asks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, EngineError) for result in results[1:])
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask())


async def test_interrupted_in_work_or_waiting_a_request_goes_on_where_it_was() -> None:
    engine = ScriptedEngine(
        lambda request: say("x" * 40, logprob=-0.5), policy_version=3, token_s=0.002, max_batch=1
    )
    asks = [asyncio.create_task(engine.generate(ask(f"t-{i}/0"))) for i in range(2)]
    await until(lambda: engine.gauges()["tokens"] >= 5)
    engine.interrupt()
    begun, waited = await asyncio.gather(*asks)
    assert (begun.stop, waited.stop, waited.sampled.token_ids) == ("suspended", "suspended", [])
    assert 5 <= len(begun.sampled.token_ids) < 40
    rest = await ScriptedEngine(
        lambda request: say("x" * 40, logprob=-0.5), policy_version=4
    ).generate(
        replace(
            ask(),
            partial=begun.sampled,
        )
    )
    assert (bytes(rest.sampled.token_ids), rest.stop) == (b"x" * 40, "end")
    assert [(span.version, span.end) for span in rest.sampled.version_spans] == [
        (3, len(begun.sampled.token_ids)),
        (4, 40),
    ]
    assert len(rest.sampled.behaviour_logprobs) == len(rest.sampled.entropies) == 40
    await engine.close()


async def test_what_has_ended_is_not_suspended() -> None:
    engine = ScriptedEngine(lambda request: say("ab"))
    asking = asyncio.create_task(engine.generate(ask()))
    async with asyncio.timeout(PATIENCE_S):
        while engine.gauges()["tokens"] < 2:  # noqa: ASYNC110 - a gauge, no event
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.interrupt()
    assert (await asking).stop == "end"


def test_spans_cover_the_tokens_without_gaps() -> None:
    assert version_spans([]) == []
    assert version_spans([1, 1, 2]) == [
        VersionSpan(version=1, start=0, end=2),
        VersionSpan(version=2, start=2, end=3),
    ]
