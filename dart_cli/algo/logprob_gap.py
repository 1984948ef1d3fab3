"""How far two log-probabilities of the same tokens are apart; numpy in float64, no torch.

mismatch   compares the log-probabilities of the engine and of the trainer for tokens [N]
Mismatch   its result: the k3 KL, and mean, quantiles and maximum of |difference|, nats
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dart_cli.algo.objective import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class Mismatch:
    """How far engine and trainer are apart for `tokens` tokens, in nats; all fields are 0 without tokens."""

    tokens: int
    kl: float  # k3 estimate of KL(engine || trainer), a mean over tokens
    mean: float  # of |trainer - engine|
    p50: float  # at least half of the tokens are no further apart
    p99: float  # likewise, at least 99 % of the tokens
    max: float


def mismatch(engine: ArrayLike, trainer: ArrayLike) -> Mismatch:
    """Return how far the log-probabilities [N] of engine and trainer, nats, are apart for the same tokens.

    With d = trainer - engine, the estimate of the KL is the mean of exp(d) - 1 - d (k3; J. Schulman,
    "Approximating KL divergence"). It is >= 0, and unbiased if the engine's log-probabilities are of the
    distribution sampled from; d is clamped to +-LOG_RATIO_LIMIT in it. A quantile is the smallest |d| that
    this share of the tokens does not exceed (nearest rank). A value that is not finite counts as an
    infinite difference. Raises ValueError for unequal lengths.
    """
    left, right = (np.asarray(values, dtype=np.float64) for values in (engine, trainer))
    if left.shape != right.shape or left.ndim != 1:
        raise ValueError(f"want two lists of the same length, got {left.shape} and {right.shape}")
    if not left.size:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore"):  # inf - inf
        drift = right - left
    gaps = np.sort(np.where(np.isfinite(drift), np.abs(drift), np.inf))
    if np.isinf(gaps[-1]):
        kl = math.inf
    else:
        clipped = drift.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = float((np.expm1(clipped) - clipped).mean())

    def quantile(share: float) -> float:
        return float(gaps[math.ceil(share * gaps.size) - 1])

    return Mismatch(
        gaps.size, kl, float(gaps.mean()), quantile(0.5), quantile(0.99), float(gaps[-1])
    )
