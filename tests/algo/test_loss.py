"""The objective against an independent computation: plain Python, one token at a time.

Every correction x normaliser is computed twice more: `token_loss` and its derivative `token_slope`,
written case by case, and that derivative by finite differences. A last section has the defaults as one
formula of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dart_cli.algo.loss import LossOutput, TokenStats, policy_loss
from dart_cli.algo.objective import (
    K3_LIMIT,
    LOG_RATIO_LIMIT,
    ImportanceSampling,
    Normalise,
    Objective,
    loss_weights,
)

LIMIT = LOG_RATIO_LIMIT
few = settings(max_examples=30)
NO_CLIP: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1e30}


@dataclass(frozen=True)
class Token:
    policy: float
    proximal: float
    behaviour: float
    reference: float
    entropy: float = 0.5


@dataclass(frozen=True)
class Step:
    """A sample."""

    trajectory: str
    advantage: float
    weight: float
    tokens: tuple[Token, ...]


# --- the objective in plain Python --------------------------------------------------------------


def limited(value: float) -> float:
    return max(-LIMIT, min(LIMIT, value))


def weight_by_hand(token: Token, o: Objective) -> float:
    drift = token.proximal - token.behaviour
    if o.correction in ("none", "ratio"):
        return 1.0
    return min(math.exp(limited(drift)), o.importance_cap)


def old(token: Token, o: Objective) -> float:
    return token.behaviour if o.correction == "ratio" else token.proximal


def token_loss(step: Step, token: Token, x: float, o: Objective) -> float:
    """Return the loss of one token with log-probability x; gradients stop at `token.policy`."""
    a, low, high = step.advantage, 1 - o.clip_low, 1 + o.clip_high
    r = math.exp(limited(x - old(token, o)))
    surrogate = (min(r, high) if a >= 0 else max(r, low)) * a
    d = limited(token.reference - x)
    kl = min(math.exp(d) - 1 - d, K3_LIMIT)
    return -weight_by_hand(token, o) * surrogate + o.kl_beta * kl


def token_slope(step: Step, token: Token, o: Objective) -> float:
    """Return the derivative of `token_loss` at the token's log-probability."""
    a, low, high = step.advantage, 1 - o.clip_low, 1 + o.clip_high
    log = token.policy - old(token, o)
    r = math.exp(limited(log))
    moves = r <= high if a >= 0 else low <= r
    slope = r * a if moves and abs(log) <= LIMIT else 0.0
    d = token.reference - token.policy
    kl = 1 - math.exp(d) if abs(d) <= LIMIT and math.exp(d) - 1 - d <= K3_LIMIT else 0.0
    return -weight_by_hand(token, o) * slope + o.kl_beta * kl


def mean_by_hand(
    batch: list[Step], mean: Normalise, value: Callable[[Step, Token], float]
) -> float:
    """The mean over the batch that `mean` asks for, in nested sums."""
    steps = [step for step in batch if step.weight != 0]
    if not steps:
        return 0.0

    def total(of: list[Step]) -> float:
        return sum(step.weight * value(step, token) for step in of for token in step.tokens)

    def count(of: list[Step]) -> int:
        return sum(len(step.tokens) for step in of)

    if mean == "tokens":
        return total(steps) / count(steps)
    if mean == "samples":
        return sum(total([step]) / count([step]) for step in steps) / len(steps)
    names = sorted({step.trajectory for step in steps})
    trajectories = [[step for step in steps if step.trajectory == name] for name in names]
    return sum(total(each) / count(each) for each in trajectories) / len(names)


def slopes_by_hand(batch: list[Step], mean: Normalise, o: Objective) -> list[float]:
    """Return the derivative of the batch's loss with respect to each token's log-probability."""
    return [
        mean_by_hand(
            batch,
            mean,
            lambda s, t, step=step, token=token: (  # type: ignore[misc]
                token_slope(s, t, o) if s is step and t is token else 0.0
            ),
        )
        for step in batch
        for token in step.tokens
    ]


# --- ours ---------------------------------------------------------------------------------------


def ours(
    batch: list[Step], o: Objective, mean: Normalise = "tokens", part: slice | None = None
) -> tuple[LossOutput, list[float]]:
    """Return output and gradient by log-probabilities, for the batch or a part of it."""
    shares = loss_weights(
        [(step.trajectory, len(step.tokens)) for step in batch if step.weight != 0], mean
    )
    steps = batch[part or slice(None)]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def of_tokens(name: str) -> torch.Tensor:
        return column([getattr(token, name) for step in steps for token in step.tokens])

    def of_steps(value: Callable[[Step], float]) -> torch.Tensor:
        return column([value(step) for step in steps for _ in step.tokens])

    def weight(step: Step) -> float:
        return step.weight and step.weight * shares.of(step.trajectory, len(step.tokens))

    policy = of_tokens("policy").requires_grad_()
    output = policy_loss(
        policy,
        of_tokens("proximal"),
        of_tokens("behaviour"),
        of_steps(lambda step: step.advantage),
        of_steps(weight),
        o,
        divisor=shares.divisor or 1.0,
        reference_logprobs=of_tokens("reference"),
        entropies=of_tokens("entropy"),
    )
    output.loss.backward()
    assert policy.grad is not None
    return output, policy.grad.tolist()


# --- random cases -------------------------------------------------------------------------------

_logprob = st.floats(-8, 0) | st.sampled_from([-60.0, -30.0, -1e-9, 0.0])
_near = st.floats(-2, 0)  # so that ratios often are within their bounds
_advantage = st.integers(-3000, 3000).map(lambda thousandths: thousandths / 1000)
_token = st.one_of(
    st.builds(Token, each, each, each, each, entropy=st.floats(0, 5)) for each in (_near, _logprob)
)
_step = st.builds(
    Step,
    trajectory=st.sampled_from("abc"),
    advantage=_advantage,
    weight=st.sampled_from([1.0, 1.0, 0.0, 0.5]),
    tokens=st.lists(_token, min_size=1, max_size=4).map(tuple),
)
_batch = st.lists(_step, min_size=1, max_size=5)
_numbers = {
    "clip_low": st.sampled_from([0.05, 0.2, 1.0]),
    "clip_high": st.sampled_from([0.05, 0.28, 2.0]),
    "importance_cap": st.sampled_from([0.5, 1.0, 5.0]),
    "kl_beta": st.sampled_from([0.0, 0.1]),
}
CORRECTIONS = get_args(ImportanceSampling)
_objective = st.builds(
    Objective,
    correction=st.sampled_from(CORRECTIONS),
    **_numbers,
)
_mean = st.sampled_from(get_args(Normalise))


def away_from_kinks(token: Token, o: Objective) -> bool:
    """Return True if no bound is so near that rounding or a finite difference could cross it."""
    bounds = [1 + o.clip_high, 1 - o.clip_low]
    kinks = [LIMIT, -LIMIT, *(math.log(bound) for bound in bounds if bound > 0)]
    log = token.policy - old(token, o)
    reference = token.reference - token.policy
    if abs(reference) <= LIMIT and abs(math.expm1(reference) - reference - K3_LIMIT) < 1e-2:
        return False
    return all(abs(log - kink) > 1e-4 for kink in kinks) and abs(abs(reference) - LIMIT) > 1e-4


# --- formula and gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=40)
@given(batch=_batch, mean=_mean, data=st.data())
def test_loss_and_gradient_are_those_computed_by_hand(
    correction: ImportanceSampling, batch: list[Step], mean: Normalise, data: st.DataObject
) -> None:
    o = data.draw(st.builds(Objective, correction=st.just(correction), **_numbers))
    assume(all(away_from_kinks(token, o) for step in batch for token in step.tokens))
    output, gradient = ours(batch, o, mean)
    loss = mean_by_hand(batch, mean, lambda step, token: token_loss(step, token, token.policy, o))
    assert output.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(slopes_by_hand(batch, mean, o), rel=1e-9, abs=1e-12)


@settings(max_examples=150)
@given(_step, _objective)
@example(Step("a", -1.0, 1.0, (Token(-1.0, -60.0, -60.0, 0.0),)), Objective(kl_beta=0.1))
def test_the_derivative_by_hand_is_the_slope_of_the_loss_by_hand(step: Step, o: Objective) -> None:
    token = step.tokens[0]
    assume(away_from_kinks(token, o))
    h = 1e-6
    after = token_loss(step, token, token.policy + h, o)
    before = token_loss(step, token, token.policy - h, o)
    rounding = 1e-9 * max(abs(after), abs(before))  # a loss of e^20 has no digits left for a slope
    slope = pytest.approx(token_slope(step, token, o), rel=1e-5, abs=1e-4 + rounding)
    assert (after - before) / (2 * h) == slope


@few
@given(_batch, _objective, _mean, st.data())
def test_parts_of_a_batch_add_up_to_the_whole(
    batch: list[Step], o: Objective, mean: Normalise, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(batch)))
    whole, gradient = ours(batch, o, mean)
    parts = [ours(batch, o, mean, part) for part in (slice(0, cut), slice(cut, None))]
    assert sum(part.loss.item() for part, *_ in parts) == pytest.approx(
        whole.loss.item(), rel=1e-9, abs=1e-12
    )
    assert parts[0][1] + parts[1][1] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    joined: TokenStats = parts[0][0].stats + parts[1][0].stats
    assert joined.metrics() == pytest.approx(whole.stats.metrics(), rel=1e-9, abs=1e-12)


@few
@given(_batch, _objective)
def test_metrics_are_those_computed_by_hand(batch: list[Step], o: Objective) -> None:
    assume(all(away_from_kinks(token, o) for step in batch for token in step.tokens))
    output, _ = ours(batch, o)
    counted = [(step, token) for step in batch if step.weight != 0 for token in step.tokens]
    n = max(1, len(counted))
    drifts = np.array([limited(t.proximal - t.behaviour) for _, t in counted], dtype=np.float64)
    raw = np.exp(drifts)
    used = [weight_by_hand(token, o) for _, token in counted]
    ratios = [math.exp(limited(t.policy - old(t, o))) for _, t in counted]
    metrics = output.stats.metrics()
    assert output.stats.tokens.item() == len(counted)
    expected = {
        "mismatch_kl": (np.exp(drifts) - 1 - drifts).sum() / n,
        "mismatch_max": max((abs(t.proximal - t.behaviour) for _, t in counted), default=0.0),
        "importance_weight_mean": raw.sum() / n,
        "importance_used_mean": sum(used) / n,
        "ess": raw.sum() ** 2 / (n * (raw**2).sum()) if counted else 0.0,
        "importance_truncated_fraction": (raw > o.importance_cap).sum() / n
        if o.correction == "truncated"
        else 0.0,
        "entropy": sum(t.entropy for _, t in counted) / n,
        "ratio_mean": sum(ratios) / n,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert metrics["clip_fraction"] == pytest.approx(
        sum(is_clipped(s, r, o) for (s, _), r in zip(counted, ratios, strict=True)) / n
    )


def is_clipped(step: Step, r: float, o: Objective) -> bool:
    low, high, a = 1 - o.clip_low, 1 + o.clip_high, step.advantage
    return a > 0 and r > high if a >= 0 else r < low


# --- limits -------------------------------------------------------------------------------------


_near_batch = st.lists(
    st.builds(
        Step,
        trajectory=st.sampled_from("ab"),
        advantage=_advantage,
        weight=st.just(1.0),
        tokens=st.lists(st.builds(Token, _near, _near, _near, _near), min_size=1, max_size=4).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=4,
)


@few
@given(_near_batch)
def test_without_clip_and_cap_the_gradient_is_reinforce_with_importance_sampling(
    batch: list[Step],
) -> None:
    """Use w r = (q / b) (p / q) = p / b: the proximal policy does not matter."""
    count = sum(len(step.tokens) for step in batch)
    expected = [
        -math.exp(t.policy - t.behaviour) * s.advantage / count for s in batch for t in s.tokens
    ]
    for o in (
        Objective(importance_cap=1e30, **NO_CLIP),
        Objective(correction="ratio", **NO_CLIP),
    ):
        assert ours(batch, o)[1] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@few
@given(_near_batch, _mean)
def test_on_policy_all_corrections_have_one_gradient(batch: list[Step], mean: Normalise) -> None:
    """Set p = q = b: the gradient is A grad p, no token is clipped or truncated, and the ESS is 1."""
    batch = [
        replace(step, tokens=tuple(Token(t.policy, t.policy, t.policy, 0) for t in step.tokens))
        for step in batch
    ]
    plain = ours(batch, Objective(), mean)
    expected = slopes_by_hand(batch, mean, Objective(correction="none"))
    assert plain[1] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for correction in CORRECTIONS:
        result = ours(batch, Objective(correction=correction), mean)
        assert result[1] == pytest.approx(plain[1], rel=1e-9, abs=1e-12)
        metrics = result[0].stats.metrics()
        assert [metrics[share] for share in ("clip_fraction", "importance_truncated_fraction")] == [
            0,
            0,
        ]
        assert metrics["ess"] == pytest.approx(1)


@few
@given(_near_batch, st.sampled_from(CORRECTIONS), st.sampled_from([0.0, 0.2, 1.0]))
def test_in_the_one_pass_of_an_update_the_clip_acts_under_ratio_alone(
    batch: list[Step], correction: ImportanceSampling, clip: float
) -> None:
    """Set p = q: r is exactly 1, except with `ratio`, whose r is relative to b."""
    assume(correction != "ratio")
    batch = [
        replace(step, tokens=tuple(replace(t, proximal=t.policy) for t in step.tokens))
        for step in batch
    ]
    free = ours(batch, Objective(correction=correction, **NO_CLIP))
    clipped = ours(batch, Objective(correction=correction, clip_low=clip, clip_high=clip))
    assert clipped[1] == free[1]


# --- the defaults, in one formula of tensors ------------------------------------------------------


def in_one_formula(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    reference: torch.Tensor,
    o: Objective,
    tokens: int,
) -> torch.Tensor:
    """Combine truncation by token, PPO's clip and the KL."""
    counts = weights != 0
    policy, proximal, behaviour, reference = (
        torch.where(counts, each, 0.0) for each in (policy, proximal, behaviour, reference)
    )
    ratio = (policy - proximal).clamp(-LIMIT, LIMIT).exp()
    importance = (proximal - behaviour).clamp(-LIMIT, LIMIT).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high) * advantages
    token_loss = -importance.clamp(max=o.importance_cap) * torch.minimum(free, clipped)
    d = (reference - policy).clamp(-LIMIT, LIMIT)
    token_loss = token_loss + o.kl_beta * (d.expm1() - d).clamp(max=10.0)
    return (token_loss * weights).sum() / tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_defaults_are_bit_for_bit_one_formula(dtype: torch.dtype, kl_beta: float) -> None:
    o = Objective(kl_beta=kl_beta)
    dice = torch.Generator().manual_seed(0)
    for size in (1, 7, 64, 1000):
        old_policy, proximal, behaviour, reference = (
            -4 * torch.rand(size, generator=dice, dtype=dtype) for _ in range(4)
        )
        advantages = torch.randn(size, generator=dice, dtype=dtype)
        weights = torch.randint(0, 3, (size,), generator=dice).to(dtype) / 2
        policy = old_policy.clone().requires_grad_()
        old_policy.requires_grad_()
        loss = in_one_formula(
            old_policy, proximal, behaviour, advantages, weights, reference, o, size
        )
        loss.backward()
        output = policy_loss(
            policy, proximal, behaviour, advantages, weights, o,
            divisor=float(size), reference_logprobs=reference,
        )  # fmt: skip
        output.loss.backward()
        assert policy.grad is not None
        assert old_policy.grad is not None
        assert torch.equal(output.loss, loss)
        assert torch.equal(policy.grad, old_policy.grad)


# --- robustness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nats", [-100.0, -30.0, -12.0, -4.0, 0.0, 2.0, 4.0, 8.0, 12.0, 30.0])
def test_one_token_far_from_the_reference_cannot_make_up_an_update(nats: float) -> None:
    """Compare with verl's low_var_kl: k3 clamped to 10 nats, beyond which it has no gradient."""
    policy = torch.tensor([-40.0], dtype=torch.float64, requires_grad=True)
    fixed = policy.detach()
    output = policy_loss(
        policy, fixed, fixed, torch.zeros(1), torch.ones(1), Objective(kl_beta=0.1),
        divisor=1.0, reference_logprobs=fixed + nats,
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    k3 = math.expm1(nats) - nats
    assert output.loss.item() == pytest.approx(0.1 * min(k3, 10.0), rel=1e-12)
    assert output.stats.reference_kl.item() == pytest.approx(min(k3, 10.0), rel=1e-12)
    slope = -0.1 * math.expm1(nats) if k3 <= 10 else 0.0
    assert policy.grad.item() == pytest.approx(slope, rel=1e-9)
    assert abs(policy.grad.item()) < 0.1 * 12.7


def columns32(batch: list[Step]) -> list[torch.Tensor]:
    rows = [
        [t.policy, t.proximal, t.behaviour, s.advantage, s.weight, t.reference, t.entropy]
        for s in batch
        for t in s.tokens
    ]
    return list(torch.tensor(rows, dtype=torch.float32).T.contiguous())


@few
@given(_batch, _objective)
def test_float32_stays_finite_at_any_ratio(batch: list[Step], o: Objective) -> None:
    policy, proximal, behaviour, advantage, weight, reference, entropies = columns32(batch)
    policy = policy.clone().requires_grad_()
    output = policy_loss(
        policy, proximal, behaviour, advantage, weight, o,
        divisor=float(len(policy)), reference_logprobs=reference, entropies=entropies,
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    assert torch.isfinite(output.loss)
    assert torch.isfinite(policy.grad).all()
    assert all(math.isfinite(value) for value in output.stats.metrics().values())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_masked_token_of_impossible_log_probability_does_no_harm(
    correction: ImportanceSampling,
) -> None:
    """Compare with the batch without the masked token."""
    inf = float("-inf")
    results = []
    for length in (2, 3):
        policy = torch.tensor([-1.0, -0.8, inf][:length], requires_grad=True)
        output = policy_loss(
            policy,
            torch.tensor([-1.1, -0.9, inf])[:length],
            torch.tensor([-1.0, -1.0, -1.0])[:length],
            torch.ones(length),
            torch.tensor([1.0, 1.0, 0.0])[:length],
            Objective(correction=correction),
            divisor=2.0,
            entropies=torch.tensor([1.0, 1.0, math.nan])[:length],
        )
        output.loss.backward()
        assert policy.grad is not None
        assert policy.grad[2:].tolist() == [0.0] * (length - 2)
        results.append((output.loss.item(), policy.grad[:2].tolist(), output.stats.metrics()))
    assert results[0] == results[1]


def test_a_kl_without_a_reference_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(one, one, one, one, one, Objective(kl_beta=0.1), divisor=1.0)


def test_statistics_name_every_sum_they_hold() -> None:
    """A field that `+` forgot would show the first micro-batch for all."""
    one = TokenStats(*(torch.tensor(2.0) for _ in fields(TokenStats)))
    assert {part.name: getattr(one + one, part.name).item() for part in fields(one)} == {
        part.name: 2.0 if part.name == "mismatch_max" else 4.0 for part in fields(one)
    }
