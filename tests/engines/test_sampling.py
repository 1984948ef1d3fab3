from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dart_cli.engines import sampling
from dart_cli.engines.sampling import GROUP, draw, entropies, sample, uniform_numbers


def test_numbers_of_a_seed_are_the_same_however_many_positions_there_are() -> None:
    assert np.array_equal(uniform_numbers(7, 5), uniform_numbers(7, 50)[:5])
    assert not np.array_equal(uniform_numbers(7, 5), uniform_numbers(8, 5))


def test_tokens_come_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    count = 20_000
    drawn = draw(probabilities.expand(count, -1), torch.from_numpy(uniform_numbers(1, count)))
    seen = torch.bincount(drawn, minlength=4).double() / count
    assert seen[1] == 0
    assert torch.allclose(seen, probabilities, atol=0.02)


def test_the_ends_of_the_unit_interval_draw_tokens_that_are_possible() -> None:
    row = torch.tensor([[0.0, 0.25, 0.75, 0.0]], dtype=torch.float64)
    for number, token in ((0.0, 1), (0.2499, 1), (0.2501, 2), (math.nextafter(1.0, 0.0), 2)):
        assert int(draw(row, torch.tensor([number], dtype=torch.float64))) == token


def test_entropies_leave_out_impossible_tokens() -> None:
    rows = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([math.log(2), 0.0], dtype=torch.float64)
    assert torch.allclose(entropies(rows, rows.log()), expected)


def test_rows_that_are_drawn_in_parts_have_the_same_numbers_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = 3 * torch.randn(7, 500, generator=torch.Generator().manual_seed(0))
    arguments = (
        values,
        [float(number) for number in uniform_numbers(5, 7)],
        [0.0, 1.0, 0.7, 1.0, 2.0, 0.0, 1.0],
        torch.tensor([3, 4]),
        torch.arange(7),
    )
    whole = sample(*arguments)
    most: list[int] = []
    inner = sampling._sample
    monkeypatch.setattr(
        sampling, "_sample", lambda part, *rest: [most.append(len(part)), *inner(part, *rest)][1:]
    )
    for limit, rows in ((1100, 2), (3, 1), (3500, 7)):
        monkeypatch.setattr(sampling, "PART", limit)
        most.clear()
        assert sample(*arguments) == whole
        assert max(most) == rows
    assert [whole[0].token, whole[5].token] == [0, 5]


VOCABULARY = 152_064


def logprobs_of(spread: float, rows: int, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, vocabulary, generator=generator)).log_softmax(dim=-1)


def exact_cdf(logprobs: torch.Tensor) -> torch.Tensor:
    """The cumulative distribution [B, V] in float64, its last value 1."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    return cumulative / cumulative[:, -1:]


def largest_miss(cdf: torch.Tensor, drawn: torch.Tensor, uniform: torch.Tensor) -> float:
    """How far the number of any row is outside its token's part of the cdf."""
    above = cdf.gather(1, drawn[:, None])[:, 0]
    below = torch.where(drawn > 0, cdf.gather(1, (drawn - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return float(torch.maximum(below - uniform, uniform - above).max())


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 10.0])
def test_draws_in_float32_are_those_of_float64_over_a_whole_vocabulary(spread: float) -> None:
    others = coarse = 0
    for seed in range(4):
        logprobs = logprobs_of(spread, 1, seed)
        cdf, probabilities = exact_cdf(logprobs), logprobs.exp()
        running = probabilities.cumsum(dim=-1)
        uniform = torch.from_numpy(uniform_numbers(seed, 1000))
        drawn = torch.cat([draw(probabilities, one[None]) for one in uniform])
        rows = cdf.expand(len(uniform), -1)
        expected = torch.searchsorted(cdf[0], uniform, right=True)
        others += int((drawn != expected).sum())
        plain = torch.searchsorted(running[0], (uniform * running[0, -1]).float(), right=True)
        coarse += int((plain != expected).sum())
        assert largest_miss(rows, drawn, uniform) < 1e-7
    assert others <= 4  # of 4000: where the number is as near to a border as float32 tells apart
    assert coarse > 4 or spread > 3  # of a running sum in float32


@pytest.mark.parametrize("distance", [1e-7, -1e-7, 1e-12, -1e-12])
def test_numbers_next_to_a_border_draw_one_of_its_tokens(distance: float) -> None:
    logprobs = logprobs_of(3.0, 64, 5, 9_000)
    cdf = exact_cdf(logprobs)
    border = torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(1))
    uniform = (cdf.gather(1, border)[:, 0] + distance).clamp(0, math.nextafter(1.0, 0.0))
    assert largest_miss(cdf, draw(logprobs.exp(), uniform), uniform) < 1e-7


@pytest.mark.parametrize("vocabulary", [1, 5, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 7])
def test_a_vocabulary_of_any_size_is_drawn_from_to_its_last_token(vocabulary: int) -> None:
    logprobs = logprobs_of(1.0, 1, 2, vocabulary).double()
    cdf = exact_cdf(logprobs)[0]
    middles = (cdf + torch.cat([torch.zeros(1), cdf[:-1]])) / 2
    drawn = draw(logprobs.exp().expand(vocabulary, -1), middles)
    assert drawn.tolist() == list(range(vocabulary))


def test_a_token_of_probability_zero_is_never_drawn_at_any_number() -> None:
    probabilities = logprobs_of(2.0, 1, 3, 40 * GROUP).exp()
    probabilities[:, torch.arange(40 * GROUP) % 3 != 1] = 0.0
    probabilities[:, 10 * GROUP : 30 * GROUP] = 0.0
    borders = exact_cdf(probabilities.log())[0].unique()
    near = torch.cat([borders + each for each in (-1e-9, -1e-16, 0.0, 1e-16, 1e-9)])
    uniform = near.clamp(0, math.nextafter(1.0, 0.0))
    drawn = draw(probabilities.expand(len(uniform), -1), uniform)
    assert bool((probabilities[0, drawn] > 0).all())


@pytest.mark.parametrize("spread", [0.0, 3.0, 10.0])
def test_entropies_in_float32_are_within_a_millionth_of_float64(spread: float) -> None:
    logprobs = logprobs_of(spread, 4, 7)
    logprobs[:, 5:900] = float("-inf")
    precise = logprobs.double()
    expected = -(precise.exp() * precise.masked_fill(precise.isinf(), 0.0)).sum(dim=-1)
    assert torch.allclose(entropies(logprobs.exp(), logprobs), expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_tokens_of_the_cpu() -> None:
    logprobs = logprobs_of(3.0, 64, 9)
    uniform = torch.from_numpy(uniform_numbers(1, 64))
    device = torch.device("cuda")
    drawn = draw(logprobs.to(device).exp(), uniform.to(device)).cpu()
    assert largest_miss(exact_cdf(logprobs), drawn, uniform) < 1e-7
