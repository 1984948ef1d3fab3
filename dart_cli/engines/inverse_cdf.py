"""One token per row, from log-probabilities and a uniform number each.

uniforms   the numbers of a request, one for each place of its completion
draw       the inverse of the cumulative distribution at them
entropies  of the same distributions

An engine that draws like this draws the same completion whatever rides along, however often it was
suspended, and wherever it goes on: the number at a place depends on the seed and the place alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def uniforms(seed: int, places: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) for each place [places] of a completion (Philox, keyed by the seed)."""
    return np.random.Generator(np.random.Philox(seed)).random(places)


def draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B] drawn from log-probabilities [B, V] by `uniform` [B], float64 in [0, 1).

    A token of probability 0 is never drawn. Where a row is not finite its token means nothing.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the draw: its own is then > 0.
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return drawn.clamp(max=logprobs.shape[-1] - 1)


def entropies(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropies [B] in nats, float32, of log-probabilities [B, V]."""
    wide = logprobs.double()
    probabilities = wide.exp()
    # A forbidden token's 0 * -inf would be nan; its share of the entropy is 0.
    shares = torch.where(probabilities > 0, probabilities * wide, 0.0)
    return -shares.sum(dim=-1).float()
