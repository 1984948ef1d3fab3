"""What an engine's numbers must be: those of one forward pass without a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.caches import empty_cache
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import (
    ModelInputs,
    image_features,
    last_hidden,
    logits,
    masked_logprobs,
    vocabulary_logits,
)
from dart_cli.policy.loader import LoadedPolicy, weight_tensors
from dart_cli.policy.state_plan import StateShape

Weights = dict[str, torch.Tensor]


def rounding(policy: LoadedPolicy) -> float:
    """The largest difference of log-probabilities, in nats, that sums in another order may make in float32.

    A state adds up the rounding of all tokens before, which differs between the rule in chunks and the one token
    by token. Up to 2.2e-5 was measured on the random models here; a fault makes a hundred times as much.
    """
    return 1e-5 if StateShape.of(policy.model) is None else 5e-5


@torch.inference_mode()
def fresh_numbers(
    policy: LoadedPolicy,
    request: GenerateRequest,
    token_ids: list[int],
    temperature: float,
    patches: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [A] and entropies [A] of the policy as it is now."""
    inputs = policy.inputs([request.prompt_token_ids + token_ids], [request.images])
    hidden = last_hidden(policy.model, inputs, last=len(token_ids) + 1)[0, :-1]
    values = vocabulary_logits(policy.model, hidden)
    logprobs = masked_logprobs(values, policy.forbidden(values.device), temperature)
    picked, entropies = _picked(logprobs, torch.tensor(token_ids))
    for position, patch in enumerate(patches):
        if patch >= 0:
            scores = pointer_logits(policy, request, hidden[position])[None] / temperature
            pair = _picked(scores.log_softmax(dim=-1), torch.tensor([patch]))
            picked[position], entropies[position] = pair[0][0], pair[1][0]
    for position, token in enumerate(token_ids):
        if policy.pointer is not None and token == policy.pointer.pad:
            picked[position] = entropies[position] = 0.0  # it follows from `start`
    return picked, entropies


def _picked(logprobs: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    finite = logprobs.masked_fill(logprobs.isinf(), 0.0)
    entropies = -(logprobs.exp() * finite).sum(dim=-1)
    return logprobs.gather(1, chosen[:, None])[:, 0], entropies


def pointer_logits(
    policy: LoadedPolicy, request: GenerateRequest, hidden: torch.Tensor
) -> torch.Tensor:
    """Logits [P] of the patches of the last screenshot, for the hidden state [H] of a `pad`."""
    last = policy.images.prepare(request.images[-1])
    assert policy.pointer_head is not None
    visual = image_features(policy.model, [last]).embeds[0]
    return policy.pointer_head(visual, hidden[None])[0]  # type: ignore[no-any-return]


def largest_error(
    policy: LoadedPolicy,
    request: GenerateRequest,
    generation: Generation,
    versions: list[Weights],
    temperature: float = 1.0,
) -> float:
    """Largest difference of any number of a completion from its version's fresh forward pass."""
    worst = 0.0
    for span in generation.sampled.version_spans:
        put(policy, versions[span.version])
        fresh = fresh_numbers(policy, request, generation.sampled.token_ids, temperature)
        told = generation.sampled.behaviour_logprobs, generation.sampled.entropies
        for numbers, expected in zip(told, fresh, strict=True):
            difference = torch.tensor(numbers) - expected
            worst = max(worst, float(difference[span.start : span.end].abs().max()))
    return worst


@torch.inference_mode()
def replayed_logprobs(
    policy: LoadedPolicy,
    request: GenerateRequest,
    generation: Generation,
    versions: list[Weights],
) -> list[float]:
    """Log-probabilities [A] of a completion over one cache that every version adds to in turn."""
    by_token = [
        span.version
        for span in generation.sampled.version_spans
        for _ in range(span.start, span.end)
    ]
    cache = empty_cache(policy.model)
    inputs = policy.inputs([request.prompt_token_ids], [request.images])
    mask, position, found = inputs.attention_mask, inputs.next_position, []
    for token, version in zip(generation.sampled.token_ids, by_token, strict=True):
        put(policy, versions[version])
        values = logits(policy.model, inputs, last=1, cache=cache)[0, 0]
        logprobs = masked_logprobs(values, policy.forbidden(values.device), 1.0)
        found.append(float(logprobs[token]))
        mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
        inputs = ModelInputs(
            input_ids=torch.tensor([[token]]),
            attention_mask=mask,
            position_ids=position[None, :, None].expand(3, -1, -1),
            next_position=position + 1,
            images=(),
            image_order=(),
        )
        position = position + 1
    return found


def drawn_by_transformers(
    policy: LoadedPolicy, requests: list[GenerateRequest]
) -> list[Generation]:
    """The completions that the transformers engine gives, of requests asked at once."""

    async def drawn() -> list[Generation]:
        engine = TransformersEngine(policy)
        try:
            return await asyncio.gather(*(engine.generate(request) for request in requests))
        finally:
            await engine.close()

    return asyncio.run(drawn())


def random_versions(policy: LoadedPolicy, count: int) -> list[Weights]:
    """The policy's weights, and others, each a little away from the one before."""
    generator = torch.Generator().manual_seed(0)
    versions = [{name: t.clone() for name, t in weight_tensors(policy.model).items()}]
    while len(versions) < count:
        versions.append(
            {
                name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in versions[-1].items()
            }
        )
    return versions


def put(policy: LoadedPolicy, tensors: Weights) -> None:
    """Let the policy have these weights."""
    for name, tensor in weight_tensors(policy.model).items():
        tensor.copy_(tensors[name])
