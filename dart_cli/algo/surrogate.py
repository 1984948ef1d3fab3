"""The surrogate objective: the probability ratio of a token times its advantage, bounded.

With r = exp(p - q), p the policy's and q the old policy's log-probability of a token, A its
advantage, clip(x) = x clamped to [1 - clip_low, 1 + clip_high]:

    grpo    min(r A, clip(r) A); where A < 0 and dual_clip = c > 0 at least c A
    gspo    the same with s = (product of r over the sample)^(1 / its tokens) instead of r
    cispo   stop_gradient(clip(r)) A p

The clip is pessimistic in the first two: a clipped token has no gradient. CISPO keeps every token's
gradient and bounds its weight. While p = q all three have the gradient A * grad p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dart_cli.algo.correction import clamp_log_ratio, sequence_sums
from dart_cli.algo.objective import Objective


@dataclass(frozen=True)
class Surrogate:
    """The maximised value of each token."""

    value: torch.Tensor  # [N], with gradient
    ratio: torch.Tensor  # [N], r, or s with gspo
    clipped: torch.Tensor  # [N], bool: the bound stopped the gradient, or bounded cispo's weight


def surrogate(
    policy: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    objective: Objective,
) -> Surrogate:
    """The formulas above for tokens [N] of samples of `lengths` [S].

    `policy` and `old` are log-probabilities, equal where `mask` (bool) is false: such tokens do not
    count in a sample's mean.

    - grpo: PPO's clip (arXiv 1707.06347 eq. 7), with two bounds (DAPO's clip-higher, arXiv
      2503.14476 eq. 8); the dual clip is arXiv 1912.09729's.
    - gspo: arXiv 2507.18071 eq. 5 to 7, in its token form (eq. 13, 14): a token's gradient goes
      through its own p, so that a correction can weigh tokens of a sample apart.
    - cispo: arXiv 2506.13585 eq. 4, 5.
    """
    if objective.objective == "gspo":
        tokens = sequence_sums(mask.to(policy.dtype), lengths).clamp(min=1)
        mean = sequence_sums((policy - old).detach(), lengths) / tokens
        ratio = clamp_log_ratio(mean + (policy - policy.detach())).exp()
    else:
        ratio = clamp_log_ratio(policy - old).exp()
    clipped_ratio = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    if objective.objective == "cispo":
        clipped_ratio = clipped_ratio.detach()
        return Surrogate(clipped_ratio * advantages * policy, ratio, clipped_ratio != ratio)
    unclipped, clipped_value = ratio * advantages, clipped_ratio * advantages
    value, clipped = torch.minimum(unclipped, clipped_value), clipped_value < unclipped
    if objective.dual_clip > 0:
        least = objective.dual_clip * advantages
        stopped = (advantages < 0) & (value < least)
        value, clipped = torch.where(stopped, least, value), clipped | stopped
    return Surrogate(value, ratio, clipped)
