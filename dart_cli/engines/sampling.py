"""Tokens sampled from logits, each with the numbers that the trainer needs.

A token depends on its row's logits and on the uniform number at its position in the completion
(inverse_cdf.py), not on the rest of the batch or on how often the completion was suspended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bus.errors import EngineError
from dart_cli.engines.inverse_cdf import draw, entropies
from dart_cli.policy.forward import masked_logprobs


@dataclass(frozen=True)
class DrawnTokens:
    """One token for each row [B] of a batch."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of the distribution sampled from
    entropies: list[float]  # nats, of the same distribution


def sample(
    values: torch.Tensor,
    uniform: Sequence[float],
    temperatures: Sequence[float],
    forbidden: torch.Tensor,
) -> DrawnTokens:
    """Sample from logits [B, V] with one number [B] in [0, 1) and one temperature [B] per row.

    `forbidden` token ids [K] have probability 0. Temperature 0 takes the likeliest token and
    returns the numbers of the untempered distribution. Raises EngineError for logits that are not
    finite.
    """
    given = torch.tensor(temperatures)
    is_greedy = (given == 0).to(values.device)
    divisor = torch.where(given == 0, torch.ones_like(given), given).to(values.device)
    logprobs = masked_logprobs(values, forbidden, divisor[:, None])
    probabilities = logprobs.exp()
    if not bool(torch.isfinite(probabilities.sum(dim=-1)).all()):
        raise EngineError("the model's logits are not numbers; are its weights finite?")
    numbers = torch.tensor(uniform, dtype=torch.float64, device=values.device)
    drawn = torch.where(is_greedy, logprobs.argmax(dim=-1), draw(probabilities, numbers))
    picked = logprobs.gather(1, drawn[:, None])[:, 0]
    return DrawnTokens(drawn.tolist(), picked.tolist(), entropies(probabilities, logprobs).tolist())
