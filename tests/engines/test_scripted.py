"""Promises of the engine without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import WeightsError
from bus.messages import Sampling, VersionSpan
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.completions import version_spans
from dart_cli.engines.scripted import ScriptedEngine, random_clicks, say
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser


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


@pytest.mark.parametrize("action_parser", ["compact", "uitars"])
async def test_random_clicks_are_actions_and_follow_the_seed(action_parser: str) -> None:
    engine = ScriptedEngine(random_clicks(action_parser))
    texts = [
        bytes((await engine.generate(ask(seed=seed, max_tokens=99))).sampled.token_ids).decode()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    coordinates = make_coordinate_map("thousandths", 168, 168)
    assert make_action_parser(action_parser).parse(texts[0], coordinates).kind == "click"


async def test_a_weight_set_without_a_manifest_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: say(""), policy_version=3)
    with pytest.raises(WeightsError, match=r"no readable manifest\.json"):
        await engine.update_weights(tmp_path, 4)
    assert engine.policy_version == 3


async def test_a_partial_goes_on_under_the_weights_that_serve_then(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}", encoding="ascii")
    engine = ScriptedEngine(lambda request: say("x" * 40, logprob=-0.5), policy_version=3)
    begun = await engine.generate(ask(max_tokens=5))
    await engine.update_weights(tmp_path, 4)
    rest = await engine.generate(replace(ask(), partial=begun.sampled))
    assert (bytes(rest.sampled.token_ids), rest.stop) == (b"x" * 40, "end")
    spans = [(span.version, span.end) for span in rest.sampled.version_spans]
    assert spans == [(3, 5), (4, 40)]
    assert len(rest.sampled.behaviour_logprobs) == len(rest.sampled.entropies) == 40


def test_spans_cover_the_tokens_without_gaps() -> None:
    assert version_spans([]) == []
    assert version_spans([1, 1, 2]) == [
        VersionSpan(version=1, start=0, end=2),
        VersionSpan(version=2, start=2, end=3),
    ]
