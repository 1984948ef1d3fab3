"""Muon: each step of a matrix is its momentum, made orthogonal (https://kellerjordan.github.io/posts/muon).

`torch.optim.Muon` iterates in bfloat16, which takes ten times as long on processors that have no
instructions for it; here it is float32. Matrices of one shape are one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration."""


class Muon(torch.optim.Optimizer):
    """An optimizer of matrices; an update has the size that AdamW's would have at this rate."""

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:  # type: ignore[override]
        """Make one update with the present gradients."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape].append(matrix)
            for shape, matrices in alike.items():
                updates = []
                for matrix in matrices:
                    state = self.state[matrix]
                    if not state:
                        state["momentum"] = torch.zeros_like(matrix)
                    momentum = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(momentum, group["momentum"]))
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for matrix, update in zip(matrices, orthogonal(torch.stack(updates)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [N, rows, columns] with singular values near 1, between 0.7 and 1.2 or so."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x
