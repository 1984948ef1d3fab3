"""Importance weights for tokens that other weights sampled; no gradient.

    importance_weights     from the log-ratio of proximal to behaviour probability
    demonstration_weights  for tokens whose behaviour probability is unknown
    sequence_sums          sums over samples, at each of their tokens
    clamp_log_ratio        a log-ratio that every precision can exponentiate, square and sum

Axes: `[N]` tokens, the completion tokens of `[S]` samples one after another; a sequence is one
sample's completion, that is one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dart_cli.algo.objective import LOG_RATIO_LIMIT, Objective


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of tokens, and which bounds applied."""

    raw: torch.Tensor  # [N], before any bound
    used: torch.Tensor  # [N], what the loss is multiplied by
    truncated: torch.Tensor  # [N], bool: raw > C
    masked: torch.Tensor  # [N], bool: outside the mask's range, so the weight is 0


def importance_weights(
    drift: torch.Tensor, lengths: Sequence[int], objective: Objective
) -> ImportanceWeights:
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
    raw = clamp_log_ratio(drift).exp()
    used = torch.ones_like(raw)
    truncated = masked = torch.zeros_like(raw, dtype=torch.bool)
    if kind in ("truncated", "sequence"):
        truncated = raw > objective.is_cap
        used = raw.clamp(max=objective.is_cap)
    elif kind == "masked":
        masked = (raw < objective.mask_low) | (raw > objective.mask_high)
        used = torch.where(masked, 0.0, raw)
    return ImportanceWeights(raw, used, truncated, masked)


def demonstration_weights(proximal: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Weights [N] of tokens whose behaviour policy is unknown, from their log-probabilities [N].

        cloned    w = 1
        shaped    w = gamma p / (p + gamma)^2,  p = exp(proximal)

    For a demonstrator that is certain of its tokens (behaviour probability 1) the exact importance
    weight is p, which vanishes where the policy has most to learn. Neither of the two is exact:

    - `cloned`: no correction, so a demonstration's gradient is its advantage times that of
      behaviour cloning, A grad log p, as the demonstrations' term in DAPG's augmented loss (arXiv
      1709.10087). It pulls towards the demonstrator's actions however improbable they are.
    - `shaped`: the weight whose gradient is that of LUFFY's ratio p / (p + gamma) (arXiv 2504.14945
      section 3.2): it is greatest, 1/4, at p = gamma, falls as p / gamma below, and as gamma / p
      above, where the action has been learned.

    Never more than 1, the weight of a fresh token.
    """
    if objective.demonstrations == "cloned":
        return torch.ones_like(proximal)
    gamma, probability = objective.demonstration_gamma, proximal.exp()
    return gamma * probability / (probability + gamma).square()


def sequence_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """At each token [N] the sum over its sample's tokens; `lengths` [S] sum to N.

    Uses slices, not index_add, whose order of addition on a GPU changes from run to run.
    """
    parts = torch.split(values, list(lengths)) if len(lengths) else (values,)
    return torch.cat([part.sum().expand_as(part) for part in parts])


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to +-LOG_RATIO_LIMIT; beyond it the gradient is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
