"""Log-probabilities and entropies of patches that pointers drew.

patch_scores   hidden states of pads, screens and patches -> log-probabilities, entropies
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dart_cli.policy.pointer.head import PointerHead


def patch_scores(
    head: PointerHead,
    hidden: torch.Tensor,
    visual: Sequence[torch.Tensor],
    screens: torch.Tensor,
    patches: torch.Tensor,
    *,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [M] and entropies [M], nats, of the distributions over patches.

    `hidden` [M, d] are the states of the pads, `visual` [P, d] the embeddings of each distinct image, of
    which `screens` [M] is pointed into, and `patches` [M] the cells that were drawn; `temperature` divides
    the logits, as those of tokens. An image's keys are made once, however many pointers look at it. The
    entropies have no gradient. In float32 or better.
    """
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    order: list[torch.Tensor] = []
    for screen in sorted(set(screens.tolist())):
        rows = torch.nonzero(screens == screen)[:, 0].to(hidden.device)
        table = F.log_softmax(head(visual[screen], hidden[rows]) / temperature, dim=-1)
        chosen = patches.to(hidden.device)[rows]
        logprobs.append(table.gather(1, chosen[:, None])[:, 0])
        told = table.detach()
        entropies.append(-(told.exp() * told).sum(dim=-1))
        order.append(rows)
    back = torch.cat(order).argsort()
    return torch.cat(logprobs)[back], torch.cat(entropies)[back]
