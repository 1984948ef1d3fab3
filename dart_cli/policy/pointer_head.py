"""The pointer head: it scores the patches of a screenshot for a hidden state of the language model.

    PointerHead    computes the keys of a screenshot's patches, and the logits of patches for hidden states
    head_of        returns the head of a model, if it has one
    initial_head   draws the tensors of a head from a seed

V [P, d] are the visual embeddings of one screenshot after the patch merger, as the language model gets them,
and h [d] is the state after the final norm at `<|pointer_pad|>` (GUI-Actor, arXiv 2506.03143, 3.2):

    V' = LayerNorm(V + MultiHeadAttention(V, V, V))
    k = Linear(GELU(Linear(V')))   q = Linear(GELU(Linear(h)))
    p = softmax(q k^T / sqrt(d))

The head is the module `model.pointer_head`, so that its tensors are published and stored with the model's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from dart_cli.config.architecture import HEADS, PREFIX, head_parameters

DROPOUT = 0.1
"""Dropout of the attention's weights and of its output, in training mode alone."""


class PointerHead(nn.Module):
    """The head of a model of width `width` = d; it has 8 d^2 + 10 d parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        head_parameters(width)  # raises ModelError for a width that is not supported
        self.width = width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.key_in = nn.Linear(width, width)
        self.key_out = nn.Linear(width, width)
        self.query_in = nn.Linear(width, width)
        self.query_out = nn.Linear(width, width)

    def keys(self, visual: torch.Tensor) -> torch.Tensor:
        """Return the keys [P, d] of the patches of one screenshot, from its visual embeddings [P, d]."""
        visual = visual.to(self.norm.weight.dtype)
        dropout = DROPOUT if self.training else 0.0
        patches = visual.shape[0]
        # [P, 3 d] -> three of [1, heads, P, d / heads]
        query, key, value = (
            part.reshape(patches, HEADS, -1).transpose(0, 1)[None]
            for part in self.qkv(visual).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        added = self.out(attended[0].transpose(0, 1).reshape(patches, -1))
        mixed = self.norm(visual + F.dropout(added, dropout))
        keys: torch.Tensor = self.key_out(F.gelu(self.key_in(mixed)))
        return keys

    def logits(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, P] of the patches for hidden states [N, d], in float32 or better."""
        hidden = hidden.to(self.norm.weight.dtype)
        queries = self.query_out(F.gelu(self.query_in(hidden)))
        wide = torch.promote_types(queries.dtype, torch.float32)
        logits: torch.Tensor = queries.to(wide) @ keys.to(wide).T / math.sqrt(self.width)
        return logits

    def forward(self, visual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, P] for hidden states [N, d] over the patches of `visual` [P, d]."""
        return self.logits(hidden, self.keys(visual))


def head_of(model: nn.Module) -> PointerHead | None:
    """Return `model.pointer_head`, or None for a model without one."""
    head = getattr(model, PREFIX.removesuffix("."), None)
    return head if isinstance(head, PointerHead) else None


def initial_head(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a new PointerHead by name, float32; they depend on width and seed alone.

    Weights are uniform: within sqrt(6 / (4 d)) for queries, keys and values, else within 1 / sqrt(d), so that
    p is nearly uniform at any width. Biases are zero, and the norm is the identity.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        head = PointerHead(width)
    shapes = {name: parameter.shape for name, parameter in head.named_parameters()}
    for name, shape in sorted(shapes.items()):
        if name == "norm.weight":
            tensors[name] = torch.ones(shape)
        elif len(shape) == 1:
            tensors[name] = torch.zeros(shape)
        else:
            bound = math.sqrt(6 / sum(shape)) if name.startswith("qkv") else 1 / math.sqrt(width)
            tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return tensors
