"""The real vLLM on this machine with the class qwen3_5: the promises of test_vllm_engine.py, and its states.

Its prompts are read in chunks too, and its prefix cache has states beside keys and values. One engine serves
all tests; test_vllm_families.py has one with whole weight sets of a pointer head, test_vllm_async.py one that
preempts, test_vllm_lora.py two with adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dart_cli.engines.base import GenerateRequest
from dart_cli.policy.loader import LoadedPolicy
from tests.engines.served import EXACT, Asker, Served, at, errors
from tests.engines.test_vllm_engine import (  # noqa: F401 - tests and fixtures, which run here again
    alive,
    cached_of,
    endless,
    served,
    test_a_partial_goes_on_token_for_token_from_any_place,
    test_interrupted_every_request_returns_what_it_has_and_goes_on_as_if_nothing_had_been,
    test_new_weights_are_those_that_serve_and_their_old_image_features_are_forgotten,
    test_no_prefix_of_older_weights_is_taken,
    test_numbers_match_a_fresh_forward_over_turns_and_images,
    test_prompts_are_read_in_chunks_that_cut_screens,
    test_screens_and_their_features_stay_in_vllm_while_the_vision_tower_does,
    test_the_same_seed_draws_the_same_tokens_as_the_transformers_engine,
    test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version,
    test_weights_taken_while_prompts_are_half_read_leave_every_token_the_numbers_of_its_version,
)

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def untrained_folder(family: Callable[[str], Path]) -> Path:
    """In place of the tiny model of the other modules."""
    return family("qwen3_5")


def test_states_are_float32_and_no_kernel_is_compiled_with_nvcc(
    served: Served,  # noqa: F811
) -> None:
    config = served.engine._llm.vllm_config
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"
    assert config.additional_config["gdn_prefill_backend"] == "triton"


def test_a_prompt_goes_on_from_the_states_of_one_that_it_extends(
    endless: Served,  # noqa: F811
    policy: LoadedPolicy,
    ask: Asker,
) -> None:
    """With screens: vLLM keeps the states near the end of a prompt, and where a prompt leaves another."""
    first = ask(81, past_images=2, max_tokens=40)
    found, drawn = cached_of(endless, first)
    assert found == 0
    longer = extended(first, drawn.sampled.token_ids + [20] * 5)
    found, generation = cached_of(endless, longer)
    assert len(first.prompt_token_ids) - 16 <= found <= len(longer.prompt_token_ids)
    assert errors(policy, [longer], [generation], at(endless, endless.start)) < EXACT
    end = max(p for p, t in enumerate(first.prompt_token_ids) if t == policy.image_token_id) + 1
    parted = [
        replace(first, prompt_token_ids=first.prompt_token_ids[:end] + [30 + i] * 40)
        for i in range(3)
    ]
    generations = [cached_of(endless, request) for request in parted]
    assert generations[-1][0] > 0
    for request, (_, generation) in zip(parted, generations, strict=True):
        assert errors(policy, [request], [generation], at(endless, endless.start)) < EXACT


def extended(request: GenerateRequest, token_ids: list[int]) -> GenerateRequest:
    return replace(request, prompt_token_ids=request.prompt_token_ids + token_ids)
