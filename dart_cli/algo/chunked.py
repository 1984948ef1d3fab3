"""Log-probabilities and entropies of tokens from hidden states, without the logits of all tokens in memory.

    token_scores   hidden states, output embedding, token ids -> log-probabilities, entropies

At a vocabulary of 152,064 the float32 logits of 15,000 completion tokens are 9 GB, and a loss keeps several
copies. Here logits are computed in blocks of `chunk_tokens` tokens by VOCABULARY_CHUNK ids and reduced at
once (running maximum and sums, arXiv 1805.02867, algorithm 3). The backward pass computes them again; it
needs only the log-sum-exp of each row. The inputs and one number for each token are saved for it.

With s the masked logits over the temperature and p their softmax:

    d log p_i / d s_j = [i = j] - p_j
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dart_cli.algo.memory_bounds import CHUNK_TOKENS, VOCABULARY_CHUNK


def token_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float,
    forbidden: torch.Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [N] and entropies [N], nats, of the distributions that are sampled from.

    `hidden` [N, H] are the states that predict `token_ids` [N], `weight` [V, H] the output embedding,
    both of one dtype; `forbidden` token ids [K] have probability 0; `temperature` divides the logits;
    `chunk_tokens` >= 1 bounds the tokens of a block. The results equal `masked_logprobs` of
    `hidden @ weight.T` (policy/forward.py), in float32 or better. The log-probabilities are
    differentiable in `hidden` and `weight`, the entropies are not.

    Logits have the model's dtype before they are widened, as in the engine. Gradients of a bfloat16
    `hidden` or `weight` are summed over blocks in float32 and rounded once, because a sum of a hundred blocks
    in eight bits would lose small terms. For `weight` the float32 sum takes the memory of one block's rows,
    not of a second [V, H].

    Raises ValueError for shapes that do not fit.
    """
    if hidden.ndim != 2 or token_ids.shape != hidden.shape[:1] or weight.ndim != 2:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and token_ids "
            f"{list(token_ids.shape)} must be [N, H], [V, H] and [N]"
        )
    if chunk_tokens < 1 or not temperature > 0:
        raise ValueError("chunk_tokens must be >= 1 and temperature > 0")
    is_forbidden = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    is_forbidden[forbidden] = True
    logprobs, entropies = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, token_ids, is_forbidden, temperature, chunk_tokens
    )
    return logprobs, entropies


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _scaled(
    hidden: torch.Tensor, weight: torch.Tensor, is_forbidden: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the masked logits of a block, divided by the temperature, in float32 or better."""
    logits = hidden @ weight.T
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scaled.masked_fill_(is_forbidden, -math.inf).div_(temperature)


class _Scores(torch.autograd.Function):
    """`token_scores` with a backward pass that computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [N, H]
        weight: torch.Tensor,  # [V, H]
        token_ids: torch.Tensor,  # [N]
        is_forbidden: torch.Tensor,  # [V]
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        sums = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs)
        for tokens in _blocks(len(hidden), chunk_tokens):
            rows = hidden[tokens]
            logits = logprobs.new_full((len(rows),), -math.inf)  # s of the tokens themselves
            most = torch.full_like(logits, -math.inf)
            mass = torch.zeros_like(logits)  # sum of exp(s - most)
            moment = torch.zeros_like(logits)  # sum of exp(s - most) (s - most)
            for ids in _blocks(len(weight), VOCABULARY_CHUNK):
                scaled = _scaled(rows, weight[ids], is_forbidden[ids], temperature)
                logits = _picked(scaled, token_ids[tokens], ids, logits)
                highest = torch.maximum(most, scaled.amax(dim=1))
                # All ids of a block may be forbidden, and before the first block `most` is infinite.
                shift = torch.where(highest.isinf(), 0.0, highest)
                fall = (most - shift).exp_()  # 0 before the first block
                moment = fall * (moment + torch.where(fall > 0, most - shift, 0.0) * mass)
                scaled -= shift[:, None]
                weights = scaled.exp()
                mass = fall * mass + weights.sum(dim=1)
                # exp(-inf) * -inf would be nan; it counts as 0.
                moment += weights.mul_(scaled.clamp_(min=torch.finfo(dtype).min)).sum(dim=1)
                most = highest
                del scaled, weights  # freed before the next block is made
            log_mass = mass.log()
            sums[tokens] = most + log_mass
            entropies[tokens] = log_mass - moment / mass
            logprobs[tokens] = logits - sums[tokens]
        ctx.save_for_backward(hidden, weight, token_ids, is_forbidden, sums)
        ctx.settings = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, _of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if of_logprobs is None:
            return (None,) * 6
        hidden, weight, token_ids, is_forbidden, sums = ctx.saved_tensors
        temperature, chunk_tokens = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        for_hidden = torch.zeros_like(hidden, dtype=sums.dtype) if needs_hidden else None
        for_weight = torch.empty_like(weight) if needs_weight else None
        for ids in _blocks(len(weight), VOCABULARY_CHUNK):
            part = weight[ids]
            for_part = torch.zeros_like(part, dtype=sums.dtype)
            for tokens in _blocks(len(hidden), chunk_tokens):
                rows = hidden[tokens]
                slopes = _scaled(rows, part, is_forbidden[ids], temperature)
                slopes -= sums[tokens, None]
                slopes.exp_()  # probabilities, then d loss / d logits
                slopes *= -of_logprobs[tokens, None]
                _add_at(slopes, token_ids[tokens], ids, of_logprobs[tokens])
                slopes = slopes.div_(temperature).masked_fill_(is_forbidden[ids], 0.0)
                slopes = slopes.to(hidden.dtype)
                if for_hidden is not None:
                    for_hidden[tokens] += slopes @ part
                if for_weight is not None:
                    for_part += slopes.T @ rows
                del slopes  # freed before the next block is made
            if for_weight is not None:
                for_weight[ids] = for_part
        result = None if for_hidden is None else for_hidden.to(hidden.dtype)
        return result, for_weight, None, None, None, None


def _inside(token_ids: torch.Tensor, ids: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens [N] are among `ids`, and the column of each (0 for the others)."""
    inside = (token_ids >= ids.start) & (token_ids < ids.stop)
    return inside, torch.where(inside, token_ids - ids.start, 0)


def _picked(
    scaled: torch.Tensor, token_ids: torch.Tensor, ids: slice, otherwise: torch.Tensor
) -> torch.Tensor:
    """Return the values [N] of the tokens among `ids`, and of `otherwise` for the other tokens."""
    inside, columns = _inside(token_ids, ids)
    return torch.where(inside, scaled.gather(1, columns[:, None])[:, 0], otherwise)


def _add_at(
    slopes: torch.Tensor, token_ids: torch.Tensor, ids: slice, values: torch.Tensor
) -> None:
    """Add `values` [N] to `slopes` at the tokens among `ids`."""
    inside, columns = _inside(token_ids, ids)
    slopes.scatter_add_(1, columns[:, None], torch.where(inside, values, 0.0)[:, None])
