"""The real vLLM on this machine: one engine for all tests, in an event loop of its own.

It reads prompts in chunks, as on a GPU; engines of test_vllm_lora.py and test_vllm_families.py read them whole. Each
test leaves it serving the untrained policy; the last ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bus.errors import EngineError, WeightsError
from bus.messages import SampledTokens, VersionSpan
from dart_cli.config.model_folder import INDEX
from dart_cli.config.schema import VllmConfig
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.caches import vision_digest
from dart_cli.engines.vllm.start import engine_args, start
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.weight_set import WeightSet
from dart_cli.weights.manifest import WEIGHTS
from tests.engines.exact import (
    Weights,
    drawn_by_transformers,
    fresh_numbers,
    random_versions,
)
from tests.engines.served import (
    CHUNK,
    CHUNKED,
    EXACT,
    Asker,
    Served,
    at,
    errors,
    started,
    taken_in_flight,
)
from tests.waiting import PATIENCE_S, lives, until
from tests.weights.sets import publish

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.slow,
]

MAX_BATCH = 8
ROUNDS = 8
"""Attempts to take weights at the right moment, of which the first succeeds but on a busy machine."""


@pytest.fixture(scope="module")
def alive(untrained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    published, config = tmp_path_factory.mktemp("weights"), VllmConfig(options=CHUNKED)
    with started(untrained_folder, published, MAX_BATCH, config) as served:
        yield served


@pytest.fixture
def served(alive: Served) -> Iterator[Served]:
    ends, version = alive.engine.policy.end_token_ids, alive.engine.policy_version
    yield alive
    alive.engine.policy.end_token_ids = ends
    if alive.engine.policy_version != version:
        alive.run(alive.take(alive.start))


@pytest.fixture
def endless(served: Served) -> Served:
    """No completion ends by itself."""
    served.engine.policy.end_token_ids = ()
    return served


def test_prompts_are_read_in_chunks_that_cut_screens(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    """What all tests of this module are about: one alone, from its first token, has a known chunk in each pass."""
    scheduler = served.engine._llm.vllm_config.scheduler_config
    assert (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens) == (True, CHUNK)
    served.run(served.take(served.start))  # no prefix of these prompts is known
    requests = [ask(i, past_images=2) for i in range(60, 64)]
    for request in requests:
        found, generation = cached_of(served, request)
        assert found == 0
        assert cut_screens(policy, request) >= 1
        assert errors(policy, [request], [generation], at(served, served.start)) < EXACT


def cut_screens(policy: LoadedPolicy, request: GenerateRequest) -> int:
    """Screens of which one chunk has the first token and another one the last."""
    cut = place = 0
    for encoded in request.images:
        place = request.prompt_token_ids.index(policy.image_token_id, place)
        end = place + policy.images.token_count(encoded)
        cut += place // CHUNK != (end - 1) // CHUNK
        place = end
    return cut


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_match_a_fresh_forward_over_turns_and_images(
    served: Served, policy: LoadedPolicy, ask: Asker, temperature: float
) -> None:
    requests = [ask(i, past_images=i % 3, temperature=temperature) for i in range(24)]
    generations = served.run(served.generate(*requests))
    assert {len(request.images) for request in requests} == {1, 2, 3}
    assert errors(policy, requests, generations, at(served, served.start), temperature) < EXACT


def test_greedy_takes_the_likeliest_and_scores_the_untempered_distribution(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, temperature=0.0) for i in range(3)]
    generations = served.run(served.generate(*requests, ask(9)))[:3]
    assert errors(policy, requests, generations, at(served, served.start)) < EXACT
    for request, generation in zip(requests, generations, strict=True):
        at_once, _ = fresh_numbers(policy, request, generation.sampled.token_ids, 1.0)
        nearly_greedy, _ = fresh_numbers(policy, request, generation.sampled.token_ids, 1e-3)
        assert float(nearly_greedy.min()) > -0.7 > float(at_once.min())


def test_the_same_seed_draws_the_same_tokens_as_the_transformers_engine(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 3) for i in range(12)]
    ours = served.run(served.generate(*requests))
    alone = [served.run(served.generate(request))[0] for request in requests[:4]]
    for one, other in zip(ours, drawn_by_transformers(policy, requests), strict=True):
        assert (one.sampled.token_ids, one.stop) == (other.sampled.token_ids, other.stop)
        assert one.sampled.behaviour_logprobs == pytest.approx(
            other.sampled.behaviour_logprobs, abs=EXACT
        )
        assert one.sampled.entropies == pytest.approx(other.sampled.entropies, abs=EXACT)
    assert [each.sampled.token_ids for each in alone] == [
        each.sampled.token_ids for each in ours[:4]
    ]


def test_forbidden_tokens_are_never_drawn_though_likeliest(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    weights = {name: tensor.clone() for name, tensor in served.start.items()}
    [rows] = [tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight")]
    rows[list(policy.forbidden_token_ids)] *= 30
    served.run(served.take(weights))
    requests = [ask(i, temperature=2.0, max_tokens=12) for i in range(24)]
    generations = served.run(served.generate(*requests))
    drawn = {token for generation in generations for token in generation.sampled.token_ids}
    assert not drawn & set(policy.forbidden_token_ids)
    assert errors(policy, requests, generations, at(served, weights), 2.0) < EXACT


def test_a_completion_ends_with_the_end_token_or_at_its_length(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    served.engine.policy.end_token_ids = tuple(range(8, 400))  # likely within a few tokens
    requests = [ask(i, max_tokens=1 + i % 9) for i in range(24)]
    generations = served.run(served.generate(*requests))
    for request, generation in zip(requests, generations, strict=True):
        ends = [8 <= token < 400 for token in generation.sampled.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (generation.stop == "end")
        assert generation.stop == "end" or len(ends) == request.sampling.max_tokens
    assert {generation.stop for generation in generations} == {"end", "length"}


def test_cancelling_frees_the_place(endless: Served, ask: Asker) -> None:
    async def cancelled() -> list[Any]:
        long = [ask(i, max_tokens=3000) for i in range(2 * MAX_BATCH)]
        tasks = [asyncio.create_task(endless.engine.generate(request)) for request in long]
        await until(lambda: endless.engine.gauges()["waiting"] == MAX_BATCH)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await endless.generate(*(ask(i, max_tokens=2) for i in range(4)))
        return outcomes

    outcomes = endless.run(cancelled())
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    gauges = endless.engine.gauges()
    assert gauges["in_flight"] == gauges["waiting"] == 0
    assert not endless.engine._llm.output_processor.has_unfinished_requests()


def test_a_partial_goes_on_token_for_token_from_any_place(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 2) for i in range(3)]
    whole = served.run(served.generate(*requests))
    resumed = [
        replace(request, partial=cut(generation, length))
        for request, generation in zip(requests, whole, strict=True)
        for length in range(len(generation.sampled.token_ids) + 1)
    ]
    again = served.run(served.generate(*resumed))
    expected = [
        generation for generation in whole for _ in range(len(generation.sampled.token_ids) + 1)
    ]
    for got, straight in zip(again, expected, strict=True):
        assert (got.sampled.token_ids, got.stop) == (straight.sampled.token_ids, straight.stop)
        assert got.sampled.version_spans == straight.sampled.version_spans
        assert got.sampled.behaviour_logprobs == pytest.approx(
            straight.sampled.behaviour_logprobs, abs=EXACT
        )
        assert got.sampled.entropies == pytest.approx(straight.sampled.entropies, abs=EXACT)


def cut(generation: Generation, length: int) -> SampledTokens:
    """The partial of a completion of one version that was suspended after `length` tokens."""
    version = generation.sampled.version_spans[0].version
    return SampledTokens(
        token_ids=generation.sampled.token_ids[:length],
        behaviour_logprobs=generation.sampled.behaviour_logprobs[:length],
        entropies=generation.sampled.entropies[:length],
        version_spans=[VersionSpan(version=version, start=0, end=length)] if length else [],
    )


def test_interrupted_every_request_returns_what_it_has_and_goes_on_as_if_nothing_had_been(
    endless: Served, ask: Asker
) -> None:
    requests = [ask(i, max_tokens=60) for i in range(MAX_BATCH + 4)]

    async def interrupted() -> list[Generation]:
        asking = [asyncio.create_task(endless.engine.generate(request)) for request in requests]
        in_work = endless.engine._running
        await until(
            lambda: len(in_work) == MAX_BATCH and all(drawn.token_ids for drawn in in_work.values())
        )
        endless.engine.interrupt()
        return await asyncio.gather(*asking)

    straight = endless.run(endless.generate(*requests))
    found = endless.run(interrupted())
    assert {generation.stop for generation in found} == {"suspended"}
    assert [len(generation.sampled.token_ids) for generation in found[MAX_BATCH:]] == [0] * 4
    assert all(0 < len(generation.sampled.token_ids) < 60 for generation in found[:MAX_BATCH])
    resumed = [
        replace(request, partial=cut(generation, len(generation.sampled.token_ids)))
        for request, generation in zip(requests[:MAX_BATCH], found, strict=False)
    ]
    for got, expected in zip(endless.run(endless.generate(*resumed)), straight, strict=False):
        assert got.sampled.token_ids == expected.sampled.token_ids


def test_an_interruption_in_the_first_moment_takes_effect(endless: Served, ask: Asker) -> None:
    async def interrupted_at_once() -> list[Generation]:
        long = [ask(i, max_tokens=3000) for i in range(MAX_BATCH + 2)]
        asking = [asyncio.create_task(endless.engine.generate(request)) for request in long]
        await asyncio.sleep(0)
        endless.engine.interrupt()
        return await asyncio.gather(*asking)

    found = endless.run(interrupted_at_once())
    assert {generation.stop for generation in found} == {"suspended"}


def test_new_weights_are_those_that_serve_and_their_old_image_features_are_forgotten(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 3) for i in range(8)]
    served.run(served.generate(*requests))
    for factor in (1.3, 0.8):
        weights = {name: t * factor if "visual" in name else t for name, t in served.start.items()}
        version = served.run(served.take(weights))
        generations = served.run(served.generate(*requests))
        assert {span.version for g in generations for span in g.sampled.version_spans} == {version}
        assert errors(policy, requests, generations, at(served, weights)) < EXACT


def test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version(
    endless: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests, generations, versions = taken_in_flight(
        endless, ask, policy, count=MAX_BATCH + 2, updates=3
    )
    assert {generation.stop for generation in generations} == {"length"}
    # Most were sampled by several versions; on a busy machine one may be read or over between two updates.
    several = [g for g in generations if len(g.sampled.version_spans) > 1]
    assert len(several) > MAX_BATCH // 2
    assert errors(policy, requests, generations, versions) < EXACT


def test_weights_taken_while_prompts_are_half_read_leave_every_token_the_numbers_of_its_version(
    endless: Served, policy: LoadedPolicy, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read in the order in which they come, beside the tokens of those that have been read.

    Where this process was not given the processor until all had been read, there is another round.
    """
    engine, halts = endless.engine, []
    move, in_work = engine._move, engine._running

    async def seen() -> None:
        halts.append([len(drawn.token_ids) for drawn in in_work.values()])
        await move()

    monkeypatch.setattr(engine, "_move", seen)

    async def taken(requests: list[GenerateRequest], path: Path, version: int) -> list[Generation]:
        asking = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until(lambda: any(drawn.token_ids for drawn in in_work.values()))
        await engine.update_weights(path, version)
        return await asyncio.gather(*asking)

    versions = at(endless, *random_versions(policy, 1 + ROUNDS))
    for number in range(len(versions) - ROUNDS, len(versions)):
        path = publish(versions[number], endless.published, number).path
        first, *others = (ask(10 * number + i, past_images=2, max_tokens=40) for i in range(4))
        requests = [first, *(lengthened(each, policy) for each in others)]
        generations = endless.run(taken(requests, path, number))
        assert {len(generation.sampled.token_ids) for generation in generations} == {40}
        assert errors(policy, requests, generations, versions) < EXACT
        if halts[-1][0] > 0 == halts[-1][-1]:
            return
    pytest.fail(f"no prompt was half read at a halt: tokens of each {halts}")


def lengthened(request: GenerateRequest, policy: LoadedPolicy) -> GenerateRequest:
    """The request with a long text behind its screens: 40 chunks, and the screens are in the first ones."""
    tokens = request.prompt_token_ids
    end = max(place for place, token in enumerate(tokens) if token == policy.image_token_id) + 2
    return replace(request, prompt_token_ids=tokens[:end] + [20] * 40 * CHUNK + tokens[end:])


def test_a_request_that_reaches_vllm_after_its_end_leaves_no_token_of_mixed_weights(
    endless: Served, policy: LoadedPolicy, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its way to vLLM had taken longer than the abort's: it runs on, by keys of both versions."""
    engine = endless.engine
    abort, lost = engine._llm.abort, []

    async def first_is_lost(names: list[str]) -> None:
        if not lost:
            lost.extend(names)
        else:
            await abort(names)

    monkeypatch.setattr(engine._llm, "abort", first_is_lost)
    requests, generations, versions = taken_in_flight(
        endless, ask, policy, count=MAX_BATCH + 2, updates=1
    )
    assert len(lost) == MAX_BATCH
    assert {len(generation.sampled.token_ids) for generation in generations} == {60}
    assert errors(policy, requests, generations, versions) < EXACT


def cached_of(served: Served, request: GenerateRequest) -> tuple[int, Generation]:
    """Tokens of the prompt that vLLM had computed before, and the completion."""
    before = served.engine.gauges()["cached_tokens"]
    [generation] = served.run(served.generate(request))
    return int(served.engine.gauges()["cached_tokens"] - before), generation


def test_no_prefix_of_older_weights_is_taken(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    versions, request = at(served, *random_versions(policy, 2)), ask(91, past_images=2)
    cached_of(served, request)
    again, _ = cached_of(served, request)
    assert again > len(request.prompt_token_ids) // 2
    served.run(served.take(versions[-1]))
    found, fresh = cached_of(served, request)
    assert found == 0
    assert errors(policy, [request], [fresh], versions) < EXACT


def test_screens_and_their_features_stay_in_vllm_while_the_vision_tower_does(
    served: Served, policy: LoadedPolicy, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = served.engine, ask(92, past_images=1)
    images = engine._validator.prepare(request)
    text = {n: t if "visual." in n else t * 1.1 for n, t in served.start.items()}
    vision = {n: t * 1.1 if "visual." in n else t for n, t in text.items()}
    resets: list[bool] = []
    reset = engine._llm.reset_encoder_cache

    async def counted() -> None:
        resets.append(True)
        await reset()

    monkeypatch.setattr(engine._llm, "reset_encoder_cache", counted)
    for weights, expected in ((served.start, None), (text, 0), (vision, 1), (vision, 0)):
        resets.clear()
        served.run(served.take(weights))
        if expected is not None:
            assert len(resets) == expected
            prompt = engine._input(request.prompt_token_ids, images)
            assert all(item is None for item in prompt["mm_kwargs"]["image"])
        generations = served.run(served.generate(request))
        assert errors(policy, [request], generations, at(served, weights)) < EXACT


def test_an_update_that_is_cancelled_before_it_halts_leaves_room_for_the_next(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(source: WeightSet) -> str | None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return vision_digest(source)

    monkeypatch.setattr("dart_cli.engines.vllm.engine.vision_digest", slow)

    async def cancelled() -> None:
        taking = asyncio.create_task(served.take(served.start))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()

    version = served.engine.policy_version
    try:
        served.run(cancelled())
    finally:
        go_on.set()
    assert served.engine.policy_version == version
    assert served.run(served.take(served.start)) == version + 1


def test_bad_sets_are_refused_while_the_old_weights_go_on_serving(
    served: Served, ask: Asker, tmp_path: Path
) -> None:
    good = served.start
    first = next(iter(good))
    bad: list[Weights] = [
        dict(list(good.items())[1:]),
        {**good, first: torch.zeros(3)},
        {**good, first: good[first].bfloat16()},
        {**good, first: good[first] * float("nan")},
        {**good, "model.foreign.weight": torch.zeros(3)},
    ]
    paths = [publish(tensors, tmp_path, i).path for i, tensors in enumerate(bad)]
    paths += [publish(good, tmp_path, 9).path, tmp_path / "absent"]
    file = paths[-2] / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    requests = [ask(i) for i in range(4)]
    before = served.run(served.generate(*requests))
    version = served.engine.policy_version
    for path in paths:
        with pytest.raises(WeightsError):
            served.run(served.engine.update_weights(path, version + 1))
    after = served.run(served.generate(*requests))
    assert served.engine.policy_version == version
    assert [each.sampled.token_ids for each in after] == [each.sampled.token_ids for each in before]


def test_prompts_that_cannot_be_served_are_refused_before_they_wait(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    good = ask(1)
    bad = [
        GenerateRequest("a", good.prompt_token_ids, [], good.sampling),
        GenerateRequest("b", [], [], good.sampling),
        GenerateRequest("c", [9] * policy.max_positions, [], good.sampling),
        GenerateRequest("d", good.prompt_token_ids, [b"no image"], good.sampling),
    ]
    for request in bad:
        with pytest.raises(EngineError):
            served.run(served.generate(request))
    assert served.run(served.generate(good))[0].sampled.token_ids


def test_features_of_a_screen_keep_no_screen_alive_that_was_encoded_with_it() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dart_cli.engines.vllm import plugin  # noqa: F401 - it replaces what is called here

    runner: Any = SimpleNamespace(encoder_cache={}, maybe_save_ec_to_connector=lambda *_: None)
    together, alone = torch.rand(72, 8), torch.rand(36, 8)
    for name, output in zip("abc", (*together.split(36), alone), strict=True):
        GPUModelRunner._cache_encoder_output(runner, name, output, None, [])
    held = runner.encoder_cache
    assert torch.equal(torch.cat([held["a"], held["b"]]), together)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in held.values())
    assert held["c"] is alone


def test_a_batch_does_not_wait_for_the_token_ids_of_the_step_before() -> None:
    """Draws counts the tokens of the lists; an event that is waited for fails here."""
    from vllm import SamplingParams
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from dart_cli.engines.vllm import plugin  # noqa: F401 - it replaces what is called here

    batch = gpu_model_runner.InputBatch(
        max_num_reqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=100,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        logitsprocs_need_output_token_ids=True,  # as vLLM sets it where there is a processor
    )
    request = CachedRequestState(
        req_id="a",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(),
        generator=None,
        block_ids=([0],),
        num_computed_tokens=3,
        output_token_ids=[],
    )
    batch.add_request(request)
    [(_, _, _, drawn)] = batch.batch_update_builder.added
    batch.refresh_metadata()
    request.output_token_ids.append(-1)  # its token is on its way
    batch.prev_req_id_to_index = {"a": 0}
    event: Any = SimpleNamespace(synchronize=lambda: pytest.fail("waited"))
    batch.set_async_sampled_token_ids(torch.tensor([[7]]), event)
    batch.update_async_output_token_ids()
    assert len(drawn) == 1


def test_vllm_takes_the_arguments_of_a_gpu(policy: LoadedPolicy) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = VllmConfig(tensor_parallel=2, max_model_len=1024)
    arguments = engine_args(
        policy, config, dtype="bfloat16", max_batch=32, on_cpu=False, features=0.1
    )
    made = AsyncEngineArgs(**arguments).create_engine_config()
    assert made.attention_config.backend.name == "FLASH_ATTN"
    assert made.kernel_config.enable_flashinfer_autotune is False
    assert made.compilation_config.pass_config.fuse_allreduce_rms is False
    assert made.parallel_config.distributed_executor_backend == "mp"
    assert made.scheduler_config.max_num_batched_tokens == 8192
    assert made.cache_config.gpu_memory_utilization == pytest.approx(0.8)


def test_on_a_gpu_the_features_of_screens_are_taken_from_the_share_that_vllm_measures(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dart_cli.engines.vllm import plugin  # noqa: F401 - it asks for the platform, too

    given: dict[str, Any] = {}

    class Arguments:
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def create_engine_config(self, _: Any) -> Any:
            return SimpleNamespace(scheduler_config=SimpleNamespace(encoder_cache_size=8192))

    gpu = SimpleNamespace(is_cpu=lambda: False, get_device_total_memory=lambda: 80 * 10**9)
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs", Arguments)
    monkeypatch.setattr(
        "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config", lambda made, **_: made
    )
    monkeypatch.setattr("dart_cli.hardware.accelerator.device_count", lambda: 1)
    sizes = policy.model.config.vision_config  # of Qwen3-VL, with features for deeper layers
    width = sizes.out_hidden_size * (1 + len(sizes.deepstack_visual_indexes))
    for shown, held in ((10**6, 10**6), (0, 8192)):
        made: Any = start(
            policy, VllmConfig(), dtype="bfloat16", max_batch=8, device="cuda", screen_tokens=shown
        )
        assert made.scheduler_config.encoder_cache_size == held
        share = 0.9 - shown * width * 2 / 80e9
        assert given["gpu_memory_utilization"] == pytest.approx(share)


def test_an_image_is_sent_once(served: Served, ask: Asker) -> None:
    request = ask(77)
    images = served.engine._validator.prepare(request)

    async def sent() -> list[bool]:
        found = []
        for _ in range(2):
            prompt = served.engine._input(request.prompt_token_ids, images)
            found.append(prompt["mm_kwargs"]["image"][0] is not None)
            await served.generate(request)
        return found

    assert served.run(sent())[1] is False


def test_a_screen_travels_to_vllm_as_bytes(policy: LoadedPolicy, ask: Asker) -> None:
    from vllm.v1.serial_utils import MsgpackEncoder

    from dart_cli.engines.vllm.models import image_item

    image = policy.images.prepare(ask(79).images[0])
    frames = MsgpackEncoder().encode(image_item(image.pixels, image.grid))
    assert sum(map(len, frames)) < image.pixels.numel() + 1024
    assert image.patches.nbytes == 4 * image.table.frames * image.pixels.numel()


def test_prompt_tokens_are_counted_by_whether_the_prefix_cache_had_them(
    endless: Served, ask: Asker
) -> None:
    first = ask(81, past_images=1, max_tokens=40)
    names = ("prompt_tokens", "prefilled_tokens", "cached_tokens")

    def counts() -> list[int]:
        gauges = endless.engine.gauges()
        return [int(gauges[name]) for name in names]

    before = counts()
    [drawn] = endless.run(endless.generate(first))
    after = counts()
    length = len(first.prompt_token_ids)
    assert after == [before[0] + length, before[1] + length, before[2]]
    longer = replace(
        first, prompt_token_ids=first.prompt_token_ids + drawn.sampled.token_ids + [20] * 5
    )
    endless.run(endless.generate(longer))
    asked, computed, cached = (b - a for a, b in zip(after, counts(), strict=True))
    assert asked == len(longer.prompt_token_ids) == computed + cached
    assert length // 2 < cached < length + 40


def test_an_image_that_vllm_has_forgotten_is_sent_again(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    request = ask(78)

    async def forgotten() -> list[Generation]:
        await served.generate(request)
        await served.engine._llm.engine_core.reset_mm_cache_async()
        await served.engine._llm.reset_encoder_cache()
        await served.engine._llm.reset_prefix_cache()
        return await served.generate(request)

    assert errors(policy, [request], served.run(forgotten()), at(served, served.start)) < EXACT


def test_a_process_of_vllm_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.run(
        [sys.executable, "-m", "tests.engines.parent"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL
    asyncio.run(until(lambda: not lives(int(parent.stdout))))


def test_an_engine_that_dies_is_an_error_and_does_not_hang(served: Served, ask: Asker) -> None:
    """The last: nothing serves after it."""
    served.engine.policy.end_token_ids = ()
    [process] = served.engine._llm.engine_core.resources.engine_manager.processes

    async def killed() -> list[Any]:
        asking = [
            asyncio.create_task(served.engine.generate(ask(i, max_tokens=3000))) for i in range(2)
        ]
        await until(lambda: served.engine.gauges()["tokens"] > 0)
        os.kill(process.pid, signal.SIGKILL)
        return await asyncio.gather(*asking, return_exceptions=True)

    outcomes = served.run(killed())
    assert all(isinstance(outcome, EngineError) for outcome in outcomes), outcomes
    assert "died" in str(outcomes[0])
    with pytest.raises(EngineError, match="died"):
        served.run(served.generate(ask(1)))


def test_vllm_loads_the_files_that_the_trainer_loads(tmp_path: Path) -> None:
    from dart_cli.engines.vllm.plugin import loaded_files

    names = ["model.safetensors", "model-1.safetensors", "model-2.safetensors", "other.safetensors"]
    found = [str(tmp_path / name) for name in names]
    for file in found:
        Path(file).touch()
    placed = {"a": names[1], "b": names[2]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert loaded_files(found, str(tmp_path), INDEX) == found[:1]
    Path(found.pop(0)).unlink()
    assert loaded_files(found, str(tmp_path), INDEX) == found[:2]
