"""Where the samples of a pack point.

    PointerRows     a pack's tokens that a pointer forced, and the patches that were drawn
    pointer_rows    those of some samples; None where none of them points
    pad_of          the token of a policy's pointers that is never drawn
    drawn_tokens    how many tokens of a sample the policy drew
    pointer_fault   why a sample's patches cannot be trained on

With `<|pointer_end|>` a patch of the prompt's last screenshot was drawn, from the state of the pad before
it; that is the token's log-probability and entropy. `<|pointer_pad|>` follows from the token before it: it has
no gradient, so it weighs nothing and counts in no length and no mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bus.messages import Batch, Sample
from dart_cli.policy.model import LoadedPolicy
from dart_cli.policy.pointer.patches import patch_mistake


@dataclass(frozen=True)
class PointerRows:
    """Of the pack's completion tokens [N] those of pointers; `[M]` patches."""

    drawn: torch.Tensor  # [N], bool: False for pads
    ends: torch.Tensor  # [M], int64, index into the N tokens
    patches: torch.Tensor  # [M], int64, the cell that was drawn
    screens: torch.Tensor  # [M], int64, which of the pack's distinct images it is a cell of


def pointer_rows(
    batch: Batch, samples: Sequence[Sample], policy: LoadedPolicy, place: Mapping[str, int]
) -> PointerRows | None:
    """The pointers of `samples`, one after another; `place` is the pack's index of an image by its hash."""
    pad = pad_of(policy)
    if pad is None:
        return None
    drawn: list[bool] = []
    ends, patches, screens = [], [], []
    for sample in samples:
        begin = len(drawn)
        drawn += [token != pad for token in batch.completion(sample)]
        for at, patch in enumerate(sample.patches):
            if patch >= 0:
                ends.append(begin + at)
                patches.append(patch)
                screens.append(place[batch.image_hashes(sample)[-1]])
    if all(drawn):
        return None
    return PointerRows(
        torch.tensor(drawn, dtype=torch.bool),
        *(torch.tensor(values, dtype=torch.int64) for values in (ends, patches, screens)),
    )


def pad_of(policy: LoadedPolicy) -> int | None:
    """The id of `<|pointer_pad|>` where the policy points; else None."""
    return policy.pointer.pad if policy.pointer and policy.pointing == "pointer" else None


def drawn_tokens(batch: Batch, sample: Sample, pad: int | None) -> int:
    """How many of the sample's tokens the policy drew: all but its `pad`s."""
    return len(sample) if pad is None else len(sample) - batch.completion(sample).count(pad)


def pointer_fault(
    batch: Batch, sample: Sample, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """What is wrong with a sample's patches; empty if nothing. `sizes` are cells of an image by its hash."""
    if policy.pointer is None or policy.pointing == "text":
        return "it points, the policy writes numbers (policy.pointing)" if sample.patches else ""
    shown = batch.image_hashes(sample)
    if sample.patches and not shown:
        return "it points, but its prompt shows no screen"
    return patch_mistake(
        batch.completion(sample).tolist(),
        sample.patches,
        np.frombuffer(sample.behaviour_logprobs).tolist() if sample.behaviour_logprobs else (),
        triple=policy.pointer.triple,
        cells=sizes[shown[-1]] if shown else None,
    )
