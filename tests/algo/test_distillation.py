"""The teacher's part of the loss: its gradient by enumeration, and over blocks of a vocabulary by brute force.

A vocabulary of three tokens and completions of three make 27 completions, so an expectation is a sum. The
student's logits at a prefix come from parameters that all prefixes share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.algo import chunked
from dart_cli.algo.chunked import taught_scores, token_scores
from dart_cli.algo.loss import policy_loss
from dart_cli.algo.objective import ImportanceSampling, Objective

VOCABULARY, LENGTH = 3, 3
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(policy, teacher) log-probabilities [V] -> what takes the place of the gap."""

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


def gap_of(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (mine.exp() * (theirs - mine)).sum()


def expected(
    student: torch.Tensor,
    teacher: torch.Tensor,
    behaviour: torch.Tensor,
    objective: Objective,
    length: int = LENGTH,
    advantage: float = 0.0,
    gap: Change = gap_of,
) -> torch.Tensor:
    """Return the mean gradient of `policy_loss` over completions that `behaviour` draws."""
    parameters = student.clone().requires_grad_()
    for tokens in completions(length):
        policy, drawn_from = logprobs(parameters, tokens), logprobs(behaviour, tokens)
        one = torch.ones_like(drawn_from)
        prefixes = [tokens[:at] for at in range(length)]
        gaps = [gap(table(parameters, each), table(teacher, each)) for each in prefixes]
        output = policy_loss(
            policy, policy.detach(), drawn_from, advantage * one, one, objective,
            divisor=1.0, teacher_gaps=torch.stack(gaps),
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
    """What is left out: each token's log-probability times the gaps of the tokens after it."""
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


@pytest.mark.parametrize("correction", get_args(ImportanceSampling))
def test_prefixes_of_older_weights_need_no_weight(correction: ImportanceSampling) -> None:
    """The prefixes stay those of the older weights, as for rewards; the KL after each is exact."""
    student, teacher, older = model(1), model(101), model(201)
    objective = Objective(teacher_weight=1.0, correction=correction)
    mean = expected(student, teacher, older, objective)
    assert close(mean, gradient_of_kl(student, teacher, older))


def test_each_completion_has_the_mean_of_what_a_draw_of_its_tokens_would_have() -> None:
    """The sampled KL: the advantage of a drawn token is log t - log p; its mean is ours, its spread is not."""
    student, teacher = model(4), model(104)
    exact, mean = expected(student, teacher, student, ALONE, length=1), torch.zeros_like(student)
    spread = 0.0
    for (token,) in completions(1):
        parameters = student.clone().requires_grad_()
        mine = table(parameters, ())
        advantage = (table(teacher, ()) - mine)[token].detach()
        (-advantage * mine[token]).backward()
        assert parameters.grad is not None
        probability = mine[token].exp().item()
        mean += probability * parameters.grad
        spread += probability * (parameters.grad - exact).square().sum().item()
    assert close(mean, exact)
    assert spread > 0.01


def test_the_reward_and_the_teacher_share_an_advantage() -> None:
    """A constant advantage has no mean gradient; of 0.25 and 0.75 the teacher's share remains."""
    student, teacher = model(2), model(102)
    objective = Objective(teacher_weight=0.25)
    mean = expected(student, teacher, student, objective, advantage=3.0)
    assert close(mean, 0.25 * gradient_of_kl(student, teacher, student))


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    student = model(3)
    assert expected(student, student, student, ALONE).abs().max() < 1e-14


# --- formulas that are wrong, which the comparisons above must tell from ours ---------------------

WRONG: dict[str, Change] = {
    "sign": lambda mine, theirs: -gap_of(mine, theirs),
    "no student": lambda mine, theirs: (mine.exp() * theirs).sum(),
    "the forward KL": lambda mine, theirs: (theirs.exp() * (mine - theirs)).sum(),
    "probabilities without gradient": lambda mine, theirs: (
        mine.detach().exp() * (theirs - mine)
    ).sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_formula_has_another_gradient(name: str) -> None:
    student, teacher, older = model(1), model(101), model(201)
    mean = expected(student, teacher, older, ALONE, gap=WRONG[name])
    assert not torch.allclose(mean, gradient_of_kl(student, teacher, older), rtol=0.05)


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


def test_a_token_has_its_share_of_the_reward_and_of_the_kl() -> None:
    """Tokens that are masked, or that no teacher scored, have no KL; a demonstration has one."""
    policy = double([-1.0, -1.0, -1.0, -1.0]).requires_grad_()
    gaps = double([-0.5, -0.25, -2.0, float("nan")]).requires_grad_()
    one = torch.ones(4, dtype=torch.float64)
    output = policy_loss(
        policy, policy.detach(), policy.detach(), 0.5 * one, double([1.0, 2.0, 1.0, 0.0]),
        Objective(teacher_weight=0.25), divisor=4.0, teacher_gaps=gaps,
        taught=torch.tensor([True, True, False, True]),
        unknown=torch.tensor([False, True, False, False]),
    )  # fmt: skip
    output.loss.backward()
    assert policy.grad is not None
    assert gaps.grad is not None
    reward = -0.75 * 0.5 / 4
    assert policy.grad.tolist() == pytest.approx([reward, 2 * reward, reward, 0.0])
    assert gaps.grad.tolist() == pytest.approx([-0.25 / 4, -0.5 / 4, 0.0, 0.0])
    metrics = output.stats.metrics()
    assert metrics["teacher_gap"] == pytest.approx((-0.5 - 0.25) / 2)
    assert metrics["taught_fraction"] == pytest.approx(2 / 3)


def test_without_a_teacher_there_are_no_metrics_of_one() -> None:
    one = torch.ones(1)
    without = policy_loss(one, one, one, one, one, Objective(), divisor=1.0).stats.metrics()
    assert not [name for name in without if name.startswith(("teacher", "taught"))]


def test_a_share_without_a_teacher_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="teacher_gaps"):
        policy_loss(one, one, one, one, one, ALONE, divisor=1.0)


# --- over blocks of a vocabulary -------------------------------------------------------------------


def states(seed: int, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def by_brute_force(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    theirs: tuple[torch.Tensor, torch.Tensor],
    forbidden: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return -KL(policy || teacher) [N] from the logits of all tokens that may be drawn."""
    allowed = torch.ones(len(weight), dtype=torch.bool).index_fill(0, forbidden, value=False)
    mine = (hidden @ weight[allowed].T / temperature).log_softmax(-1)
    shortest = allowed[: len(theirs[1])]
    other = (theirs[0] @ theirs[1][: len(allowed)][shortest].T / temperature).log_softmax(-1)
    return (mine.exp() * (other - mine)).sum(-1)


@few
@given(
    st.integers(0, 2**20),
    st.integers(1, 9),
    st.integers(2, 23),
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, 5),
)
def test_gaps_in_blocks_are_those_of_brute_force(
    seed: int, count: int, vocabulary: int, extra: int, temperature: float, chunk: int
) -> None:
    """Values and gradients; heads of other widths and rows, whole blocks forbidden, in blocks of 5 tokens."""
    hidden, weight = states(seed, count, 6), states(seed + 1, vocabulary + 5, 6)
    theirs = states(seed + 2, count, 4), states(seed + 3, vocabulary + extra, 4)
    forbidden = torch.arange(vocabulary, vocabulary + 5)
    ids = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    factors, others = states(seed + 4, count), states(seed + 5, count)
    results = []
    for is_ours in (True, False):
        own, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options: dict[str, Any] = {"temperature": temperature, "forbidden": forbidden}
        logprobs, entropies = token_scores(own, head, ids, **options)
        if is_ours:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chunked, "VOCABULARY_CHUNK", 5)
                scores = taught_scores(own, head, ids, *theirs, **options, chunk_tokens=chunk)
                own_logprobs, own_entropies, gaps = scores
                assert torch.allclose(own_logprobs, logprobs, rtol=1e-12)
                assert torch.allclose(own_entropies, entropies, rtol=1e-9, atol=1e-12)
                ((gaps * factors).sum() + (own_logprobs * others).sum()).backward()
        else:
            gaps = by_brute_force(own, head, theirs, forbidden, temperature)
            ((gaps * factors).sum() + (logprobs * others).sum()).backward()
        assert own.grad is not None
        assert head.grad is not None
        results.append((gaps.detach(), own.grad, head.grad))
    for ours, theirs_ in zip(*results, strict=True):
        assert torch.allclose(ours, theirs_, rtol=1e-9, atol=1e-12)


def test_a_teacher_that_lacks_a_token_or_fits_no_state_is_refused() -> None:
    hidden, weight, ids = states(0, 2, 3), states(1, 7, 3), torch.tensor([0, 1])
    options: dict[str, Any] = {"temperature": 1.0, "forbidden": torch.tensor([6])}
    with pytest.raises(ValueError, match="lacks rows of tokens"):
        taught_scores(hidden, weight, ids, states(2, 2, 4), states(3, 5, 4), **options)
    with pytest.raises(ValueError, match="the teacher's states"):
        taught_scores(hidden, weight, ids, states(2, 2, 4), states(3, 7, 5), **options)
    with pytest.raises(ValueError, match="the teacher's states"):
        taught_scores(hidden, weight, ids, states(2, 3, 4), states(3, 7, 4), **options)


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
