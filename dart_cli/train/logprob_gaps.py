"""The log-prob mismatch of trainer and engine on each step, for the viewer; sent with BatchTrained.

step_mismatches   a scored micro-batch -> one StepMismatch for each sample with a known behaviour policy
"""

from __future__ import annotations

from math import isfinite

import torch

from bus.messages import StepMismatch
from dart_cli.train.batch import MicroBatch


def step_mismatches(proximal: torch.Tensor, part: MicroBatch) -> list[StepMismatch]:
    """Of the samples of `part`, whose tokens' log-probabilities before the update are `proximal` [N].

    A gap that is not finite is left out: the update says what is wrong there.
    """
    gaps = proximal.double().cpu() - part.behaviour_logprobs.double()
    pieces = torch.split(gaps, [len(sample) for sample in part.samples])
    return [
        StepMismatch(
            trajectory_id=sample.trajectory_id,
            step=sample.step,
            mean=mean,
            largest=piece.abs().max().item(),
        )
        for sample, piece in zip(part.samples, pieces, strict=True)
        if sample.behaviour_logprobs and isfinite(mean := piece.mean().item())
    ]
