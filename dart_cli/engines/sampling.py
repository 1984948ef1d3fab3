"""Inverse transform sampling: one token per row from its distribution and a uniform number.

uniform_numbers   the numbers of a request, one for each position of its completion
sample            logits -> tokens with the numbers that the trainer needs
draw              the inverse of the cumulative distribution at uniform numbers
entropies         of the same distributions

Every engine draws with these functions. The number at a position depends on the seed and the
position alone, so a request gets the same completion whatever else is in its batch, however often
it was suspended, and whichever engine continues it.

Over the vocabulary all is float32. A running sum of so many terms is too coarse in it: it draws another
token than float64 about once in a thousand times where the distribution is flat. So tokens are summed by
groups of GROUP; the groups are summed in float64, and so are the tokens of the one group that is drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import EngineError
from dart_cli.engines.completions import DrawnToken
from dart_cli.policy.forward import masked_logprobs

GROUP = 32
"""Tokens that are summed in the precision of their probabilities. The vocabularies of the supported
families are multiples of it."""


def uniform_numbers(seed: int, count: int) -> NDArray[np.float64]:
    """Numbers [count] in [0, 1) for the positions of a completion (Philox, keyed by the seed)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def sample(
    values: torch.Tensor,
    uniform: Sequence[float],
    temperatures: Sequence[float],
    forbidden: torch.Tensor,
    greedy: torch.Tensor | None = None,
) -> list[DrawnToken]:
    """Sample from logits [B, V] with one number [B] in [0, 1) and one temperature [B] per row.

    `forbidden` token ids [K] have probability 0. Temperature 0 takes `greedy` [B], by default the
    likeliest token, and returns the numbers of the untempered distribution. Raises EngineError for logits
    that are not finite.
    """
    given = torch.tensor(temperatures)
    is_greedy = (given == 0).to(values.device)
    divisor = torch.where(given == 0, torch.ones_like(given), given).to(values.device)
    logprobs = masked_logprobs(values, forbidden, divisor[:, None])
    probabilities = logprobs.exp()
    if not bool(torch.isfinite(probabilities.sum(dim=-1)).all()):
        raise EngineError("the model's logits are not numbers; are its weights finite?")
    numbers = torch.tensor(uniform, dtype=torch.float64, device=values.device)
    best = logprobs.argmax(dim=-1) if greedy is None else greedy.to(values.device)
    drawn = torch.where(is_greedy, best, draw(probabilities, numbers))
    picked = logprobs.gather(1, drawn[:, None])[:, 0]
    columns = drawn.tolist(), picked.tolist(), entropies(probabilities, logprobs).tolist()
    return [DrawnToken(*each) for each in zip(*columns, strict=True)]


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B] drawn from probabilities [B, V] by `uniform` [B], float64 in [0, 1).

    The probabilities need not sum to 1. A token of probability 0 is never drawn. The token of a row that
    is not finite is undefined.
    """
    cumulative = _group_sums(probabilities).cumsum(dim=-1)  # [B, groups]
    group, goal = _first_above(cumulative, uniform)
    before = cumulative.gather(1, (group - 1).clamp(min=0)[:, None])[:, 0]
    before = torch.where(group > 0, before, 0.0)
    size = cumulative.gather(1, group[:, None])[:, 0] - before
    within = GROUP * group[:, None] + torch.arange(GROUP, device=group.device)  # [B, GROUP]
    inside = within < probabilities.shape[-1]
    within = within.clamp(max=probabilities.shape[-1] - 1)
    tokens = torch.where(inside, probabilities.gather(1, within).double(), 0.0)
    # As a share of the group: its sum in the other precision may be a little more or less.
    last, _ = _first_above(tokens.cumsum(dim=-1), (goal - before) / size)
    return within.gather(1, last[:, None])[:, 0]


def entropies(probabilities: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Entropies [B] in nats, float64, of probabilities [B, V] and their logarithms."""
    # A forbidden token's 0 * -inf is nan; it adds 0 to the entropy.
    shares = (probabilities * logprobs).nan_to_num_(nan=0.0)
    return -_group_sums(shares).sum(dim=-1)


def _first_above(
    cumulative: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of sums [B, N], float64: the first above `share` [B] of its total, and that number.

    What was added there is then > 0.
    """
    total = cumulative[:, -1]
    goal = torch.minimum(share * total, torch.nextafter(total, 0 * total))
    found = torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1), goal


def _group_sums(values: torch.Tensor) -> torch.Tensor:
    """[B, V] -> sums [B, ceil(V / GROUP)], float64, of each GROUP after one another."""
    whole = values.shape[-1] // GROUP * GROUP
    groups = values[:, :whole].view(len(values), whole // GROUP, GROUP)
    sums = groups.sum(dim=-1).double()
    if whole == values.shape[-1]:
        return sums
    rest = values[:, whole:].double().sum(dim=-1, keepdim=True)
    return torch.cat([sums, rest], dim=-1)
