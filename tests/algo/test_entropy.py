"""Exact entropy and its gradient against numpy, finite differences and the textbook."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.algo.entropy import entropy
from dart_cli.policy.forward import masked_logprobs

logits_of_tokens = st.lists(st.floats(-6, 6), min_size=3, max_size=8)


def by_hand(logits: list[float], temperature: float) -> tuple[float, np.ndarray]:
    """Entropy with token 0 forbidden, and dH/dlogit_k = -p_k (log p_k + H) / T."""
    scaled = np.asarray(logits[1:], dtype=np.float64) / temperature
    logprobs = scaled - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum())
    h = float(-(np.exp(logprobs) * logprobs).sum())
    return h, np.concatenate([[0.0], -np.exp(logprobs) * (logprobs + h) / temperature])


@settings(max_examples=60)
@given(logits_of_tokens, st.sampled_from([0.5, 1.0, 2.0]))
def test_value_and_gradient_at_the_sampling_temperature_with_a_forbidden_token(
    logits: list[float], temperature: float
) -> None:
    values = torch.tensor([logits], dtype=torch.float32, requires_grad=True)
    got = entropy(masked_logprobs(values, torch.tensor([0]), temperature))
    got.sum().backward()
    expected, slope = by_hand(logits, temperature)
    np.testing.assert_allclose(got.item(), expected, rtol=1e-5, atol=1e-6)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad[0].numpy(), slope, rtol=1e-4, atol=1e-6)


@settings(max_examples=60)
@given(logits_of_tokens)
def test_the_gradient_by_hand_is_a_finite_difference(logits: list[float]) -> None:
    _, slope = by_hand(logits, 0.7)
    for k in range(len(logits)):
        after, before = (
            [v + (d if i == k else 0) for i, v in enumerate(logits)] for d in (1e-5, -1e-5)
        )
        difference = (by_hand(after, 0.7)[0] - by_hand(before, 0.7)[0]) / 2e-5
        np.testing.assert_allclose(difference, slope[k], atol=1e-7)


def test_a_uniform_distribution_has_the_log_of_its_size_and_a_certain_one_none() -> None:
    uniform = torch.full((1, 8), -math.log(8), dtype=torch.float64)
    certain = torch.tensor([[0.0] + [-math.inf] * 7])
    assert math.isclose(entropy(uniform).item(), math.log(8))
    assert entropy(certain).item() == 0.0
