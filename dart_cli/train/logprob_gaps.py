"""The log-prob mismatch of trainer and engine on each step, for the viewer; sent with BatchTrained.

step_mismatches   a scored pack -> one StepMismatch for each sample with a known behaviour policy
"""

from __future__ import annotations

from math import isfinite

import torch

from bus.messages import StepMismatch
from dart_cli.train.packs.pack import Pack


def step_mismatches(proximal: torch.Tensor, pack: Pack) -> list[StepMismatch]:
    """Of the samples of `pack`, whose tokens' log-probabilities before the update are `proximal` [N].

    Over the tokens that were drawn. A gap that is not finite is left out: the update says what is wrong there.
    """
    gaps = proximal.double().cpu() - pack.behaviour_logprobs
    drawn = torch.split(pack.drawn, pack.lengths)
    pieces = [gap[own] for gap, own in zip(torch.split(gaps, pack.lengths), drawn, strict=True)]
    return [
        StepMismatch(
            trajectory_id=sample.trajectory_id,
            step=sample.step,
            mean=mean,
            largest=piece.abs().max().item(),
        )
        for sample, piece in zip(pack.samples, pieces, strict=True)
        if sample.behaviour_logprobs and isfinite(mean := piece.mean().item())
    ]
