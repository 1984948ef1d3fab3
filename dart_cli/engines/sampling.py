"""Tokens drawn from logits, each with the numbers the trainer needs.

    uniforms   the numbers a request is drawn with: a Philox stream of its own, keyed by its seed
    draw       inverse of the cumulative distribution, one uniform number per row

A token depends on its row's logits and on the number at its place in the completion: neither what
rides along nor how often the completion was suspended before is any matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import EngineError
from bus.messages import Sampling
from dart_cli.policy.forward import masked_logprobs


@dataclass(frozen=True)
class DrawnTokens:
    """One token for each row [B] of a batch."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of the distribution drawn from
    entropies: list[float]  # nats, of the same


def uniforms(sampling: Sampling) -> NDArray[np.float64]:
    """The uniform numbers [max_tokens] in [0, 1) of one completion."""
    return np.random.Generator(np.random.Philox(sampling.seed)).random(sampling.max_tokens)


def draw(
    values: torch.Tensor,
    uniform: Sequence[float],
    temperatures: Sequence[float],
    forbidden: torch.Tensor,
) -> DrawnTokens:
    """Draw from logits [B, V] with one number [B] in [0, 1) and one temperature [B] per row.

    `forbidden` token ids [K] have probability 0. Temperature 0 takes the likeliest token and tells
    the numbers of the untempered distribution. Raises EngineError for logits that are no numbers.
    """
    given = torch.tensor(temperatures)
    is_greedy = (given == 0).to(values.device)
    divisor = torch.where(given == 0, torch.ones_like(given), given).to(values.device)
    logprobs = masked_logprobs(values, forbidden, divisor[:, None])
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise EngineError("the model's logits are not numbers; are its weights finite?")
    numbers = torch.tensor(uniform, dtype=torch.float64, device=values.device)[:, None]
    # The first token whose cumulative probability exceeds the draw: its own is then > 0.
    goal = torch.minimum(numbers * total, torch.nextafter(total, 0 * total))
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    drawn = torch.where(is_greedy, logprobs.argmax(dim=-1), drawn)
    picked = logprobs.gather(1, drawn[:, None])[:, 0]
    # A forbidden token's 0 * -inf would be nan; its share of the entropy is 0.
    shares = torch.where(probabilities > 0, probabilities * logprobs.double(), 0.0)
    return DrawnTokens(drawn.tolist(), picked.tolist(), (-shares.sum(dim=-1)).tolist())
