"""A test whether the model uses its screenshots: its scores of the same tokens with every screen grey.

    EVERY                the test runs once in this many updates
    BLIND_LIMIT          a model whose scores change by no more than this does not see
    with_grey_screens    a pack whose screens are grey
    grey_screen_change   how much grey screens change the scores of a pack

The log-probability check (logprob_check.py) finds an engine that computes from other pixels than the
trainer. Where engine and trainer both lose the pixels (in a processor that scales them away, or because the
output of the tower is not read), the two agree, and a run learns from words alone. This test finds that.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from dart_cli.policy.images import ImagePreparer
from dart_cli.train.packs.pack import Pack
from dart_cli.train.trained_policy import TrainModel

EVERY = 100
"""Updates between two tests; the first update has one. A test is one more forward pass of one pack on each
rank."""
BLIND_LIMIT = 1e-6
"""Largest change in nats for a model that does not see: without pixels both passes compute the same."""
GREY = 127
"""Value of all channels of a grey pixel."""


def with_grey_screens(pack: Pack, images: ImagePreparer) -> Pack:
    """Return the same pack with the same grey in every pixel of its screens.

    A pack for a frozen tower holds features in place of pixels, so the grey screens are made anew.
    """
    width = len(images.table.values) * images.patch**2
    grey = tuple(
        replace(
            image,
            key=f"grey of {image.key}",
            pixels=torch.full((prod(image.grid), width), GREY, dtype=torch.uint8),
        )
        for image in pack.inputs.images
    )
    return replace(pack, features=None, inputs=replace(pack.inputs, images=grey))


@torch.no_grad()
def grey_screen_change(
    model: TrainModel, pack: Pack, logprobs: torch.Tensor, temperature: float
) -> tuple[float, ...]:
    """Return the largest change in nats that grey screens make to the `logprobs` [N] of a pack.

    The result is empty for a pack without a screen or without a sampled token. Every rank must call this with
    one of its packs, since the ranks of a sharded model run their forward passes together.
    """
    grey = model.score(with_grey_screens(pack, model.policy.images), temperature).logprobs
    model.reshard()
    is_drawn = pack.is_drawn
    if not pack.inputs.images or not is_drawn.any():
        return ()
    return (float((grey - logprobs)[is_drawn.to(grey.device)].abs().max()),)
