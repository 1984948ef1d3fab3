"""What a token weighs that other weights sampled: importance weights, no gradient.

    importance      weights of tokens from their log-ratio of proximal to behaviour
    demonstrated    weights of tokens that nobody knows how likely they were to be written
    sequence_sums   sums over samples, at each of their tokens
    limited         a log-ratio that every precision can exponentiate, square and sum

Axes: `[N]` tokens, the completion tokens of `[S]` samples one after another; a sequence is one
sample's completion, that is one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dart_cli.algo.objective import Objective

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20: e^20 still is a number that float32 can square and sum."""


@dataclass(frozen=True)
class Importance:
    """Weights of tokens, and what became of them."""

    raw: torch.Tensor  # [N], before any bound
    used: torch.Tensor  # [N], what the loss is multiplied with
    truncated: torch.Tensor  # [N], bool: raw > C
    masked: torch.Tensor  # [N], bool: outside the mask's range, so of weight 0


def importance(drift: torch.Tensor, lengths: Sequence[int], objective: Objective) -> Importance:
    """Weights for log-ratios `drift` [N] = proximal - behaviour of samples of `lengths` [S].

    - `truncated`: min(e^drift, C) of each token (arXiv 2509.23866 section 3).
    - `sequence`: min(e^(sum of drift over the sample), C), at each of its tokens; `raw` is the
      sample's too.
    - `masked`: e^drift within [mask_low, mask_high], ends included, else 0 (IcePop).
    - `none`, `ratio`: 1; `raw` is e^drift, for the statistics.
    """
    kind = objective.correction
    if kind == "sequence":
        drift = sequence_sums(drift, lengths)
    raw = limited(drift).exp()
    used = torch.ones_like(raw)
    truncated = masked = torch.zeros_like(raw, dtype=torch.bool)
    if kind in ("truncated", "sequence"):
        truncated = raw > objective.is_cap
        used = raw.clamp(max=objective.is_cap)
    elif kind == "masked":
        masked = (raw < objective.mask_low) | (raw > objective.mask_high)
        used = torch.where(masked, 0.0, raw)
    return Importance(raw, used, truncated, masked)


def demonstrated(proximal: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Weights [N] of tokens whose behaviour policy is unknown, from their log-probabilities [N].

        cloned    w = 1
        shaped    w = gamma p / (p + gamma)^2,  p = exp(proximal)

    A demonstrator that is certain of its tokens (behaviour probability 1) has the importance weight
    p: exact, and nothing where the policy has most to learn. Neither of the two is that.

    - `cloned`: no correction, so a demonstration's gradient is its advantage times that of
      behaviour cloning, A grad log p, as the demonstrations' term in DAPG's augmented loss (arXiv
      1709.10087). It asks for the demonstrator's actions however improbable they are.
    - `shaped`: the weight whose gradient is that of LUFFY's ratio p / (p + gamma) (arXiv 2504.14945
      section 3.2): it is greatest, 1/4, at p = gamma, falls as p / gamma below, and lets go of what
      has been learned, as gamma / p.

    Never more than a fresh token's weight, 1.
    """
    if objective.demonstrations == "cloned":
        return torch.ones_like(proximal)
    gamma, probability = objective.demonstration_gamma, proximal.exp()
    return gamma * probability / (probability + gamma).square()


def sequence_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """At each token [N] the sum over its sample's tokens; `lengths` [S] sum to N.

    By slices and not by index_add, whose order of addition on a GPU changes from run to run.
    """
    parts = torch.split(values, list(lengths)) if len(lengths) else (values,)
    return torch.cat([part.sum().expand_as(part) for part in parts])


def limited(log_ratio: torch.Tensor) -> torch.Tensor:
    """Held within +-LOG_RATIO_LIMIT; beyond it there is no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
