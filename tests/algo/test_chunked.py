"""Chunked scores, compared with the dense formula: values, gradients, and saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.algo import chunked
from dart_cli.algo.chunked import token_scores
from dart_cli.policy.forward import masked_logprobs

WIDTH = 6


def drawn(
    count: int,
    vocabulary: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, weight and token ids."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    ids = torch.randint(vocabulary, (count,), generator=generator)
    return normal(count, WIDTH), normal(vocabulary, WIDTH), ids


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * torch.where(logprobs.isneginf(), 0.0, logprobs)).sum(dim=-1)


def dense(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    forbidden: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = masked_logprobs(hidden @ weight.T, torch.as_tensor(forbidden).long(), temperature)
    return logprobs.gather(1, ids[:, None])[:, 0], entropy(logprobs)


def chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    forbidden: Any = (),
    chunk: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    return token_scores(
        hidden,
        weight,
        ids,
        temperature=temperature,
        forbidden=torch.as_tensor(forbidden).long(),
        chunk_tokens=chunk,
    )


def by_both(*arguments: Any, chunk: int) -> list[list[torch.Tensor]]:
    """Return values and gradients, dense and chunked."""
    hidden, weight, ids, *rest = arguments
    result = []
    for scores in (dense(*arguments), chunks(hidden, weight, ids, *rest, chunk)):
        weights = torch.linspace(-1, 2, len(ids), dtype=scores[0].dtype)
        gradients = torch.autograd.grad((scores[0] * weights).sum(), (hidden, weight))
        result.append([*(score.detach() for score in scores), *gradients])
    return result


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_values_and_gradients_are_those_of_the_dense_formula(data: st.DataObject) -> None:
    count, vocabulary = data.draw(st.integers(0, 9)), data.draw(st.integers(2, 17))
    forbidden = data.draw(st.sets(st.integers(0, vocabulary - 1), max_size=vocabulary - 1))
    hidden, weight, ids = drawn(
        count,
        vocabulary,
        seed=data.draw(st.integers(0, 99)),
        scale=data.draw(st.sampled_from([1, 5])),
    )
    allowed = torch.tensor(sorted(set(range(vocabulary)) - forbidden))
    ids = allowed[ids % len(allowed)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "VOCABULARY_CHUNK", data.draw(st.integers(1, 20)))
        expected, result = by_both(
            hidden,
            weight,
            ids,
            data.draw(st.sampled_from([0.3, 1.0, 1.7])),
            sorted(forbidden),
            chunk=data.draw(st.integers(1, 11)),
        )
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not result[3][sorted(forbidden)].any()  # forbidden rows have no gradient


@pytest.mark.parametrize("vocabulary_chunk", [4, 100])
def test_gradients_are_those_of_finite_differences(
    vocabulary_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "VOCABULARY_CHUNK", vocabulary_chunk)
    hidden, weight, ids = drawn(5, 11)
    ids[ids == 3] = 4

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return chunks(hidden, weight, ids, 0.7, [3, 9], 2)[0]

    assert torch.autograd.gradcheck(scores, (hidden, weight))


def test_the_entropy_is_exact_where_logits_are_large() -> None:
    """The log-sum-exp minus the mean logit would lose all but three digits here."""
    hidden, weight = torch.full((1, WIDTH), 100.0), torch.full((4, WIDTH), 100.0)
    weight[0] += 1e-3
    exact = entropy((hidden @ weight.T).double().log_softmax(-1))
    _, result = chunks(hidden, weight, torch.tensor([1]))
    assert abs(result.item() - exact.item()) < 1e-6


def test_a_certain_distribution_has_no_entropy_and_no_nan() -> None:
    hidden, weight, ids = drawn(3, 7, scale=60, dtype=torch.float32)
    logprobs, entropies = chunks(hidden, weight, ids)
    logprobs.sum().backward()
    assert entropies.min() >= -1e-6
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_a_vocabulary_chunk_may_be_forbidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "VOCABULARY_CHUNK", 3)
    hidden, weight, ids = drawn(4, 9)
    for forbidden in ([0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2, 3, 4, 5]):
        allowed = [index for index in range(9) if index not in forbidden]
        token_ids = torch.tensor(allowed)[ids % len(allowed)]
        expected, result = by_both(hidden, weight, token_ids, 1.0, forbidden, chunk=3)
        for mine, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_forbidden_token_has_probability_zero() -> None:
    hidden, weight, _ = drawn(2, 5)
    logprobs, _ = chunks(hidden, weight, torch.tensor([1, 2]), forbidden=[2])
    assert logprobs[1] == -torch.inf
    assert torch.isfinite(logprobs[0])


def test_no_tokens_give_nothing_and_zero_gradients() -> None:
    """A rank without tokens takes part in the others' reductions."""
    hidden, weight, ids = drawn(0, 5)
    logprobs, entropies = chunks(hidden, weight, ids)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_entropies_have_no_gradient() -> None:
    logprobs, entropies = chunks(*drawn(3, 5))
    assert (logprobs.requires_grad, entropies.requires_grad) == (True, False)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, ids = drawn(3, 5)
    inputs = {"hidden": hidden, "weight": weight}
    expected = torch.autograd.grad(dense(hidden, weight, ids, 1.0, ())[0].sum(), (hidden, weight))
    inputs[frozen].requires_grad_(False)
    chunks(hidden, weight, ids)[0].sum().backward()
    assert inputs[frozen].grad is None
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_recorded() -> None:
    with torch.no_grad():
        logprobs, entropies = chunks(*drawn(3, 5))
    assert not logprobs.requires_grad
    assert not entropies.requires_grad


def test_nothing_of_tokens_times_vocabulary_is_kept() -> None:
    count, vocabulary = 64, 300
    hidden, weight, ids = drawn(count, vocabulary)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunks(hidden, weight, ids, chunk=8)[0].sum().backward()
    assert sum(saved) < hidden.numel() + weight.numel() + 4 * count + vocabulary
    assert max(saved) < count * vocabulary


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_bfloat16_is_as_close_to_the_truth_as_the_dense_formula(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "VOCABULARY_CHUNK", 32)
    hidden, weight, ids = drawn(64, 100, dtype=torch.bfloat16)
    ids[ids == 5] = 6
    exact = by_both(
        *(each.detach().double().requires_grad_() for each in (hidden, weight)),
        ids,
        0.7,
        [5],
        chunk=64,
    )[0]
    rounded, result = by_both(hidden, weight, ids, 0.7, [5], chunk=chunk)
    assert [each.dtype for each in result] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for mine, theirs, truth in zip(result, rounded, exact, strict=True):
        far = (theirs.double() - truth).norm().item()
        assert (mine.double() - truth).norm().item() <= 1.3 * far + 1e-6


def test_small_blocks_lose_no_gradient_in_bfloat16() -> None:
    """The sum over 512 blocks of one token each, against the same in one block."""
    hidden, weight, ids = drawn(512, 40, dtype=torch.bfloat16)
    exact = torch.autograd.grad(
        dense(hidden.double(), weight.double(), ids, 1.0, ())[0].sum(), weight
    )[0]
    result = torch.autograd.grad(chunks(hidden, weight, ids, chunk=1)[0].sum(), weight)[0]
    error = (result.double() - exact.double()).norm() / exact.double().norm()
    assert error < 2**-8


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, ids = drawn(3, 5)
    with pytest.raises(ValueError, match=r"\[3, 6\], weight \[5, 6\] and token_ids \[2\]"):
        chunks(hidden, weight, ids[:2])
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunks(hidden, weight, ids, chunk=0)
    with pytest.raises(ValueError, match="temperature"):
        chunks(hidden, weight, ids, temperature=0.0)
