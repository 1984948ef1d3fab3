"""Tokens of an unknown behaviour policy: their weight, its gradient, and what is said of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.correction import demonstration_weights
from dart_cli.algo.loss import LossOutput, policy_loss
from dart_cli.algo.objective import Objective

LOGPROBS = st.lists(st.floats(-12, 0), min_size=1, max_size=20)
GAMMAS = st.floats(0.01, 1)


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shaped_by(gamma: float) -> Objective:
    return Objective(demonstrations="shaped", demonstration_gamma=gamma)


def loss_of(
    policy: torch.Tensor, behaviour: torch.Tensor, unknown: list[bool], objective: Objective
) -> LossOutput:
    one = torch.ones_like(behaviour)
    return policy_loss(
        policy, policy.detach(), behaviour, one, one, objective,
        lengths=[1] * len(unknown), divisor=1.0, unknown=torch.tensor(unknown),
    )  # fmt: skip


@given(LOGPROBS, GAMMAS)
def test_its_gradient_is_that_of_the_shaped_probability(
    logprobs: list[float], gamma: float
) -> None:
    """d/d log p of p / (p + gamma), by autograd of the formula itself (LUFFY, section 3.2)."""
    policy, shaped = double(logprobs).requires_grad_(), double(logprobs).requires_grad_()
    (shaped.exp() / (shaped.exp() + gamma)).sum().backward()
    output = loss_of(
        policy,
        torch.full_like(policy, math.nan),  # never read
        [True] * len(logprobs),
        shaped_by(gamma),
    )
    output.loss.backward()
    assert policy.grad is not None
    assert shaped.grad is not None
    assert torch.allclose(-policy.grad, shaped.grad, rtol=1e-9, atol=1e-12)


@given(LOGPROBS, st.sampled_from(["truncated", "sequence", "masked", "none", "ratio"]))
def test_a_cloned_one_has_the_gradient_of_the_likelihood(logprobs: list[float], kind: str) -> None:
    """d/d theta of the sum of log softmax, by autograd from the logits of a choice of two."""

    def chosen(logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits, torch.zeros_like(logits)]).log_softmax(0)[0]

    ours, theirs = double(logprobs).requires_grad_(), double(logprobs).requires_grad_()
    chosen(theirs).sum().backward()
    policy = chosen(ours)
    unknown = torch.full_like(policy, math.nan)
    loss_of(policy, unknown, [True] * len(logprobs), Objective(correction=kind)).loss.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(-ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@given(st.floats(-20, 0), GAMMAS)
def test_it_never_weighs_more_than_a_quarter_of_a_fresh_token(value: float, gamma: float) -> None:
    weight = demonstration_weights(double([value]), shaped_by(gamma)).item()
    assert 0 < weight <= 0.25 + 1e-12
    assert demonstration_weights(
        double([math.log(gamma)]), shaped_by(gamma)
    ).item() == pytest.approx(0.25)


@given(LOGPROBS, st.data())
def test_other_tokens_and_what_is_said_of_them_are_as_without_it(
    logprobs: list[float], data: st.DataObject
) -> None:
    drifts = data.draw(
        st.lists(st.floats(-2, 2), min_size=len(logprobs), max_size=len(logprobs)), label="drifts"
    )
    kind = data.draw(st.sampled_from(["truncated", "sequence", "masked", "none", "ratio"]))
    weight = data.draw(st.sampled_from(["cloned", "shaped"]))
    objective = Objective(correction=kind, demonstrations=weight)
    policy, behaviour = double(logprobs), double(logprobs) - double(drifts)
    alone = loss_of(policy, behaviour, [False] * len(logprobs), objective)
    mixed = loss_of(
        torch.cat([policy, double([-1.0])]),
        torch.cat([behaviour, double([math.nan])]),
        [False] * len(logprobs) + [True],
        objective,
    )
    extra = -demonstration_weights(double([-1.0]), objective).item()
    assert mixed.loss.item() == pytest.approx(alone.loss.item() + extra)
    before, after = alone.stats.metrics(), mixed.stats.metrics()
    for name in ("ess", "is_weight_mean", "is_used_mean", "is_truncated_fraction", "mismatch_kl"):
        assert after[name] == pytest.approx(before[name])
    assert before["demonstrated_fraction"] == 0
    assert after["demonstrated_fraction"] == pytest.approx(1 / (len(logprobs) + 1))
    assert after["demonstrated_weight_mean"] == pytest.approx(-extra)
