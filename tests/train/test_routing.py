"""The rollout's choice of experts reaches the trainer: recorded, chained, replayed, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bus.errors import ProtocolError
from bus.messages import Batch, SampledTokens, Sampling
from bus.packed import float64s, int32s
from dart_cli.config.architecture import MIXTURES
from dart_cli.config.load import config_of_model
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.logprob_check import Trial, play_trial
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.experts import RoutingShape, routing_array
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import rescore
from dart_cli.train.packs.batch_check import check_batch
from dart_cli.train.trained_policy import TrainModel

Family = Callable[[str], Path]
every_mixture = pytest.mark.parametrize("model_type", MIXTURES)
TRIAL = Trial(temperature=1.0, trajectories=2, texts=1, max_tokens=12)


def shape_of(policy: LoadedPolicy) -> RoutingShape:
    shape = RoutingShape.of(policy.model)
    assert shape is not None
    return shape


def play(policy: LoadedPolicy, trial: Trial = TRIAL, **options: Any) -> Batch:
    """Sample a trial whose prompts show none, one and several screens, with a record of the experts."""
    engine = TransformersEngine(policy, records_routing=True, **options)
    responder = PolicyResponder(policy, engine, PromptRenderer(policy), "thousand")

    async def whole() -> Batch:
        try:
            return await play_trial(policy, engine, responder, trial)
        finally:
            await engine.close()

    return asyncio.run(whole())


@every_mixture
def test_engine_and_trainer_agree_with_the_replay(model_type: str, family: Family) -> None:
    batch = play(load_policy(family(model_type)))
    config = config_of_model(family(model_type), [])
    model = TrainModel.load(config)
    assert all(chain.routing for chain in batch.chains)
    assert rescore(model, batch, 2048).mismatch().max <= 5e-5
    metrics = PolicyLearner(model, config.train).update(batch, 0, policy_version=0).metrics
    assert metrics["routing_differs"] <= 0.01  # float32: hardly two experts score alike


@every_mixture
def test_experts_of_the_rollout_are_taken_and_those_of_other_tokens_are_noticed(
    model_type: str, family: Family
) -> None:
    """A mutation: each token with the experts of the token before it is far from what the engine sampled."""
    policy = load_policy(family(model_type))
    batch = play(policy)
    model = TrainModel.load_frozen(config_of_model(family(model_type), []))
    size = shape_of(policy).nbytes
    moved = [
        chain.model_copy(update={"routing": chain.routing[-size:] + chain.routing[:-size]})
        for chain in batch.chains
    ]
    shifted = rescore(model, batch.model_copy(update={"chains": moved}), 2048)
    assert shifted.mismatch().mean > 100 * rescore(model, batch, 2048).mismatch().mean
    # Without replay_routing the record is not read.
    own = rescore(replace(model, replays=False), batch.model_copy(update={"chains": moved}), 2048)
    assert own.mismatch().max <= 5e-5


@torch.no_grad()
def let_experts_score_alike(policy: LoadedPolicy) -> None:
    """Give three routers' rows at a time nearly the same weights, so that rounding chooses two of three experts."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in policy.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            noise = 1 + 0.01 * torch.randn(weight.shape, generator=generator)
            weight.copy_(weight[[0, 0, 0, 3, 3, 3, 6, 6]] * noise)


@every_mixture
def test_in_bfloat16_a_replay_is_closer_than_the_routers_own_choice(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type), "bfloat16")
    model = TrainModel.load_frozen(config_of_model(family(model_type), ["model.dtype=bfloat16"]))
    for each in (policy, model.policy):
        let_experts_score_alike(each)
    batch = play(policy, replace(TRIAL, trajectories=4))
    with_replay = rescore(model, batch, 2048).mismatch()
    without = rescore(replace(model, replays=False), batch, 2048).mismatch()
    # On a CPU, two layers of qwen3_vl_moe give nearly all tokens the same bits in engine and trainer.
    share = 1 if model_type == "qwen3_vl_moe" else 2
    assert share * with_replay.mean <= without.mean


@every_mixture
def test_the_record_is_that_of_every_token_whatever_the_cache_has(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    cached, computed = play(policy), play(policy, prefix_bytes=0)
    shape = shape_of(policy)
    for one, other in zip(cached.chains, computed.chains, strict=True):
        assert one.token_ids == other.token_ids
        assert one.routing == other.routing
        choices = routing_array(one.routing, shape)
        assert len(choices) == len(one.token_ids)
        distinct = [
            len(set(row)) == shape.per_token
            for row in choices.reshape(-1, shape.per_token).tolist()
        ]
        # Only the last token of the chain has no record: no pass has computed it.
        assert all(distinct[: -shape.layers])
        assert not any(distinct[-shape.layers :])


@torch.no_grad()
def reverse_routers(policy: LoadedPolicy) -> None:
    """Change the weights so that every router chooses other experts."""
    for name, parameter in policy.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.copy_(parameter.flip(0))


def request(prompt: Sequence[int], partial: SampledTokens | None = None, most: int = 24) -> Any:
    sampling = Sampling(temperature=1.0, max_tokens=most, seed=5)
    return GenerateRequest("t/0", list(prompt), [], sampling, partial=partial)


PROMPT = [*range(30, 79)]


@every_mixture
def test_tokens_keep_the_experts_with_which_they_were_drawn(
    model_type: str, family: Family
) -> None:
    """A completion is suspended and goes on under other weights: the earlier tokens keep their record."""
    policy = load_policy(family(model_type))
    size = shape_of(policy).nbytes

    async def whole() -> tuple[SampledTokens, SampledTokens, SampledTokens]:
        engine = TransformersEngine(policy, records_routing=True)
        partial = (await engine.generate(request(PROMPT, most=4))).sampled
        reverse_routers(policy)
        engine._batch.drop_prefixes()
        resumed = (await engine.generate(request(PROMPT, partial))).sampled
        fresh = (await engine.generate(request([*PROMPT, *resumed.token_ids[:-1]], most=1))).sampled
        await engine.close()
        return partial, resumed, fresh

    partial, resumed, fresh = asyncio.run(whole())
    known = len(partial.routing)
    assert known == (len(PROMPT) + len(partial) - 1) * size
    assert len(resumed.routing) == (len(PROMPT) + len(resumed) - 1) * size
    assert resumed.routing[:known] == partial.routing
    assert resumed.routing[known:] == fresh.routing[known:]
    assert fresh.routing[:known] != partial.routing


@every_mixture
def test_a_weight_change_between_two_tokens_leaves_the_record_whole(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    size = shape_of(policy).nbytes

    async def whole() -> tuple[SampledTokens, SampledTokens, SampledTokens]:
        engine = TransformersEngine(policy, records_routing=True)
        plain = (await engine.generate(request(PROMPT))).sampled
        batch, decode, passes = engine._batch, engine._batch.decode, []

        def changing(version: int) -> None:
            passes.append(version)
            if len(passes) == 3:
                reverse_routers(policy)
                batch.drop_prefixes()
            decode(version)

        batch.decode = changing  # type: ignore[method-assign]
        changed = (await engine.generate(request(PROMPT))).sampled
        after = (await engine.generate(request(PROMPT))).sampled
        await engine.close()
        return plain, changed, after

    plain, changed, after = asyncio.run(whole())
    before = (len(PROMPT) + 2) * size  # two passes drew tokens before the change
    assert changed.routing[:before] == plain.routing[:before]
    assert changed.routing[before : before + size] != plain.routing[before : before + size]
    assert len(changed.routing) == (len(PROMPT) + len(changed) - 1) * size
    # The cache of earlier prompts has no experts of the old weights.
    assert after.routing[: len(PROMPT) * size] != plain.routing[: len(PROMPT) * size]


# --- chains -------------------------------------------------------------------------------------


def step(
    number: int, prompt: Sequence[int], completion: Sequence[int], routing: bytes
) -> BatchStep:
    return BatchStep(
        group_id="g",
        trajectory_id="t",
        step=number,
        prompt_token_ids=int32s(prompt),
        token_ids=int32s(completion),
        image_hashes=[],
        behaviour_logprobs=float64s([-1.0] * len(completion)),
        version_spans=[],
        advantage=1.0,
        weight=1.0,
        routing=routing,
    )


def test_a_chain_has_each_token_with_the_experts_of_its_first_step() -> None:
    def routing(first: int, tokens: int) -> bytes:  # two bytes each
        return bytes(value for at in range(tokens) for value in (first + at, 9))

    one = step(0, [1, 2, 3], [4, 5], routing(10, 4))
    two = step(1, [1, 2, 3, 4, 5, 6], [7], routing(50, 6))
    three = step(2, [1, 2], [3], routing(90, 2))
    [first, second], _ = chained([one, two, three])
    assert [*first.routing[::2]] == [10, 11, 12, 13, 54, 55, 0]
    assert [*second.routing[::2]] == [90, 91, 0]

    [chain], _ = chained([replace(one, routing=b""), two])
    assert [*chain.routing[::2]] == [50, 51, 52, 53, 54, 55, 0]
    [chain], _ = chained([one, replace(two, routing=b"")])
    assert [*chain.routing] == [*routing(10, 4), 0, 0, 0, 0, 0, 0]
    [chain], _ = chained([replace(one, routing=b""), replace(two, routing=b"")])
    assert chain.routing == b""


def test_routing_that_does_not_fit_the_model_is_refused(family: Family) -> None:
    policy = load_policy(family("qwen3_vl_moe"))
    batch = play(policy, replace(TRIAL, trajectories=1, texts=0))
    [chain, *_] = batch.chains

    def refused(routing: bytes, model: LoadedPolicy = policy) -> str:
        changed = [chain.model_copy(update={"routing": routing}), *batch.chains[1:]]
        with pytest.raises(ProtocolError) as caught:
            check_batch(batch.model_copy(update={"chains": changed}), model)
        return str(caught.value)

    assert "bytes of routing" in refused(chain.routing[:-1])
    assert "an expert beyond the model's 8" in refused(bytes(len(chain.routing) - 1) + b"\x08")
    dense = load_policy(family("qwen3_vl"))
    assert "which this model is not" in refused(chain.routing, dense)


def test_only_a_mixture_records(family: Family) -> None:
    batch = play(load_policy(family("qwen3_vl")), replace(TRIAL, trajectories=1, texts=0))
    assert not any(chain.routing for chain in batch.chains)
    assert np.isfinite(batch.samples[0].behaviour_logprobs).all()
