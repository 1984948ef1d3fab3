"""The objective: step-wise GRPO with truncated importance sampling (arXiv 2509.23866 section 3).

    policy_loss   a micro-batch's share of the batch's loss, and its token statistics
    TokenStats    sums over tokens; those of two micro-batches add up to those of both

For a token with policy, proximal and behaviour log-probabilities p, q, b and advantage A:

    r = exp(p - q)    w = min(exp(q - b), C), no gradient
    loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_beta * k3(p, ref)

Aggregation is the mean over all completion tokens of the *whole batch*: each token's loss times its
weight, divided by the batch's token count. The count is given, not taken from the micro-batch, so
that gradients accumulated over micro-batches of any size equal those of one big batch.

Axis: `[N]` tokens, the completion tokens of some samples one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20: e^20 still is a number that float32 can square and sum."""


@dataclass(frozen=True)
class TokenStats:
    """Detached scalars that describe some tokens; `+` joins two sets of tokens."""

    tokens: torch.Tensor  # count of tokens
    loss: torch.Tensor  # this part of the batch's loss
    ratio: torch.Tensor  # sum of r
    clipped: torch.Tensor  # count of tokens whose gradient the clip stopped
    weight: torch.Tensor  # sum of exp(q - b), before truncation
    weight_squared: torch.Tensor
    truncated: torch.Tensor  # count of tokens with exp(q - b) > C
    mismatch_kl: torch.Tensor  # sum of k3(behaviour, proximal), nats
    entropy: torch.Tensor  # sum of policy entropies, nats
    reference_kl: torch.Tensor  # sum of k3(policy, reference), nats
    mismatch_max: torch.Tensor  # largest |q - b|, nats

    def __add__(self, other: TokenStats) -> TokenStats:
        joined = {
            part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)
        }
        joined["mismatch_max"] = torch.maximum(self.mismatch_max, other.mismatch_max)
        return TokenStats(**joined)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by metric name; `ess` is a fraction of the token count."""
        count = max(1.0, self.tokens.item())
        squared = self.weight_squared.item()
        return {
            "loss": self.loss.item(),
            "ratio_mean": self.ratio.item() / count,
            "clip_fraction": self.clipped.item() / count,
            "is_weight_mean": self.weight.item() / count,
            "is_truncated_fraction": self.truncated.item() / count,
            "ess": self.weight.item() ** 2 / (count * squared) if squared > 0 else 0.0,
            "mismatch_kl": self.mismatch_kl.item() / count,
            "mismatch_max": self.mismatch_max.item(),
            "entropy": self.entropy.item() / count,
            "reference_kl": self.reference_kl.item() / count,
        }


@dataclass(frozen=True)
class LossOutput:
    """What a micro-batch adds to the batch's loss."""

    loss: torch.Tensor  # scalar with gradient; the batch's loss is the sum over its micro-batches
    stats: TokenStats


def policy_loss(
    policy_logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    batch_tokens: int,
    clip_low: float,
    clip_high: float,
    is_cap: float,
    kl_beta: float = 0.0,
    reference_logprobs: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> LossOutput:
    """This micro-batch's share of the objective in the module's docstring.

    All tensors are [N]; log-probabilities and entropies in nats, of the distribution sampled from
    (forbidden tokens and temperature included). `weights` multiply each token's loss, 0 masks it
    out of the loss and the statistics; `batch_tokens` counts the unmasked tokens of the whole
    batch. Only `policy_logprobs` is differentiated. `entropies` are for the statistics alone.

    The KL is the k3 estimator exp(d) - 1 - d, d = reference - policy (J. Schulman, "Approximating
    KL divergence"). Raises ValueError if `kl_beta` > 0 without a reference.
    """
    if kl_beta > 0 and reference_logprobs is None:
        raise ValueError("kl_beta > 0 needs reference_logprobs")
    counts = weights != 0
    # where() and not a product: 0 * inf of a masked token would be nan, in value and gradient.
    policy, proximal, behaviour = (
        torch.where(counts, logprobs, 0.0)
        for logprobs in (policy_logprobs, proximal_logprobs.detach(), behaviour_logprobs)
    )
    ratio = _limited(policy - proximal).exp()
    drift = _limited(proximal - behaviour)
    importance = drift.exp()
    free = ratio * advantages
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    token_loss = -importance.clamp(max=is_cap) * torch.minimum(free, held)
    reference_kl = torch.zeros_like(token_loss)
    if reference_logprobs is not None:
        reference = torch.where(counts, reference_logprobs.detach(), 0.0)
        reference_kl = _k3(_limited(reference - policy))
        token_loss = token_loss + kl_beta * reference_kl
    loss = (token_loss * weights).sum() / batch_tokens

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counts, values.detach(), 0).sum()

    gap = (proximal - behaviour).abs()
    stats = TokenStats(
        tokens=counts.sum(),
        loss=loss.detach(),
        ratio=total(ratio),
        clipped=total((held < free).to(ratio.dtype)),
        weight=total(importance),
        weight_squared=total(importance.square()),
        truncated=total((importance > is_cap).to(ratio.dtype)),
        mismatch_kl=total(_k3(drift)),
        entropy=total(torch.zeros_like(ratio) if entropies is None else entropies),
        reference_kl=total(reference_kl),
        mismatch_max=gap.max() if gap.numel() else gap.sum(),
    )
    return LossOutput(loss, stats)


def _limited(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased for KL(sampled || other) with d = log(other / sampled), >= 0."""
    return log_ratio.expm1() - log_ratio
