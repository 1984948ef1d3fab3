"""Where a pointer should point, and how far it is from there: targets and losses over the cells of a screen.

    box_target       the same probability for each cell that a box overlaps (GUI-Actor)
    gaussian_target  the mass in each cell of a Gaussian over the box (V2P)
    pointing_kl      KL(t || p) of a target t and the pointer's distribution p
    mass_outside     probability of the cells outside of the target: V2P's suppression

Sources: GUI-Actor, arXiv 2506.03143, section 3.3, and github.com/microsoft/GUI-Actor, src/gui_actor
(`get_multi_patch_labels`, the pointer head's loss); V2P, arXiv 2508.13634, and its released code,
github.com/inclusionAI/AWorld-RL, V2P/src/V2P (`get_multi_patch_labels_gauss`, `negative_loss`).

A box is (left, top, right, bottom) in shares of the screen's sides. The cells are the parts of the
screen that the language model sees, after the patch merger, row by row: P = rows * columns.
"""

from __future__ import annotations

import math

import torch

Shares = tuple[float, float, float, float]
"""Left, top, right, bottom, as shares of the screen's sides."""

GAUSSIAN_WIDTH = 4.1325
"""Length of a side of the box, in standard deviations of the Gaussian; V2P's default."""


def box_target(box: Shares, rows: int, columns: int) -> torch.Tensor:
    """Return the target [P], float64, t = y / sum(y), where y is 1 for each cell that the box overlaps.

    A cell that only touches the box does not overlap it. For a box without area, or beyond the screen, the
    target is the cell that holds its centre.
    """
    wide, high = _overlaps(box, rows, columns)
    return _outer(
        down=[float(overlap > 0) for overlap in high],
        across=[float(overlap > 0) for overlap in wide],
        box=box,
        rows=rows,
        columns=columns,
    )


def gaussian_target(
    box: Shares, rows: int, columns: int, width: float = GAUSSIAN_WIDTH
) -> torch.Tensor:
    """Return the target [P], float64: the mass in each cell of a Gaussian over the box, cut off at its sides.

    The Gaussian's mean is the box's centre. Its standard deviation along an axis is the side / `width`:

        y = [Phi(x1) - Phi(x0)] [Phi(y1) - Phi(y0)]  over the cell's part of the box, t = y / sum(y)
    """
    left, top, right, bottom = (min(max(side, 0.0), 1.0) for side in box)

    def masses(low: float, high: float, cells: int) -> list[float]:
        """Return the mass of the Gaussian over [low, high] in each of `cells` cells of one axis."""
        length, middle = high - low, (low + high) / 2
        return [
            _normal((min(high, (i + 1) / cells) - middle) / (length / width))
            - _normal((max(low, i / cells) - middle) / (length / width))
            if min(high, (i + 1) / cells) > max(low, i / cells)
            else 0.0
            for i in range(cells)
        ]

    return _outer(
        down=masses(top, bottom, rows),
        across=masses(left, right, columns),
        box=box,
        rows=rows,
        columns=columns,
    )


def pointing_kl(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(t || p) [N], nats, of targets [N, P] and p = softmax(logits [N, P]).

    GUI-Actor's L_ptr is its mean over pointers. A cell with t = 0 adds nothing to it.
    """
    target = target.to(logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    return (torch.xlogy(target, target) - target * logprobs).sum(dim=-1)


def mass_outside(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the probability [N] of the cells with t = 0; V2P adds it to the KL to empty the background.

    Its gradient with respect to a logit is p (outside - mass), with `outside` 1 for such a cell and 0 for
    the others.
    """
    outside = (target == 0).to(logits)
    return (torch.softmax(logits, dim=-1) * outside).sum(dim=-1)


def _overlaps(box: Shares, rows: int, columns: int) -> tuple[list[float], list[float]]:
    """Return the overlap of the box with each column and each row, in shares of the screen; <= 0 for none."""
    left, top, right, bottom = box
    wide = [min(right, (i + 1) / columns) - max(left, i / columns) for i in range(columns)]
    high = [min(bottom, (i + 1) / rows) - max(top, i / rows) for i in range(rows)]
    return wide, high


def _outer(
    *, down: list[float], across: list[float], box: Shares, rows: int, columns: int
) -> torch.Tensor:
    """Return the products of the values of rows and columns [P], scaled to sum 1.

    If all are 0, return 1 for the cell that holds the centre of the box.
    """
    target = torch.outer(
        torch.tensor(down, dtype=torch.float64), torch.tensor(across, dtype=torch.float64)
    ).flatten()
    total = float(target.sum())
    if total > 0:
        return target / total
    left, top, right, bottom = box
    row = min(max(math.floor((top + bottom) / 2 * rows), 0), rows - 1)
    column = min(max(math.floor((left + right) / 2 * columns), 0), columns - 1)
    target = torch.zeros(rows * columns, dtype=torch.float64)
    target[row * columns + column] = 1.0
    return target


def _normal(z: float) -> float:
    """Return the standard normal distribution function at `z`."""
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
