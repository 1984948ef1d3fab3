"""Asynchronous scheduling, prompts in chunks, on two workers that share the model: as a GPU engine runs.

Each token is drawn at its place, numbers are those of the whole model, and weights are taken by shards; the
tiny model's head is tied to the embeddings, each of which is in two parts. So are the states of the other one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bus.messages import SampledTokens, VersionSpan
from dart_cli.config.schema import VllmConfig
from dart_cli.engines.base import Generation
from dart_cli.policy.loader import LoadedPolicy
from tests.engines.exact import drawn_by_transformers
from tests.engines.served import CHUNKED, EXACT, Asker, Served, errors, started, taken_in_flight
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.slow,
]

MAX_BATCH = 4
BLOCKS = {"tiny": 24, "qwen3_5": 44}
"""Of 32 tokens, or of the states of a layer: too few for as many requests at their length, so some are preempted."""
LENGTH = 512
"""Tokens of a sequence. The encoder cache of vLLM's own size holds as many as a chunk or one screen has: far fewer."""
SHOWN = 30 * 70
"""Tokens of the screens in play."""


@pytest.fixture(scope="module", params=BLOCKS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def untrained_folder(model: str, untrained_folder: Path, family: Callable[[str], Path]) -> Path:
    return untrained_folder if model == "tiny" else family(model)


@pytest.fixture(scope="module")
def served(
    model: str, untrained_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    from tests.engines import async_cpu

    options = {
        "num_gpu_blocks_override": BLOCKS[model],
        "block_size": 32,
        "enable_mm_processor_stats": True,
        "disable_log_stats": False,  # statistics count what is preempted
    }
    config = VllmConfig(max_model_len=LENGTH, tensor_parallel=2, options=options | CHUNKED)
    with pytest.MonkeyPatch.context() as patch:
        async_cpu.install(patch.setattr)
        with started(
            untrained_folder, tmp_path_factory.mktemp("weights"), MAX_BATCH, config, SHOWN
        ) as engine:
            engine.engine.policy.end_token_ids = ()
            yield engine


def test_this_engine_schedules_asynchronously_on_two_workers(served: Served) -> None:
    config = served.engine._llm.vllm_config
    assert config.scheduler_config.get_scheduler_cls().__name__ == "AsyncScheduler"
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.scheduler_config.enable_chunked_prefill


def preempted() -> float:
    """How many rows vLLM has preempted, by its own count."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    )


def test_tokens_are_those_of_their_places_in_a_batch_that_joins_leaves_and_preempts(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    policy.end_token_ids = ()
    requests = [
        ask(i, past_images=i % 3, max_tokens=30 + 25 * (i % 5), temperature=float(i != 4))
        for i in range(3 * MAX_BATCH)
    ]
    before = preempted()
    ours = served.run(served.generate(*requests))
    assert preempted() > before
    for one, other in zip(ours, drawn_by_transformers(policy, requests), strict=True):
        assert one.sampled.token_ids == other.sampled.token_ids
        assert one.sampled.behaviour_logprobs == pytest.approx(
            other.sampled.behaviour_logprobs, abs=EXACT
        )
        assert one.sampled.entropies == pytest.approx(other.sampled.entropies, abs=EXACT)


def test_a_screen_in_play_is_encoded_once_also_if_more_were_shown_than_a_pass_has_tokens(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(1000 + i, max_tokens=2) for i in range(24)]
    screens = [screen for request in requests for screen in request.images]
    assert LENGTH < sum(map(policy.images.token_count, screens)) < SHOWN

    async def encoded() -> list[int]:
        """On each worker, requests of which a screen was encoded; they are counted from the last call."""
        await served.engine._llm.reset_prefix_cache()
        await served.generate(*requests)
        workers = await served.engine._llm.collective_rpc("get_encoder_timing_stats")
        return [sum(each["num_encoder_calls"] for each in worker.values()) for worker in workers]

    first, again = served.run(encoded()), served.run(encoded())
    assert min(first) >= len(requests)
    assert again == [0, 0]


def test_an_interrupted_completion_goes_on_at_its_place(served: Served, ask: Asker) -> None:
    requests = [ask(i, max_tokens=60) for i in range(MAX_BATCH)]

    async def interrupted() -> list[Generation]:
        asking = [asyncio.create_task(served.engine.generate(request)) for request in requests]
        running = served.engine._running
        await until(
            lambda: len(running) == MAX_BATCH and all(d.token_ids for d in running.values())
        )
        served.engine.interrupt()
        return await asyncio.gather(*asking)

    straight = served.run(served.generate(*requests))
    partials = [
        SampledTokens(
            token_ids=each.sampled.token_ids,
            behaviour_logprobs=each.sampled.behaviour_logprobs,
            entropies=each.sampled.entropies,
            version_spans=[VersionSpan(version=0, start=0, end=len(each.sampled.token_ids))],
        )
        for each in served.run(interrupted())
    ]
    assert all(0 < len(partial.token_ids) < 60 for partial in partials)
    resumed = [
        replace(request, partial=partial)
        for request, partial in zip(requests, partials, strict=True)
    ]
    for got, expected in zip(served.run(served.generate(*resumed)), straight, strict=True):
        assert got.sampled.token_ids == expected.sampled.token_ids


def test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    served.run(served.take(served.start))
    requests, generations, versions = taken_in_flight(
        served, ask, policy, updates=2, count=MAX_BATCH + 2
    )
    assert sum(len(each.sampled.version_spans) > 1 for each in generations) >= MAX_BATCH
    assert errors(policy, requests, generations, versions) < EXACT
