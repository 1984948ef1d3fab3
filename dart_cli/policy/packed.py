"""The policy's forward pass over a pack: trees of token sequences in one row, each token once.

    PackedInputs   token ids, positions, layout and distinct images of a pack
    packed_hidden  the hidden states that the output embedding reads

Steps of one trajectory extend one another and the trajectories of a group share their first screen. A
pack holds each shared token once; what a token sees is its path from the root (attention.py), so its
hidden state is the one of its path alone in `forward.logits` up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from dart_cli.policy.attention import check_packed
from dart_cli.policy.forward import ImageFeatures, image_arguments
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.pack_plan import PackLayout, PackPlans

__all__ = ["PackLayout", "PackedInputs", "packed_hidden"]


@dataclass(frozen=True)
class PackedInputs:
    """A pack of L tokens, and the distinct images they show."""

    input_ids: torch.Tensor  # [L], int64
    position_ids: torch.Tensor  # [3, L], int64: time, row, column, each from its path's beginning
    layout: PackLayout
    images: tuple[PreparedImage, ...]  # distinct
    shown: tuple[int, ...]  # index into `images` of each image, in the pack's token order

    def __post_init__(self) -> None:
        if self.input_ids.shape != (self.layout.length,):
            raise ValueError(f"{len(self.input_ids)} tokens in a pack of {self.layout.length}")
        if self.position_ids.shape != (3, self.layout.length):
            raise ValueError("a pack has three positions a token")


def packed_hidden(
    model: PreTrainedModel, inputs: PackedInputs, *, features: ImageFeatures | None = None
) -> torch.Tensor:
    """Hidden states [L, H] after the final norm; their product with the output embedding is the logits.

    `features` are those of `inputs.images`, computed here if absent. Raises ModelError for a model whose
    layers do not take packs (attention.use_packed).
    """
    check_packed(model)
    inner: Any = model.model
    device = next(model.parameters()).device
    output = inner(
        input_ids=inputs.input_ids.to(device)[None],
        # transformers takes a mask of four axes as finished and builds none; our layers ignore it.
        attention_mask=torch.empty(1, 1, 1, 1, device=device),
        position_ids=inputs.position_ids.to(device)[:, None],
        use_cache=False,
        pack_plans=PackPlans(inputs.layout),
        **image_arguments(model, inputs.images, inputs.shown, features),
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden
