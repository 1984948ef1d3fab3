"""The teacher's part of an advantage: its expected gradient by enumeration, and each token's gradient.

A vocabulary of three tokens and completions of three make 27 completions, so an expectation is a sum. The
student's logits at a prefix come from parameters that all prefixes share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.algo.loss import LossOutput, policy_loss
from dart_cli.algo.objective import LOG_RATIO_LIMIT, ImportanceSampling, Objective

VOCABULARY, LENGTH = 3, 3
Gap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(policy, teacher, behaviour) log-probabilities -> the advantage of a token."""

few = settings(max_examples=40)


def features(prefix: tuple[int, ...]) -> torch.Tensor:
    """Return what the logits after a prefix are a linear function of."""
    values = [1.0, len(prefix) / 2, sum(prefix) / 3, float(prefix[-1] == 1) if prefix else 0.5]
    return torch.tensor(values, dtype=torch.float64)


def model(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, VOCABULARY, generator=draw, dtype=torch.float64)


def table(parameters: torch.Tensor, prefix: tuple[int, ...]) -> torch.Tensor:
    return (features(prefix) @ parameters).log_softmax(-1)


def logprobs(parameters: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([table(parameters, tokens[:at])[token] for at, token in enumerate(tokens)])


def completions(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(VOCABULARY), repeat=length)


def expected(
    student: torch.Tensor,
    teacher: torch.Tensor,
    behaviour: torch.Tensor,
    objective: Objective,
    length: int = LENGTH,
    advantage: float = 0.0,
    baseline: float = 0.0,
) -> torch.Tensor:
    """Return the mean gradient of `policy_loss` over completions that `behaviour` draws."""
    parameters = student.clone().requires_grad_()
    for tokens in completions(length):
        policy, drawn_from = logprobs(parameters, tokens), logprobs(behaviour, tokens)
        one = torch.ones_like(drawn_from)
        output = policy_loss(
            policy, policy.detach(), drawn_from, advantage * one, one, objective,
            divisor=1.0, teacher_logprobs=logprobs(teacher, tokens), teacher_baseline=baseline,
        )  # fmt: skip
        (output.loss * drawn_from.sum().exp()).backward()
    assert parameters.grad is not None
    return parameters.grad


def gradient_of_kl(
    student: torch.Tensor, teacher: torch.Tensor, prefixes_from: torch.Tensor, length: int = LENGTH
) -> torch.Tensor:
    """Return the gradient of the reverse KL of each next token, after prefixes that another model drew."""
    parameters = student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for size in range(length):
        for prefix in completions(size):
            weight = logprobs(prefixes_from, prefix).sum().exp() if prefix else 1.0
            mine = table(parameters, prefix)
            total = total + weight * (mine.exp() * (mine - table(teacher, prefix))).sum()
    total.backward()
    assert parameters.grad is not None
    return parameters.grad


def gradient_of_whole_kl(
    student: torch.Tensor, teacher: torch.Tensor, length: int = LENGTH
) -> torch.Tensor:
    """Return the gradient of KL(student || teacher) of whole completions."""
    parameters = student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for tokens in completions(length):
        mine = logprobs(parameters, tokens).sum()
        total = total + mine.exp() * (mine - logprobs(teacher, tokens).sum())
    total.backward()
    assert parameters.grad is not None
    return parameters.grad


ALONE = Objective(teacher_weight=1.0)
UNBOUNDED: dict[str, Any] = {"importance_cap": 1e9, "clip_low": 1.0, "clip_high": 1e9}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_its_mean_is_the_gradient_of_the_reverse_kl_of_each_token(seed: int) -> None:
    student, teacher = model(seed), model(seed + 100)
    assert close(
        expected(student, teacher, student, ALONE), gradient_of_kl(student, teacher, student)
    )


@pytest.mark.parametrize("seed", range(3))
def test_of_one_token_it_is_the_gradient_of_the_whole_kl(seed: int) -> None:
    student, teacher = model(seed), model(seed + 100)
    mean = expected(student, teacher, student, ALONE, length=1)
    assert close(mean, gradient_of_whole_kl(student, teacher, length=1))


def test_of_several_tokens_the_whole_kl_adds_what_later_tokens_owe_to_earlier_ones() -> None:
    """The part that is left out: each token's log-probability times the gaps of the tokens after it."""
    student, teacher = model(0), model(100)
    parameters = student.clone().requires_grad_()
    for tokens in completions(LENGTH):
        mine = logprobs(parameters, tokens)
        gaps = mine.detach() - logprobs(teacher, tokens)
        later = gaps.sum() - gaps.cumsum(0)
        ((mine * later).sum() * mine.detach().sum().exp()).backward()
    assert parameters.grad is not None
    assert parameters.grad.abs().max() > 0.01
    mean = expected(student, teacher, student, ALONE)
    assert close(mean + parameters.grad, gradient_of_whole_kl(student, teacher))


@pytest.mark.parametrize("correction", ["truncated", "ratio"])
def test_importance_weights_correct_tokens_of_older_weights(correction: ImportanceSampling) -> None:
    """The prefixes stay those of the older weights, as for rewards."""
    student, teacher, older = model(1), model(101), model(201)
    objective = Objective(teacher_weight=1.0, correction=correction, **UNBOUNDED)
    mean = expected(student, teacher, older, objective)
    assert close(mean, gradient_of_kl(student, teacher, older))


@pytest.mark.parametrize("correction", ["truncated", "ratio"])
def test_a_baseline_changes_no_mean_where_weights_are_exact(correction: ImportanceSampling) -> None:
    student, teacher, older = model(1), model(101), model(201)
    objective = Objective(teacher_weight=1.0, correction=correction, **UNBOUNDED)
    mean = expected(student, teacher, older, objective, baseline=-1.3)
    assert close(mean, gradient_of_kl(student, teacher, older))


def test_truncated_weights_make_a_bias_of_a_constant_which_the_baseline_removes() -> None:
    """Draw the teacher's log-probabilities as the student's plus a constant: there is nothing to learn.

    No distribution has them; a constant is what is left of a gap beside its spread.
    """
    student, older = model(1), model(201)
    parameters = student.clone().requires_grad_()
    sizes = []
    for baseline in (0.0, -1.3):
        parameters.grad = None
        for tokens in completions(LENGTH):
            policy, behaviour = logprobs(parameters, tokens), logprobs(older, tokens)
            one = torch.ones_like(behaviour)
            output = policy_loss(
                policy, policy.detach(), behaviour, one, one, ALONE,
                divisor=1.0, teacher_logprobs=policy.detach() - 1.3, teacher_baseline=baseline,
            )  # fmt: skip
            (output.loss * behaviour.sum().exp()).backward()
        assert parameters.grad is not None
        sizes.append(parameters.grad.norm().item())
    assert sizes[0] > 0.05
    assert sizes[1] < 1e-12


def test_the_reward_and_the_teacher_share_an_advantage() -> None:
    """A constant advantage has no mean gradient; of 0.25 and 0.75 the teacher's share remains."""
    student, teacher = model(2), model(102)
    objective = Objective(teacher_weight=0.25)
    mean = expected(student, teacher, student, objective, advantage=3.0)
    assert close(mean, 0.25 * gradient_of_kl(student, teacher, student))


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    student = model(3)
    assert torch.equal(expected(student, student, student, ALONE), torch.zeros_like(student))


# --- formulas that are wrong, which the comparisons above must tell from ours ---------------------

WRONG: dict[str, Gap] = {
    "sign": lambda policy, teacher, _: policy - teacher,
    "behaviour in place of the present weights": lambda _, teacher, behaviour: teacher - behaviour,
    "no student": lambda _, teacher, __: teacher,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_formula_has_another_mean(name: str) -> None:
    student, teacher, older = model(1), model(101), model(201)
    parameters = student.clone().requires_grad_()
    for tokens in completions(LENGTH):
        policy, behaviour = logprobs(parameters, tokens), logprobs(older, tokens)
        advantages = WRONG[name](policy.detach(), logprobs(teacher, tokens), behaviour)
        one = torch.ones_like(behaviour)
        output = policy_loss(
            policy, policy.detach(), behaviour, advantages, one, Objective(**UNBOUNDED), divisor=1.0
        )
        (output.loss * behaviour.sum().exp()).backward()
    assert parameters.grad is not None
    assert not torch.allclose(parameters.grad, gradient_of_kl(student, teacher, older), rtol=0.05)


def test_teacher_and_student_exchanged_have_another_mean() -> None:
    student, teacher = model(1), model(101)
    right = gradient_of_kl(student, teacher, student)
    exchanged = expected(teacher, student, teacher, ALONE)
    assert not torch.allclose(exchanged, right, rtol=0.05)
    parameters = (
        student.clone().requires_grad_()
    )  # the forward KL, of which the student is the second
    total = torch.zeros((), dtype=torch.float64)
    for prefix in itertools.chain.from_iterable(map(completions, range(LENGTH))):
        weight = logprobs(student, prefix).sum().exp() if prefix else 1.0
        theirs = table(teacher, prefix)
        total = total + weight * (theirs.exp() * (theirs - table(parameters, prefix))).sum()
    total.backward()
    assert parameters.grad is not None
    assert not torch.allclose(parameters.grad, right, rtol=0.05)


# --- each token ------------------------------------------------------------------------------------


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_by_one(
    policy: torch.Tensor, teacher: torch.Tensor, objective: Objective, **more: Any
) -> LossOutput:
    one = torch.ones_like(teacher)
    numbers = {"advantages": 0.5 * one, "behaviour": policy.detach() - 0.1, "weights": one} | more
    return policy_loss(
        policy, policy.detach(), numbers["behaviour"], numbers["advantages"], numbers["weights"], objective,
        divisor=1.0, teacher_logprobs=teacher, unknown=more.get("unknown"),
    )  # fmt: skip


TOKENS = st.lists(
    st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.floats(-2, 2), st.floats(-3, 3)),
    min_size=1,
    max_size=8,
)


@few
@given(TOKENS, st.floats(0, 1), st.sampled_from(get_args(ImportanceSampling)))
def test_the_gradient_of_a_token_is_its_weight_times_its_advantage(
    tokens: list[tuple[float, float, float, float]], share: float, kind: ImportanceSampling
) -> None:
    """Without a gradient through the gap: with one, each would have `share` more.

    The means above cannot show that, since the mean gradient of a log-probability is 0.
    """
    own, theirs, drifts, rewards = (double(list(column)) for column in zip(*tokens, strict=True))
    policy = own.clone().requires_grad_()
    objective = Objective(teacher_weight=share, correction=kind, clip_low=1.0, clip_high=1e9)
    output = one_by_one(policy, theirs, objective, behaviour=own - drifts, advantages=rewards)
    output.loss.backward()
    assert policy.grad is not None
    for slope, (p, t, drift, reward) in zip(policy.grad.tolist(), tokens, strict=True):
        gap = max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, t - p))
        weight = {"truncated": min(math.exp(drift), 1.0), "none": 1.0, "ratio": math.exp(drift)}
        advantage = (1 - share) * reward + share * gap
        assert slope == pytest.approx(-weight[kind] * advantage, rel=1e-9, abs=1e-12)


def test_demonstrations_and_masked_tokens_have_no_teachers_part() -> None:
    policy = double([-1.0, -1.0, -1.0]).requires_grad_()
    output = one_by_one(
        policy, double([-0.5, -0.5, -math.inf]), Objective(teacher_weight=0.25),
        weights=double([1.0, 1.0, 0.0]), unknown=torch.tensor([False, True, False]),
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    drawn = -(0.75 * 0.5 + 0.25 * 0.5)
    assert policy.grad.tolist() == pytest.approx([drawn, -0.75 * 0.5, 0.0])
    metrics = output.stats.metrics()
    assert metrics["teacher_gap"] == pytest.approx(0.5)
    assert metrics["teacher_clip_fraction"] == 0


def test_metrics_count_the_tokens_that_a_teacher_scored() -> None:
    policy = double([-1.0, -2.0, -0.5]).requires_grad_()
    metrics = one_by_one(policy, double([-2.0, -1.5, -30.0]), ALONE).stats.metrics()
    assert metrics["teacher_gap"] == pytest.approx((-1.0 + 0.5 - 29.5) / 3)
    assert metrics["teacher_clip_fraction"] == pytest.approx(1 / 3)
    one = torch.ones(1)
    without = policy_loss(one, one, one, one, one, Objective(), divisor=1.0).stats.metrics()
    assert not [name for name in without if name.startswith("teacher")]


def test_a_share_without_a_teacher_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="teacher_logprobs"):
        policy_loss(one, one, one, one, one, ALONE, divisor=1.0)


# --- TRL -------------------------------------------------------------------------------------------


def test_the_mean_is_the_gradient_of_trls_loss() -> None:
    """TRL's GKD loss with beta 1 is the reverse KL over the whole vocabulary, after each drawn prefix."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="no trl: pip install -e '.[parity]'")
    student, teacher = model(5), model(105)
    parameters = student.clone().requires_grad_()
    for tokens in completions(LENGTH):
        prefixes = [tokens[:at] for at in range(LENGTH)]
        mine, theirs = (
            torch.stack([features(prefix) @ weights for prefix in prefixes])[None]
            for weights in (parameters, teacher)
        )
        loss = gkd.GKDTrainer.generalized_jsd_loss(mine, theirs, beta=1, reduction="sum")
        (loss * logprobs(student, tokens).sum().exp()).backward()
    assert parameters.grad is not None
    assert close(expected(student, teacher, student, ALONE), parameters.grad)
