"""Inverse transform sampling: one token per row from its distribution and a uniform number.

uniform_numbers   the numbers of a request, one for each position of its completion
draw              the inverse of the cumulative distribution at them
entropies         of the same distributions

Every engine draws with these functions. The number at a position depends on the seed and the
position alone, so a request gets the same completion whatever else is in its batch, however often
it was suspended, and whichever engine continues it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def uniform_numbers(seed: int, count: int) -> NDArray[np.float64]:
    """Numbers [count] in [0, 1) for the positions of a completion (Philox, keyed by the seed)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B] drawn from float64 probabilities [B, V] by `uniform` [B], float64 in [0, 1).

    A token of probability 0 is never drawn. The token of a row that is not finite is undefined.
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the number: its own is then > 0.
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return drawn.clamp(max=probabilities.shape[-1] - 1)


def entropies(probabilities: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Entropies [B] in nats, float64, of float64 probabilities [B, V] and their logarithms."""
    # A forbidden token's 0 * -inf would be nan; it adds 0 to the entropy.
    shares = torch.where(probabilities > 0, probabilities * logprobs.double(), 0.0)
    return -shares.sum(dim=-1)
