"""The whole objective: step-wise policy gradient with truncated importance sampling.

    policy_loss   what a pack adds to the batch's loss, and statistics of its tokens
    LossOutput    the result of policy_loss
    TokenStats    sums over tokens; the statistics of two packs can be added

For a token with policy, proximal and behaviour log-probabilities p, q, b and advantage A
(arXiv 2509.23866 section 3; the clip is PPO's, arXiv 1707.06347 eq. 7, with DAPO's two bounds, arXiv
2503.14476 eq. 8):

    loss = - w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_beta * min(k3(p, ref), 10)

    importance sampling (train.correction), w without gradient:

                   w                       r
    truncated      min(exp(q - b), C)      exp(p - q)
    none           1                       exp(p - q)
    ratio          1                       exp(p - b)

With a teacher, the reward's part is multiplied by 1 - teacher_weight, and a token that it scored adds

    teacher_weight * KL(policy || teacher)

of the distribution from which it was drawn, over all tokens that may follow its prefix (on-policy
distillation). The prefix was drawn by the policy and is not differentiated (GKD, arXiv 2306.13649 section 3);
MiniLLM (arXiv 2306.08543) adds what a token does to the gaps of later ones, which has more variance. A sampled
KL, whose advantage of a drawn token is log t - log p, has the same mean and the noise of one draw. The KL
needs no weight w, since it does not depend on which token was drawn.

A trainer that takes one update on a batch has p = q, so r = 1 and the clip acts only under `ratio`. A
token of a demonstration, whose b is unknown, has w = 1: its gradient is the advantage times the gradient of
behaviour cloning, as in DAPG's augmented loss (arXiv 1709.10087). The exact weight for a demonstrator that
is certain of its tokens would be the policy's probability of them, which vanishes where the policy has most
to learn. These tokens are left out of the statistics of w.

Axes: `[N]` tokens, the completion tokens of a pack's samples one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from dart_cli.algo.objective import K3_LIMIT, LOG_RATIO_LIMIT, Objective


@dataclass(frozen=True)
class TokenStats:
    """Statistics of a set of tokens, as scalars without gradient; `a + b` are the statistics of both sets."""

    tokens: torch.Tensor  # count of tokens
    sampled: torch.Tensor  # count of tokens whose behaviour policy is known
    loss: torch.Tensor  # this part of the batch's loss
    ratio: torch.Tensor  # sum of r
    clipped: torch.Tensor  # count of tokens whose gradient the clip stopped
    weight: torch.Tensor  # sum of exp(q - b), before any bound
    weight_squared: torch.Tensor
    used: torch.Tensor  # sum of w, the weights that the loss uses
    truncated: torch.Tensor  # count of tokens with w bounded by C
    mismatch_kl: torch.Tensor  # sum of k3(behaviour, proximal), nats
    entropy: torch.Tensor  # sum of policy entropies, nats
    reference_kl: torch.Tensor  # sum of k3(policy, reference), each at most 10 nats
    taught: torch.Tensor  # count of tokens that a teacher scored
    teacher_gap: torch.Tensor  # sum of -KL(policy || teacher) over them, nats
    mismatch_max: torch.Tensor  # largest |q - b|, nats

    def __add__(self, other: TokenStats) -> TokenStats:
        joined = {
            part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)
        }
        joined["mismatch_max"] = torch.maximum(self.mismatch_max, other.mismatch_max)
        return TokenStats(**joined)

    def metrics(self) -> dict[str, float]:
        """Return means over the tokens, by metric name; `ess` is a fraction of the token count.

        Statistics of importance weights are over the tokens whose behaviour policy is known. `ess` is
        Kish's effective sample size of exp(q - b), (sum)^2 / (N * sum of squares): in [1 / N, 1], 1 where
        all are equal. The metrics of a teacher are left out where none scored a token.
        """
        count = max(1.0, self.tokens.item())
        sampled = max(1.0, self.sampled.item())
        squared = self.weight_squared.item()
        of_teacher = {}
        if taught := self.taught.item():
            of_teacher["teacher_gap"] = self.teacher_gap.item() / taught
            of_teacher["taught_fraction"] = taught / count
        return of_teacher | {
            "loss": self.loss.item(),
            "ratio_mean": self.ratio.item() / count,
            "clip_fraction": self.clipped.item() / count,
            "importance_weight_mean": self.weight.item() / sampled,
            "importance_used_mean": self.used.item() / sampled,
            "importance_truncated_fraction": self.truncated.item() / sampled,
            "ess": self.weight.item() ** 2 / (sampled * squared) if squared > 0 else 0.0,
            "mismatch_kl": self.mismatch_kl.item() / sampled,
            "mismatch_max": self.mismatch_max.item(),
            "entropy": self.entropy.item() / count,
            "reference_kl": self.reference_kl.item() / count,
            "demonstrated_fraction": (self.tokens.item() - self.sampled.item()) / count,
        }


@dataclass(frozen=True)
class LossOutput:
    """A pack's term of the batch's loss, and statistics of its tokens."""

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
    divisor: float,
    unknown: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    teacher_gaps: torch.Tensor | None = None,
    taught: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> LossOutput:
    """Return this pack's term of the objective in the module's docstring.

    All tensors are [N]; log-probabilities and entropies in nats, of the distribution sampled from
    (forbidden tokens and temperature included). Where `unknown` (bool) is set, the behaviour
    log-probability is not read. `weights` multiply each token's loss; a weight of 0 masks the token out of
    loss and statistics. The sum is divided by `divisor`, of the whole batch (objective.py). Gradients flow to
    `policy_logprobs` and `teacher_gaps`; `entropies` are for the statistics. `teacher_gaps` are the negative
    KLs to the teacher, nats, and `taught` (bool) is set where it scored; without it, it scored all tokens.

    The KL is the k3 estimator exp(d) - 1 - d, d = reference - policy (J. Schulman, "Approximating
    KL divergence"), clamped to at most K3_LIMIT: beyond it, for d outside [-11, 2.611], a token's KL
    has no gradient, so that one token cannot make up an update. Raises ValueError for a KL
    without reference, and for a `teacher_weight` without `teacher_gaps`.
    """
    if objective.kl_beta > 0 and reference_logprobs is None:
        raise ValueError("kl_beta > 0 needs reference_logprobs")
    if objective.teacher_weight > 0 and teacher_gaps is None:
        raise ValueError("teacher_weight > 0 needs teacher_gaps")
    mask = weights != 0
    # where(), not a product: 0 * inf of a masked token would be nan, in value and gradient.
    policy, proximal, behaviour = (
        torch.where(mask, logprobs, 0.0)
        for logprobs in (policy_logprobs, proximal_logprobs.detach(), behaviour_logprobs)
    )
    is_demonstrated = torch.zeros_like(mask) if unknown is None else unknown
    behaviour = torch.where(is_demonstrated, proximal, behaviour)  # a weight of 1
    drift = proximal - behaviour
    raw = _clamped(drift).exp()
    used, is_truncated = torch.ones_like(raw), torch.zeros_like(mask)
    if objective.correction == "truncated":
        used, is_truncated = raw.clamp(max=objective.importance_cap), raw > objective.importance_cap
        used = torch.where(is_demonstrated, 1.0, used)
    is_taught, gap = torch.zeros_like(mask), torch.zeros_like(proximal)
    if teacher_gaps is not None:
        is_taught = mask if taught is None else mask & taught
        gap = torch.where(is_taught, teacher_gaps, 0.0)
        advantages = (1.0 - objective.teacher_weight) * advantages
    ratio = _clamped(policy - (behaviour if objective.correction == "ratio" else proximal)).exp()
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high) * advantages
    token_loss = -used * torch.minimum(ratio * advantages, clipped) - objective.teacher_weight * gap
    reference_kl = torch.zeros_like(token_loss)
    if reference_logprobs is not None:
        reference = torch.where(mask, reference_logprobs.detach(), 0.0)
        reference_kl = _k3(reference - policy).clamp(max=K3_LIMIT)
        token_loss = token_loss + objective.kl_beta * reference_kl
    loss = (token_loss * weights).sum() / divisor
    sampled = mask & ~is_demonstrated

    def total(values: torch.Tensor, over: torch.Tensor = mask) -> torch.Tensor:
        return torch.where(over, values.detach().to(loss.dtype), 0).sum()

    mismatch = drift.abs()
    stats = TokenStats(
        tokens=mask.sum(),
        sampled=sampled.sum(),
        loss=loss.detach(),
        ratio=total(ratio),
        clipped=total(clipped < ratio * advantages),
        weight=total(raw, sampled),
        weight_squared=total(raw.square(), sampled),
        used=total(used, sampled),
        truncated=total(is_truncated, sampled),
        mismatch_kl=total(_k3(drift), sampled),
        entropy=total(torch.zeros_like(loss) if entropies is None else entropies),
        reference_kl=total(reference_kl),
        taught=is_taught.sum(),
        teacher_gap=total(gap, is_taught),
        mismatch_max=mismatch.max() if mismatch.numel() else mismatch.sum(),
    )
    return LossOutput(loss, stats)


def _clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a log-ratio clamped so that float32 can exponentiate, square and sum it.

    Outside of the bounds its gradient is 0.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d, >= 0: unbiased for KL(sampled || other) with d = log(other / sampled)."""
    clamped = _clamped(log_ratio)
    return clamped.expm1() - clamped
