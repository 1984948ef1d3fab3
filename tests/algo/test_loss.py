"""The objective against an independent computation: plain Python, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dart_cli.algo.loss import LOG_RATIO_LIMIT, LossOutput, TokenStats, policy_loss

LIMIT = LOG_RATIO_LIMIT


@dataclass(frozen=True)
class Token:
    policy: float
    proximal: float
    behaviour: float
    advantage: float
    weight: float
    reference: float


@dataclass(frozen=True)
class Setting:
    clip_low: float = 0.2
    clip_high: float = 0.28
    is_cap: float = 1.0
    kl_beta: float = 0.0


def limited(value: float) -> float:
    return max(-LIMIT, min(LIMIT, value))


def by_hand(token: Token, s: Setting) -> tuple[float, float]:
    """Loss of one token and its derivative by the policy's log-probability, case by case."""
    if token.weight == 0:
        return 0.0, 0.0
    w = min(math.exp(limited(token.proximal - token.behaviour)), s.is_cap)
    r = math.exp(limited(token.policy - token.proximal))
    dr = r if abs(token.policy - token.proximal) <= LIMIT else 0.0
    a = token.advantage
    if a >= 0:
        surrogate, slope = (r * a, dr * a) if r <= 1 + s.clip_high else ((1 + s.clip_high) * a, 0.0)
    else:
        surrogate, slope = (r * a, dr * a) if r >= 1 - s.clip_low else ((1 - s.clip_low) * a, 0.0)
    d = limited(token.reference - token.policy)
    kl = math.exp(d) - 1 - d
    kl_slope = 1 - math.exp(d) if abs(token.reference - token.policy) <= LIMIT else 0.0
    loss = -w * surrogate + s.kl_beta * kl
    return token.weight * loss, token.weight * (-w * slope + s.kl_beta * kl_slope)


def ours(tokens: Sequence[Token], s: Setting, count: int) -> tuple[LossOutput, list[float]]:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float64)

    policy = column("policy").requires_grad_()
    output = policy_loss(
        policy,
        column("proximal"),
        column("behaviour"),
        column("advantage"),
        column("weight"),
        batch_tokens=count,
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        is_cap=s.is_cap,
        kl_beta=s.kl_beta,
        reference_logprobs=column("reference"),
        entropies=column("policy").neg(),
    )
    output.loss.backward()
    assert policy.grad is not None
    return output, policy.grad.tolist()


_logprob = st.floats(-8, 0) | st.sampled_from([-60.0, -30.0, -1e-9, 0.0])
_token = st.builds(
    Token,
    policy=_logprob,
    proximal=_logprob,
    behaviour=_logprob,
    advantage=st.floats(-3, 3),
    weight=st.sampled_from([1.0, 1.0, 0.0, 0.5]),
    reference=_logprob,
)
_tokens = st.lists(_token, min_size=1, max_size=8)
_settings = st.builds(
    Setting,
    clip_low=st.sampled_from([0.0, 0.2, 0.9]),
    clip_high=st.sampled_from([0.0, 0.28, 2.0]),
    is_cap=st.sampled_from([0.5, 1.0, 5.0]),
    kl_beta=st.sampled_from([0.0, 0.1]),
)


def away_from_kinks(token: Token, s: Setting) -> bool:
    kinks = [math.log1p(s.clip_high), math.log1p(-s.clip_low), LIMIT, -LIMIT]
    ratio, reference = token.policy - token.proximal, token.reference - token.policy
    return all(abs(ratio - kink) > 1e-4 for kink in kinks) and abs(abs(reference) - LIMIT) > 1e-4


@given(_tokens, _settings)
@example([Token(-60.0, 0.0, -60.0, -3.0, 1.0, 0.0)], Setting(kl_beta=0.1))
@example([Token(0.0, -60.0, 0.0, -3.0, 1.0, -60.0)], Setting(kl_beta=0.1))
@example([Token(-1.0, -1.0, -1.0, 1.0, 1.0, -1.0)], Setting(clip_low=0.0, clip_high=0.0))
def test_loss_and_gradient_are_those_computed_by_hand(tokens: list[Token], s: Setting) -> None:
    assume(all(t.policy == t.proximal or away_from_kinks(t, s) for t in tokens))
    output, gradient = ours(tokens, s, len(tokens))
    expected = [by_hand(token, s) for token in tokens]
    loss = sum(value for value, _ in expected) / len(tokens)
    assert output.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for token, got, (_, slope) in zip(tokens, gradient, expected, strict=True):
        if token.policy == token.proximal and 0.0 in (s.clip_low, s.clip_high):
            continue  # a ratio of exactly 1 stands on the kink: any subgradient is right
        assert got == pytest.approx(slope / len(tokens), rel=1e-9, abs=1e-12)


@given(_token, _settings)
@example(Token(-1.0, -60.0, -60.0, -1.0, 1.0, 0.0), Setting(kl_beta=0.1))
def test_the_derivative_by_hand_is_the_slope_of_the_loss_by_hand(token: Token, s: Setting) -> None:
    assume(away_from_kinks(token, s))
    step = 1e-6
    after, _ = by_hand(replace(token, policy=token.policy + step), s)
    before, _ = by_hand(replace(token, policy=token.policy - step), s)
    rounding = 1e-9 * max(abs(after), abs(before))  # a loss of e^20 has no digits left for a slope
    slope = pytest.approx(by_hand(token, s)[1], rel=1e-5, abs=1e-4 + rounding)
    assert (after - before) / (2 * step) == slope


@given(_tokens, _settings, st.data())
def test_parts_of_a_batch_add_up_to_the_whole(
    tokens: list[Token], s: Setting, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    whole, gradient = ours(tokens, s, len(tokens))
    parts = [ours(part, s, len(tokens)) for part in (tokens[:cut], tokens[cut:])]
    assert sum(part.loss.item() for part, _ in parts) == pytest.approx(
        whole.loss.item(), rel=1e-9, abs=1e-12
    )
    assert parts[0][1] + parts[1][1] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    joined: TokenStats = parts[0][0].stats + parts[1][0].stats
    assert joined.metrics() == pytest.approx(whole.stats.metrics(), rel=1e-9, abs=1e-12)


@given(_tokens)
def test_statistics_are_those_computed_by_hand(tokens: list[Token]) -> None:
    output, _ = ours(tokens, Setting(), len(tokens))
    seen = [token for token in tokens if token.weight != 0]
    n = max(1, len(seen))
    drifts = [limited(t.proximal - t.behaviour) for t in seen]
    importance = [math.exp(d) for d in drifts]
    metrics = output.stats.metrics()
    assert output.stats.tokens.item() == len(seen)
    assert metrics["mismatch_kl"] == pytest.approx(
        sum(math.exp(d) - 1 - d for d in drifts) / n, rel=1e-7, abs=1e-9
    )
    assert metrics["is_weight_mean"] == pytest.approx(sum(importance) / n)
    assert metrics["mismatch_max"] == pytest.approx(
        max((abs(t.proximal - t.behaviour) for t in seen), default=0.0)
    )
    assert metrics["is_truncated_fraction"] == pytest.approx(sum(v > 1 for v in importance) / n)
    assert metrics["entropy"] == pytest.approx(sum(-t.policy for t in seen) / n)
    if seen:
        squares = sum(v * v for v in importance)
        assert metrics["ess"] == pytest.approx(sum(importance) ** 2 / (n * squares))


@given(_tokens, _settings)
def test_float32_stays_finite_at_any_ratio(tokens: list[Token], s: Setting) -> None:
    rows = [[float(v) for v in vars(token).values()] for token in tokens]
    policy, proximal, behaviour, advantage, weight, reference = torch.tensor(
        rows, dtype=torch.float32
    ).T.contiguous()
    policy = policy.clone().requires_grad_()
    output = policy_loss(
        policy, proximal, behaviour, advantage, weight,
        batch_tokens=len(tokens), reference_logprobs=reference, **vars(s),
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    assert torch.isfinite(output.loss)
    assert torch.isfinite(policy.grad).all()
    assert all(math.isfinite(value) for value in output.stats.metrics().values())


def test_a_masked_token_of_impossible_log_probability_does_no_harm() -> None:
    inf = float("-inf")
    policy = torch.tensor([-1.0, inf], requires_grad=True)
    output = policy_loss(
        policy, torch.tensor([-1.0, inf]), torch.tensor([-1.0, -1.0]),
        torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]),
        batch_tokens=1, clip_low=0.2, clip_high=0.28, is_cap=1.0,
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == -1.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(value) for value in output.stats.metrics().values())


def test_on_policy_gradient_is_the_advantage_times_the_score() -> None:
    """r = w = 1: the gradient is REINFORCE's, and no token is clipped or truncated."""
    logprobs = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    policy = logprobs.clone().requires_grad_()
    output = policy_loss(
        policy, logprobs, logprobs, advantages, torch.ones(3),
        batch_tokens=3, clip_low=0.2, clip_high=0.28, is_cap=1.0,
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    assert torch.allclose(policy.grad, -advantages / 3)
    metrics = output.stats.metrics()
    assert (metrics["clip_fraction"], metrics["is_truncated_fraction"], metrics["ess"]) == (0, 0, 1)


def test_a_kl_without_a_reference_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(
            one, one, one, one, one,
            batch_tokens=1, clip_low=0.2, clip_high=0.28, is_cap=1.0, kl_beta=0.1,
        )  # fmt: skip
