"""Inverse transform sampling: each row's token follows from its distribution and a uniform number.

uniform_numbers   draws the numbers of a request, one for each position of its completion
sample            draws tokens from logits, with their log-probabilities and entropies
draw              draws tokens from probabilities
entropies         computes the entropies of the distributions

Every engine draws with these functions. The number at a position depends on the seed and the position alone.
So a request gets the same completion whatever else is in its batch, however often it was suspended, and
whichever engine continues it.

Values over the vocabulary are float32. A running sum of so many terms is too coarse in float32: for a flat
distribution it draws another token than float64 about once in a thousand times. For this reason tokens are
summed in groups of GROUP, and only the sums of groups, and the tokens of the one group that is drawn from,
are added up in float64.
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
"""Tokens that are summed in the precision of their probabilities. The sizes of the supported vocabularies are
multiples of it."""
PART = 1 << 24
"""Logits from which tokens are drawn at once: 64 rows of a vocabulary of 248,320. A part takes three copies in
float32, 192 MiB, beside the logits themselves."""


def uniform_numbers(seed: int, count: int) -> NDArray[np.float64]:
    """Return numbers [count] in [0, 1) for the positions of a completion (Philox, keyed by the seed)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def sample(
    values: torch.Tensor,
    uniform: Sequence[float],
    temperatures: Sequence[float],
    forbidden: torch.Tensor,
    greedy: torch.Tensor | None = None,
) -> list[DrawnToken]:
    """Draw a token from each row of logits [B, V], with numbers [B] in [0, 1) and temperatures [B].

    The `forbidden` token ids [K] have probability 0. At temperature 0 the token is taken from `greedy` [B],
    by default the likeliest one, and log-probability and entropy are those of the untempered distribution.
    Raises EngineError for logits that are not finite.
    """
    tokens: list[DrawnToken] = []
    rows = max(1, PART // values.shape[-1])
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        best = None if greedy is None else greedy[part]
        tokens += _sample(values[part], uniform[part], temperatures[part], forbidden, best)
    return tokens


def _sample(
    values: torch.Tensor,
    uniform: Sequence[float],
    temperatures: Sequence[float],
    forbidden: torch.Tensor,
    greedy: torch.Tensor | None,
) -> list[DrawnToken]:
    """Draw tokens as `sample` does, from rows that fit into one part."""
    divisor = torch.tensor(temperatures)
    is_greedy = (divisor == 0).to(values.device)
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor).to(values.device)
    logprobs = masked_logprobs(values, forbidden, divisor[:, None])
    probabilities = logprobs.exp()
    if not bool(torch.isfinite(probabilities.sum(dim=-1)).all()):
        raise EngineError("the model's logits are not numbers; are its weights finite?")
    numbers = torch.tensor(uniform, dtype=torch.float64, device=values.device)
    best = logprobs.argmax(dim=-1) if greedy is None else greedy.to(values.device)
    tokens = torch.where(is_greedy, best, draw(probabilities, numbers))
    token_logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
    row_entropies = entropies(probabilities, logprobs)
    return [
        DrawnToken(token, logprob, entropy)
        for token, logprob, entropy in zip(
            tokens.tolist(), token_logprobs.tolist(), row_entropies.tolist(), strict=True
        )
    ]


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return token ids [B] drawn from probabilities [B, V] with `uniform` [B], float64 in [0, 1).

    The probabilities need not sum to 1. A token of probability 0 is never drawn. The token of a row that is
    not finite is undefined.
    """
    # 1. Find the group that the number falls into.
    cumulative = _group_sums(probabilities).cumsum(dim=-1)  # [B, groups]
    group, goal = _first_above(cumulative, uniform)
    before = cumulative.gather(1, (group - 1).clamp(min=0)[:, None])[:, 0]
    before = torch.where(group > 0, before, 0.0)
    size = cumulative.gather(1, group[:, None])[:, 0] - before
    # 2. Find the token within the group.
    within = GROUP * group[:, None] + torch.arange(GROUP, device=group.device)  # [B, GROUP]
    inside = within < probabilities.shape[-1]
    within = within.clamp(max=probabilities.shape[-1] - 1)
    tokens = torch.where(inside, probabilities.gather(1, within).double(), 0.0)
    # The goal is a share of the group, whose sum may differ a little between the two precisions.
    last, _ = _first_above(tokens.cumsum(dim=-1), (goal - before) / size)
    return within.gather(1, last[:, None])[:, 0]


def entropies(probabilities: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the entropies [B] in nats, float64, of probabilities [B, V] and their logarithms."""
    # A forbidden token's 0 * -inf is nan; it adds 0 to the entropy.
    shares = (probabilities * logprobs).nan_to_num_(nan=0.0)
    return -_group_sums(shares).sum(dim=-1)


def _first_above(
    cumulative: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's first index in sums [B, N], float64, above `share` [B] of the total, and that goal.

    The term that was added at that index is always greater than 0.
    """
    total = cumulative[:, -1]
    goal = torch.minimum(share * total, torch.nextafter(total, 0 * total))
    index = torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0]
    return index.clamp(max=cumulative.shape[-1] - 1), goal


def _group_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums [B, ceil(V / GROUP)], float64, of consecutive groups of GROUP values [B, V]."""
    whole = values.shape[-1] // GROUP * GROUP
    groups = values[:, :whole].view(len(values), whole // GROUP, GROUP)
    sums = groups.sum(dim=-1).double()
    if whole == values.shape[-1]:
        return sums
    rest = values[:, whole:].double().sum(dim=-1, keepdim=True)
    return torch.cat([sums, rest], dim=-1)
