"""Continuous batching: which request joins when, which leaves when, and that the numbers stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from bus.errors import EngineError
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.caches import kv_bytes_per_token
from dart_cli.engines.requests import JoinPolicy
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from scripts import tiny_model as tiny
from tests.engines.conftest import screenshot
from tests.engines.test_transformers_engine import assert_exact, begun, gather, serving
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    Asker = Callable[..., GenerateRequest]


def endless(policy: LoadedPolicy) -> None:
    """No completion ends before its length."""
    policy.end_token_ids = (policy.forbidden_token_ids[0],)


async def test_a_request_joins_the_running_batch_and_leaves_it_before_the_others(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    async with serving(policy, max_batch=2) as engine:
        long = asyncio.create_task(engine.generate(ask(1, max_tokens=3000)))
        await begun(engine)
        for seed in (2, 3, 4):  # one after another in the one place that is left
            assert len((await engine.generate(ask(seed, max_tokens=5))).sampled.token_ids) == 5
            assert engine.gauges()["in_flight"] == 1
        assert not long.done()
        assert engine.gauges()["prefills"] == 4
        engine.interrupt()
        assert (await long).stop == "suspended"


async def test_a_row_that_is_no_longer_awaited_makes_room_while_the_others_run(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    async with serving(policy, max_batch=2) as engine:
        stays, goes = (
            asyncio.create_task(engine.generate(ask(i, max_tokens=3000))) for i in (1, 2)
        )
        await begun(engine, 2)
        waits = asyncio.create_task(engine.generate(ask(3, max_tokens=4)))
        await until(lambda: engine.gauges()["waiting"] == 1)
        goes.cancel()
        assert len((await waits).sampled.token_ids) == 4
        assert not stays.done()
        engine.interrupt()
        await stays


async def test_numbers_are_those_of_a_fresh_forward_however_rows_come_and_go(
    policy: LoadedPolicy, ask: Asker
) -> None:
    """Lengths from 1 to 80 at a few places: layouts grow, move and lose rows all the time."""
    requests = [
        ask(i, past_images=i % 3, max_tokens=(1, 5, 30, 80)[i % 4], temperature=(1.0, 0.7)[i % 2])
        for i in range(16)
    ]
    async with serving(policy, max_batch=4) as engine:
        generations = await gather(engine, requests)
        prefills = engine.gauges()["prefills"]
    assert 5 < prefills < 16
    for request, generation in zip(requests, generations, strict=True):
        assert_exact(policy, request, generation, request.sampling.temperature)


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL whose second layer sees 24 tokens back, with fewer key than query heads."""
    tokenizer = tiny.build_tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.1,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 48,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    assert config.get_text_config().layer_types == ["full_attention", "sliding_attention"]
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy") / "windowed"
    model = Qwen2_5_VLForConditionalGeneration(config)
    tiny.save(folder, model, tokenizer, Qwen2VLImageProcessorPil(), build={})  # type: ignore[arg-type]
    return folder


async def test_numbers_are_exact_with_shared_heads_and_a_sliding_window(
    windowed_folder: Path, ask: Asker
) -> None:
    policy = load_policy(windowed_folder)
    renderer = PromptRenderer(policy)
    requests = []
    for i in range(10):
        prompt = renderer.render("click " * (1 + i), [], screenshot(i, 112, 112 + 28 * (i % 3)))
        asked = ask(i, max_tokens=(3, 30, 60)[i % 3])
        requests.append(replace(asked, prompt_token_ids=prompt.token_ids, images=prompt.images))
    async with serving(policy, max_batch=3) as engine:
        generations = await gather(engine, requests)
    for request, generation in zip(requests, generations, strict=True):
        assert_exact(policy, request, generation, 1.0)


async def test_more_than_fit_drawn_together_are_the_same_again_to_the_last_bit(
    policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 2, max_tokens=3 + 7 * (i % 4)) for i in range(12)]
    drawn = []
    for _ in range(2):
        async with serving(policy, max_batch=6) as engine:
            if drawn:  # what was served before is no matter either, where it is over
                await engine.generate(replace(requests[0], images=[], prompt_token_ids=[20] * 200))
            drawn.append(await engine.generate_together(requests))
    for one, other in zip(*drawn, strict=True):
        assert one.sampled.token_ids == other.sampled.token_ids
        assert one.sampled.behaviour_logprobs == other.sampled.behaviour_logprobs
        assert one.sampled.entropies == other.sampled.entropies


async def test_the_memory_of_keys_and_values_bounds_the_batch_and_no_single_request(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    requests = [ask(i, max_tokens=6) for i in range(9)]
    longest = max(len(request.prompt_token_ids) for request in requests) + 6
    three = 3 * longest * kv_bytes_per_token(policy.model)
    rows: list[int] = []
    async with serving(policy, max_batch=9, cache_bytes=three) as engine:
        hook = policy.model.get_input_embeddings().register_forward_pre_hook(
            lambda _module, arguments: rows.append(arguments[0].shape[0])
        )
        generations = await gather(engine, requests)
        hook.remove()
        alone = await engine.generate(ask(20, max_tokens=3 * longest))
    assert max(rows) == 3
    assert all(len(generation.sampled.token_ids) == 6 for generation in generations)
    assert len(alone.sampled.token_ids) == 3 * longest


async def test_a_fault_in_a_prefill_ends_its_joiners_and_spares_the_rows(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)

    def refuse_prompts(_module: object, arguments: tuple[torch.Tensor]) -> None:
        if arguments[0].shape[1] > 1:
            raise MemoryError("no room for a prompt")

    running = ask(1, max_tokens=3000)
    async with serving(policy) as engine:
        long = asyncio.create_task(engine.generate(running))
        await begun(engine)
        await until(lambda: engine.gauges()["tokens"] >= 1)
        hook = policy.model.get_input_embeddings().register_forward_pre_hook(refuse_prompts)
        with pytest.raises(EngineError, match="batch of 1 failed: MemoryError: no room"):
            await engine.generate(ask(2))
        hook.remove()
        again = await engine.generate(ask(2, max_tokens=3))
        engine.interrupt()
        generation = await long
    assert generation.stop == "suspended"
    assert len(again.sampled.token_ids) == 3
    assert_exact(policy, running, generation, 1.0)


async def test_an_interruption_between_two_joins_suspends_both_and_a_later_request_neither(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    async with serving(policy, max_batch=4) as engine:
        first = asyncio.create_task(engine.generate(ask(1, max_tokens=3000)))
        await begun(engine)
        second = asyncio.create_task(engine.generate(ask(2, max_tokens=3000)))
        await begun(engine, 2)
        engine.interrupt()
        third = asyncio.create_task(engine.generate(ask(3, max_tokens=6)))
        outcomes: list[Generation] = await asyncio.gather(first, second, third)
    assert [outcome.stop for outcome in outcomes] == ["suspended", "suspended", "length"]


def test_no_request_waits_for_companions_where_nothing_runs() -> None:
    assert JoinPolicy().admits(1, 0)
    assert not JoinPolicy().admits(0, 0)


def iterations_until_admitted(joiners: int, running: int) -> int:
    join_policy = JoinPolicy(2)
    return next(count for count in range(1000) if join_policy.admits(joiners, running))


def test_joiners_wait_until_they_have_waited_as_long_as_their_prefill_holds_up_the_others() -> None:
    assert iterations_until_admitted(1, 1) == 2
    assert iterations_until_admitted(1, 10) == 20
    assert iterations_until_admitted(10, 10) == 2
    assert iterations_until_admitted(20, 1) == 1


def test_a_wait_counts_from_the_last_join_on_and_only_while_somebody_could_join() -> None:
    join_policy = JoinPolicy(2)
    assert [join_policy.admits(1, 1) for _ in range(6)] == [False, False, True] * 2
    assert not join_policy.admits(1, 1)
    assert not join_policy.admits(0, 1)  # the one that waited is gone
    assert [join_policy.admits(1, 1) for _ in range(3)] == [False, False, True]
