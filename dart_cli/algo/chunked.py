"""Log-probabilities and entropies of tokens from hidden states, without the logits of all tokens in memory.

    token_scores    hidden states, output embedding, token ids -> log-probabilities, entropies
    taught_scores   the same, and how much more likely tokens are under a teacher, on average

At a vocabulary of 152,064 the float32 logits of 15,000 completion tokens are 9 GB, and a loss keeps several
copies. Here logits are computed in blocks of `chunk_tokens` tokens by VOCABULARY_CHUNK ids and reduced at
once (running maximum and sums, arXiv 1805.02867, algorithm 3). The backward pass computes them again; it
needs only the log-sum-exp of each row. The inputs and one number for each token are saved for it.

With s the masked logits over the temperature and p their softmax, t likewise of a teacher, which has no
gradient, and g the mean of log t - log p over p, which is -KL(p || t):

    d log p_i / d s_j = [i = j] - p_j
    d g / d s_j = p_j (log t_j - log p_j - g)

The mean is over all tokens that the policy may draw, not of one that it drew, so it has no noise of the draw.
The teacher's logits are computed in the same blocks.
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
    is_forbidden = _checked(hidden, weight, token_ids, temperature, forbidden, chunk_tokens)
    logprobs, entropies, _ = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, token_ids, is_forbidden, temperature, chunk_tokens, None, None
    )
    return logprobs, entropies


def taught_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    temperature: float,
    forbidden: torch.Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `token_scores` returns, and gaps [N]: -KL(policy || teacher) of the next token, nats.

    `teacher_hidden` [N, E] are a teacher's states in the same places, and `teacher_weight` [W, E] its output
    embedding, which may have another number of rows; rows that one of them lacks must be `forbidden`. The
    temperature and the forbidden tokens are the same for both. The gaps are differentiable in `hidden` and
    `weight`, and never in what the teacher gives.

    Raises ValueError for shapes that do not fit, and for a token that may be drawn and has no row in
    `teacher_weight`.
    """
    is_forbidden = _checked(hidden, weight, token_ids, temperature, forbidden, chunk_tokens)
    if (
        teacher_hidden.ndim != 2
        or len(teacher_hidden) != len(hidden)
        or teacher_hidden.shape[1:] != teacher_weight.shape[1:]
    ):
        raise ValueError(
            f"the teacher's states {list(teacher_hidden.shape)} and weight {list(teacher_weight.shape)} must "
            f"be [{len(hidden)}, E] and [W, E]"
        )
    if not is_forbidden[len(teacher_weight) :].all():
        raise ValueError("the teacher's weight lacks rows of tokens that the policy may draw")
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        token_ids,
        is_forbidden,
        temperature,
        chunk_tokens,
        teacher_hidden.detach(),
        teacher_weight.detach(),
    )
    return scores


def _checked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    forbidden: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor:
    """Return which tokens [V] are forbidden. Raises ValueError for shapes that do not fit."""
    if hidden.ndim != 2 or token_ids.shape != hidden.shape[:1] or weight.ndim != 2:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and token_ids "
            f"{list(token_ids.shape)} must be [N, H], [V, H] and [N]"
        )
    if chunk_tokens < 1 or not temperature > 0:
        raise ValueError("chunk_tokens must be >= 1 and temperature > 0")
    is_forbidden = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    is_forbidden[forbidden] = True
    return is_forbidden


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _scaled(
    hidden: torch.Tensor, weight: torch.Tensor, is_forbidden: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the masked logits of a block, divided by the temperature, in float32 or better."""
    logits = hidden @ weight.T
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scaled.masked_fill_(is_forbidden, -math.inf).div_(temperature)


def _scaled_teacher(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    is_forbidden: torch.Tensor,
    ids: slice,
    temperature: float,
) -> torch.Tensor:
    """Return `_scaled` of the teacher for the tokens `ids`; tokens that it has no row for are forbidden."""
    part = weight[ids]
    scaled = _scaled(hidden, part, is_forbidden[ids][: len(part)], temperature)
    missing = ids.stop - ids.start - len(part)
    if not missing:
        return scaled
    return torch.cat([scaled, scaled.new_full((len(scaled), missing), -math.inf)], dim=1)


class _Scores(torch.autograd.Function):
    """`taught_scores` with a backward pass that computes the logits again; gaps are 0 without a teacher."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [N, H]
        weight: torch.Tensor,  # [V, H]
        token_ids: torch.Tensor,  # [N]
        is_forbidden: torch.Tensor,  # [V]
        temperature: float,
        chunk_tokens: int,
        teacher_hidden: torch.Tensor | None,  # [N, E]
        teacher_weight: torch.Tensor | None,  # [W, E]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        sums = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs)
        teacher_sums, gaps = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        for tokens in _blocks(len(hidden), chunk_tokens):
            rows = hidden[tokens]
            logits = logprobs.new_full((len(rows),), -math.inf)  # s of the tokens themselves
            most = torch.full_like(logits, -math.inf)
            mass = torch.zeros_like(logits)  # sum of exp(s - most)
            moment = torch.zeros_like(logits)  # sum of exp(s - most) (s - most)
            teacher_most, teacher_mass = torch.full_like(most, -math.inf), torch.zeros_like(mass)
            cross = torch.zeros_like(mass)  # sum of exp(s - most) (teacher's s - s)
            for ids in _blocks(len(weight), VOCABULARY_CHUNK):
                scaled = _scaled(rows, weight[ids], is_forbidden[ids], temperature)
                logits = _picked(scaled, token_ids[tokens], ids, logits)
                highest = torch.maximum(most, scaled.amax(dim=1))
                # All ids of a block may be forbidden, and before the first block `most` is infinite.
                shift = torch.where(highest.isinf(), 0.0, highest)
                fall = (most - shift).exp_()  # 0 before the first block
                moment = fall * (moment + torch.where(fall > 0, most - shift, 0.0) * mass)
                difference = None
                if teacher_hidden is not None and teacher_weight is not None:
                    theirs = _scaled_teacher(
                        teacher_hidden[tokens], teacher_weight, is_forbidden, ids, temperature
                    )
                    teacher_most, teacher_mass = _raised(teacher_most, teacher_mass, theirs)
                    difference = theirs.sub_(scaled).masked_fill_(is_forbidden[ids], 0.0)
                scaled -= shift[:, None]
                weights = scaled.exp()
                mass = fall * mass + weights.sum(dim=1)
                if difference is not None:
                    cross = fall * cross + difference.mul_(weights).sum(dim=1)
                    del difference, theirs
                # exp(-inf) * -inf would be nan; it counts as 0.
                moment += weights.mul_(scaled.clamp_(min=torch.finfo(dtype).min)).sum(dim=1)
                most = highest
                del scaled, weights  # freed before the next block is made
            log_mass = mass.log()
            sums[tokens] = most + log_mass
            entropies[tokens] = log_mass - moment / mass
            logprobs[tokens] = logits - sums[tokens]
            if teacher_hidden is not None:
                teacher_sums[tokens] = teacher_most + teacher_mass.log()
                gaps[tokens] = cross / mass - teacher_sums[tokens] + sums[tokens]
        ctx.save_for_backward(
            hidden,
            weight,
            token_ids,
            is_forbidden,
            sums,
            teacher_hidden,
            teacher_weight,
            None if teacher_hidden is None else teacher_sums,
            None if teacher_hidden is None else gaps,
        )
        ctx.settings = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies, gaps

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_logprobs: torch.Tensor | None,
        _of_entropies: torch.Tensor | None,
        of_gaps: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        if of_logprobs is None and of_gaps is None:
            return (None,) * 8
        hidden, weight, token_ids, is_forbidden, sums, *of_teacher = ctx.saved_tensors
        teacher_hidden, teacher_weight, teacher_sums, gaps = of_teacher
        temperature, chunk_tokens = ctx.settings
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(sums)
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
                factor = -of_logprobs[tokens, None]
                if of_gaps is not None and teacher_hidden is not None:
                    theirs = _scaled_teacher(
                        teacher_hidden[tokens], teacher_weight, is_forbidden, ids, temperature
                    )
                    # log t - log p - g of each id, then times its share of the gradient
                    theirs -= teacher_sums[tokens, None]
                    theirs -= slopes
                    theirs = theirs.masked_fill_(is_forbidden[ids], 0.0)
                    theirs -= gaps[tokens, None]
                    factor = theirs.mul_(of_gaps[tokens, None]).add_(factor)
                    del theirs
                slopes.exp_()  # probabilities, then d loss / d logits
                slopes *= factor
                del factor
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
        return result, for_weight, None, None, None, None, None, None


def _raised(
    most: torch.Tensor, mass: torch.Tensor, scaled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum and the sum of exp(s - maximum) [N] after a further block of logits s."""
    highest = torch.maximum(most, scaled.amax(dim=1))
    shift = torch.where(highest.isinf(), 0.0, highest)
    return highest, (most - shift).exp() * mass + (scaled - shift[:, None]).exp().sum(dim=1)


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
