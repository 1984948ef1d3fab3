from __future__ import annotations

import math

import numpy as np
import torch

from dart_cli.engines.inverse_cdf import draw, entropies, uniform_numbers


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
