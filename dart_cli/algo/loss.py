"""The whole objective: step-wise policy gradient with importance sampling.

    policy_loss   a pack's share of the batch's loss, and its token statistics
    TokenStats    sums over tokens; those of two packs add up to those of both

For a token with policy, proximal and behaviour log-probabilities p, q, b and advantage A:

    loss = - w * surrogate(p, q, A) + kl_beta * min(k3(p, ref), 10) - entropy_coef * H

with the weight w of correction.py, without gradient, and the surrogate of surrogate.py. By default
they are DART's (arXiv 2509.23866 section 3): w = min(exp(q - b), C) and, with r = exp(p - q),
min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). A demonstration's token, whose b is unknown, has the
weight of `demonstration_weights` instead, and is left out of the statistics of w.

Axes: `[N]` tokens, the completion tokens of `[S]` samples one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from dart_cli.algo.correction import clamp_log_ratio, demonstration_weights, importance_weights
from dart_cli.algo.objective import K3_LIMIT, Objective
from dart_cli.algo.surrogate import surrogate


@dataclass(frozen=True)
class TokenStats:
    """Detached scalars that describe some tokens; `+` joins two sets of tokens."""

    tokens: torch.Tensor  # count of tokens
    sampled: torch.Tensor  # count of those whose behaviour policy is known
    loss: torch.Tensor  # this part of the batch's loss
    ratio: torch.Tensor  # sum of r
    clipped: torch.Tensor  # count of tokens whose gradient the clip stopped
    weight: torch.Tensor  # sum of w before any bound
    weight_squared: torch.Tensor
    used: torch.Tensor  # sum of w as used in the loss
    demonstrated: torch.Tensor  # sum of the other tokens' weights
    truncated: torch.Tensor  # count of tokens with w bounded by C
    masked: torch.Tensor  # count of tokens with w = 0 because it was out of range
    mismatch_kl: torch.Tensor  # sum of k3(behaviour, proximal), nats
    entropy: torch.Tensor  # sum of policy entropies, nats
    reference_kl: torch.Tensor  # sum of k3(policy, reference), each at most 10 nats
    mismatch_max: torch.Tensor  # largest |q - b|, nats

    def __add__(self, other: TokenStats) -> TokenStats:
        joined = {
            part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)
        }
        joined["mismatch_max"] = torch.maximum(self.mismatch_max, other.mismatch_max)
        return TokenStats(**joined)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by metric name; `ess` is a fraction of the token count.

        Statistics of importance weights are over the tokens that have one.
        """
        count = max(1.0, self.tokens.item())
        sampled = max(1.0, self.sampled.item())
        others = self.tokens.item() - self.sampled.item()
        squared = self.weight_squared.item()
        return {
            "loss": self.loss.item(),
            "ratio_mean": self.ratio.item() / count,
            "clip_fraction": self.clipped.item() / count,
            "is_weight_mean": self.weight.item() / sampled,
            "is_used_mean": self.used.item() / sampled,
            "is_truncated_fraction": self.truncated.item() / sampled,
            "is_masked_fraction": self.masked.item() / sampled,
            "ess": self.weight.item() ** 2 / (sampled * squared) if squared > 0 else 0.0,
            "mismatch_kl": self.mismatch_kl.item() / sampled,
            "mismatch_max": self.mismatch_max.item(),
            "entropy": self.entropy.item() / count,
            "reference_kl": self.reference_kl.item() / count,
            "demonstrated_fraction": others / count,
            "demonstrated_weight_mean": self.demonstrated.item() / max(1.0, others),
        }


@dataclass(frozen=True)
class LossOutput:
    """What a pack adds to the batch's loss."""

    loss: torch.Tensor  # scalar with gradient; the batch's loss is the sum over its packs
    stats: TokenStats


def policy_loss(
    policy_logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    objective: Objective,
    *,
    lengths: Sequence[int],
    divisor: float,
    unknown: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> LossOutput:
    """This pack's share of the objective in the module's docstring.

    All tensors are [N], of samples with `lengths` [S] that sum to N; log-probabilities and
    entropies in nats, of the distribution sampled from (forbidden tokens and temperature
    included). Where `unknown` (bool) is set, the behaviour log-probability is not read.
    `weights` multiply each token's loss, 0 masks it out of loss and statistics; the sum is divided by
    `divisor`, the whole batch's (normalise.py). Gradients flow to `policy_logprobs` and, where
    `entropy_coef` > 0, to `entropies`.

    The KL is the k3 estimator exp(d) - 1 - d, d = reference - policy (J. Schulman, "Approximating
    KL divergence"), clamped to at most K3_LIMIT: beyond it, for d outside [-11, 2.611], a token's KL
    has no gradient, so that one token cannot make up an update. Raises ValueError for a KL
    without reference or a bonus without entropies.
    """
    if objective.kl_beta > 0 and reference_logprobs is None:
        raise ValueError("kl_beta > 0 needs reference_logprobs")
    if objective.entropy_coef > 0 and entropies is None:
        raise ValueError("entropy_coef > 0 needs entropies")
    mask = weights != 0
    # where(), not a product: 0 * inf of a masked token would be nan, in value and gradient.
    policy, proximal, behaviour = (
        torch.where(mask, logprobs, 0.0)
        for logprobs in (policy_logprobs, proximal_logprobs.detach(), behaviour_logprobs)
    )
    is_demonstrated = torch.zeros_like(mask) if unknown is None else unknown
    behaviour = torch.where(is_demonstrated, proximal, behaviour)  # a ratio of 1, without effect
    drift = proximal - behaviour
    importance = importance_weights(drift, lengths, objective)
    demonstration_weight = demonstration_weights(proximal, objective)
    old = behaviour if objective.correction == "ratio" else proximal
    bounded = surrogate(policy, old, advantages, mask, lengths, objective)
    token_loss = (
        -torch.where(is_demonstrated, demonstration_weight, importance.used) * bounded.value
    )
    reference_kl = torch.zeros_like(token_loss)
    if reference_logprobs is not None:
        reference = torch.where(mask, reference_logprobs.detach(), 0.0)
        reference_kl = _k3(clamp_log_ratio(reference - policy)).clamp(max=K3_LIMIT)
        token_loss = token_loss + objective.kl_beta * reference_kl
    entropy = torch.zeros_like(token_loss)
    if entropies is not None:
        entropy = torch.where(mask, entropies, 0.0)
    if objective.entropy_coef > 0:
        token_loss = token_loss - objective.entropy_coef * entropy
    loss = (token_loss * weights).sum() / divisor

    sampled = mask & ~is_demonstrated

    def total(values: torch.Tensor, over: torch.Tensor = mask) -> torch.Tensor:
        return torch.where(over, values.detach().to(loss.dtype), 0).sum()

    gap = drift.abs()
    stats = TokenStats(
        tokens=mask.sum(),
        sampled=sampled.sum(),
        loss=loss.detach(),
        ratio=total(bounded.ratio),
        clipped=total(bounded.clipped),
        weight=total(importance.raw, sampled),
        weight_squared=total(importance.raw.square(), sampled),
        used=total(importance.used, sampled),
        demonstrated=total(demonstration_weight, mask & is_demonstrated),
        truncated=total(importance.truncated, sampled),
        masked=total(importance.masked, sampled),
        mismatch_kl=total(_k3(clamp_log_ratio(drift)), sampled),
        entropy=total(entropy),
        reference_kl=total(reference_kl),
        mismatch_max=gap.max() if gap.numel() else gap.sum(),
    )
    return LossOutput(loss, stats)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased for KL(sampled || other) with d = log(other / sampled), >= 0."""
    return log_ratio.expm1() - log_ratio
