"""Does the model see? Its scores of the same tokens with every screen grey.

    EVERY      updates between two looks
    BLIND      what grey screens change at most where a model does not see
    blinded    a pack whose screens are grey
    sight_of   how much the screens matter to the scores of a pack

An engine that answers from other pixels than the trainer's is found by logprob_check.py. Where pixels are lost in
both, in a processor that scales them away or a tower whose output is not read, the two agree, and a run
learns from words alone: that is found here.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from dart_cli.policy.images import ImagePreparer
from dart_cli.train.packs.pack import Pack
from dart_cli.train.trained_policy import TrainModel

EVERY = 100
"""Updates for each forward pass of one pack of each rank; the first one is among them."""
BLIND = 1e-6
"""Nats; without pixels both passes compute the same."""
GREY = 127


def blinded(pack: Pack, images: ImagePreparer) -> Pack:
    """Return the same pack with every pixel of its screens of the same grey.

    Screens of a frozen tower have no pixels any more, so that the grey ones are made anew.
    """
    width = len(images.table.values) * images.patch**2
    grey = tuple(
        replace(
            each,
            key=f"grey of {each.key}",
            pixels=torch.full((prod(each.grid), width), GREY, dtype=torch.uint8),
        )
        for each in pack.inputs.images
    )
    return replace(pack, features=None, inputs=replace(pack.inputs, images=grey))


@torch.no_grad()
def sight_of(
    model: TrainModel, pack: Pack, logprobs: torch.Tensor, temperature: float
) -> tuple[float, ...]:
    """Return the largest change that grey screens make to the `logprobs` [N] of a pack, nats; none without a screen.

    Every rank calls it for a pack of its own: a sharded model's ranks pass together.
    """
    blind = model.score(blinded(pack, model.policy.images), temperature).logprobs
    model.reshard()
    seen = pack.drawn
    if not pack.inputs.images or not seen.any():
        return ()
    return (float((blind - logprobs)[seen.to(blind.device)].abs().max()),)
