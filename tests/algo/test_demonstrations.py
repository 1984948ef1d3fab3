"""Tokens of an unknown behaviour policy: their gradient, and their metrics."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.loss import LossOutput, policy_loss
from dart_cli.algo.objective import ImportanceSampling, Objective

LOGPROBS = st.lists(st.floats(-12, 0), min_size=1, max_size=20)
CORRECTIONS = st.sampled_from(get_args(ImportanceSampling))


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    policy: torch.Tensor,
    behaviour: torch.Tensor,
    unknown: list[bool],
    correction: ImportanceSampling,
) -> LossOutput:
    one = torch.ones_like(behaviour)
    return policy_loss(
        policy, policy.detach(), behaviour, one, one, Objective(correction=correction),
        divisor=1.0, unknown=torch.tensor(unknown),
    )  # fmt: skip


@given(LOGPROBS, CORRECTIONS)
def test_it_has_the_gradient_of_the_likelihood(
    logprobs: list[float], kind: ImportanceSampling
) -> None:
    """Compare with d/d theta of the sum of log softmax, by autograd from the logits of two choices."""

    def demonstrated_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits, torch.zeros_like(logits)]).log_softmax(0)[0]

    ours, theirs = double(logprobs).requires_grad_(), double(logprobs).requires_grad_()
    demonstrated_logprobs(theirs).sum().backward()
    policy = demonstrated_logprobs(ours)
    never_read = torch.full_like(policy, math.nan)
    loss_of(policy, never_read, [True] * len(logprobs), kind).loss.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(-ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@given(LOGPROBS, CORRECTIONS, st.data())
def test_other_tokens_and_what_is_said_of_them_are_as_without_it(
    logprobs: list[float], kind: ImportanceSampling, data: st.DataObject
) -> None:
    drifts = data.draw(
        st.lists(st.floats(-2, 2), min_size=len(logprobs), max_size=len(logprobs)), label="drifts"
    )
    policy, behaviour = double(logprobs), double(logprobs) - double(drifts)
    alone = loss_of(policy, behaviour, [False] * len(logprobs), kind)
    mixed = loss_of(
        torch.cat([policy, double([-1.0])]),
        torch.cat([behaviour, double([math.nan])]),
        [False] * len(logprobs) + [True],
        kind,
    )
    assert mixed.loss.item() == pytest.approx(alone.loss.item() - 1.0)
    before, after = alone.stats.metrics(), mixed.stats.metrics()
    for name in (
        "ess",
        "importance_weight_mean",
        "importance_used_mean",
        "importance_truncated_fraction",
        "mismatch_kl",
    ):
        assert after[name] == pytest.approx(before[name])
    assert before["demonstrated_fraction"] == 0
    assert after["demonstrated_fraction"] == pytest.approx(1 / (len(logprobs) + 1))
