"""Entropy of next-token distributions."""

from __future__ import annotations

import torch


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Exact entropy [...], nats, of distributions with log-probabilities [..., V].

    Log-probabilities of -inf (forbidden tokens) add nothing to value and gradient: 0 * -inf would
    be nan in both.
    """
    finite = torch.where(logprobs.isneginf(), 0.0, logprobs)
    return -(logprobs.exp() * finite).sum(dim=-1)
