"""Targets and losses of pointing, compared with independent computations: pixels, sampling, numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dart_cli.algo.pointing import (
    GAUSSIAN_WIDTH,
    box_target,
    gaussian_target,
    mass_outside,
    pointing_kl,
)

CELL = 7  # pixels


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    st.tuples(st.integers(0, 41), st.integers(0, 34)),
    st.tuples(st.integers(1, 42), st.integers(1, 35)),
)
def test_cells_with_a_pixel_of_the_box_share_its_target_alike(
    grid: tuple[int, int], corner: tuple[int, int], side: tuple[int, int]
) -> None:
    rows, columns = grid
    x0, y0 = min(corner[0], columns * CELL - 1), min(corner[1], rows * CELL - 1)
    x1, y1 = min(x0 + side[0], columns * CELL), min(y0 + side[1], rows * CELL)
    pixels = np.zeros((rows * CELL, columns * CELL))
    pixels[y0:y1, x0:x1] = 1
    cells = pixels.reshape(rows, CELL, columns, CELL).max(axis=(1, 3))
    box = (x0 / (columns * CELL), y0 / (rows * CELL), x1 / (columns * CELL), y1 / (rows * CELL))
    np.testing.assert_allclose(
        box_target(box, rows, columns).numpy(), (cells / cells.sum()).ravel(), atol=1e-15
    )


def test_the_mass_of_a_bell_in_the_box_is_that_of_points_drawn_from_it() -> None:
    rng = np.random.default_rng(0)
    left, top, right, bottom = 0.13, 0.3, 0.61, 0.97
    count = 1_000_000
    x = rng.normal((left + right) / 2, (right - left) / GAUSSIAN_WIDTH, count)
    y = rng.normal((top + bottom) / 2, (bottom - top) / GAUSSIAN_WIDTH, count)
    inside = (x > left) & (x < right) & (y > top) & (y < bottom)
    drawn, _, _ = np.histogram2d(y[inside], x[inside], bins=(5, 4), range=((0, 1), (0, 1)))
    target = gaussian_target((left, top, right, bottom), 5, 4).reshape(5, 4).numpy()
    np.testing.assert_allclose(target, drawn / inside.sum(), atol=0.002)
    assert target[0].sum() == 0.0  # no cell beside the box has any


def test_a_wider_bell_is_flatter() -> None:
    box = (0.0, 0.0, 1.0, 1.0)
    assert gaussian_target(box, 3, 3, width=1.0).max() < gaussian_target(box, 3, 3, width=4.0).max()


@pytest.mark.parametrize("make", [box_target, gaussian_target])
def test_a_box_without_area_or_beyond_the_screen_is_in_one_cell(make: object) -> None:
    for box, cell in [
        ((0.5, 0.5, 0.5, 0.5), 3),
        ((0.2, 0.7, 0.2, 0.9), 2),
        ((1.2, -0.4, 1.4, -0.2), 1),
    ]:
        target = make(box, 2, 2)  # type: ignore[operator]
        assert target.argmax() == cell
        assert target.sum() == target.max() == 1.0


def _case() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return logits and targets [3, 6]; one target has a single cell, one has all."""
    rng = np.random.default_rng(3)
    target = np.array([[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]], float)
    return rng.normal(size=(3, 6)) * 3, target / target.sum(axis=1, keepdims=True)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: NDArray[np.float64] = e / e.sum(axis=1, keepdims=True)
    return result


def test_the_divergence_and_its_gradient_are_those_of_plain_formulas() -> None:
    logits, target = _case()
    p = _softmax(logits)
    expected = [
        sum(t * np.log(t / q) for t, q in zip(ts, qs, strict=True) if t > 0)
        for ts, qs in zip(target, p, strict=True)
    ]
    inputs = torch.tensor(logits, requires_grad=True)
    results = pointing_kl(inputs, torch.tensor(target))
    results.sum().backward()
    np.testing.assert_allclose(results.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(inputs.grad, p - target, atol=1e-14)


def test_the_mass_outside_and_its_gradient_are_those_of_plain_formulas() -> None:
    logits, target = _case()
    outside = target == 0
    p = _softmax(logits)
    expected = (p * outside).sum(axis=1)
    inputs = torch.tensor(logits, requires_grad=True)
    results = mass_outside(inputs, torch.tensor(target))
    results.sum().backward()
    np.testing.assert_allclose(results.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(inputs.grad, p * (outside - expected[:, None]), atol=1e-14)
    assert results[2] == 0.0


def test_losses_are_in_the_precision_of_the_logits() -> None:
    logits, target = (torch.tensor(each) for each in _case())
    assert pointing_kl(logits.float(), target).dtype == torch.float32
    assert mass_outside(logits.float(), target).dtype == torch.float32
