"""The head that points: which patch of a screenshot does a hidden state mean?

    PointerHead    keys of a screenshot's patches, logits of patches for hidden states
    head_of        the head of a model, if it has one
    initial_head   a head's tensors before any update, of a seed

With V [P, d] the visual embeddings of one screenshot behind the patch merger, as the language model gets
them, and h [d] the state behind the final norm at `<|pointer_pad|>` (GUI-Actor, arXiv 2506.03143, 3.2):

    V' = LayerNorm(V + MultiHeadAttention(V, V, V))
    k = Linear(GELU(Linear(V')))   q = Linear(GELU(Linear(h)))
    p = softmax(q k^T / sqrt(d))

The head is `model.pointer_head`: its tensors are the model's, whatever publishes or stores them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from dart_cli.config.architecture import HEADS, PREFIX, head_parameters

DROPOUT = 0.1
"""In training mode alone, of the attention's weights and of what it adds."""


class PointerHead(nn.Module):
    """8 d^2 + 10 d parameters for a model of width `width` = d."""

    def __init__(self, width: int) -> None:
        super().__init__()
        head_parameters(width)  # refuses other widths
        self.width = width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.key_in = nn.Linear(width, width)
        self.key_out = nn.Linear(width, width)
        self.query_in = nn.Linear(width, width)
        self.query_out = nn.Linear(width, width)

    def keys(self, visual: torch.Tensor) -> torch.Tensor:
        """Keys [P, d] of the patches of one screenshot, of its visual embeddings [P, d]."""
        visual = visual.to(self.norm.weight.dtype)
        dropout = DROPOUT if self.training else 0.0
        patches = visual.shape[0]
        # [P, 3 d] -> three of [1, heads, P, d / heads]
        query, key, value = (
            part.reshape(patches, HEADS, -1).transpose(0, 1)[None]
            for part in self.qkv(visual).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        added = self.out(seen[0].transpose(0, 1).reshape(patches, -1))
        mixed = self.norm(visual + F.dropout(added, dropout))
        keys: torch.Tensor = self.key_out(F.gelu(self.key_in(mixed)))
        return keys

    def logits(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Logits [N, P] of the patches for hidden states [N, d], in float32 or better."""
        hidden = hidden.to(self.norm.weight.dtype)
        queries = self.query_out(F.gelu(self.query_in(hidden)))
        wide = torch.promote_types(queries.dtype, torch.float32)
        logits: torch.Tensor = queries.to(wide) @ keys.to(wide).T / math.sqrt(self.width)
        return logits

    def forward(self, visual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, P] for hidden states [N, d] over the patches of `visual` [P, d]."""
        return self.logits(hidden, self.keys(visual))


def head_of(model: nn.Module) -> PointerHead | None:
    """`model.pointer_head`; None for a model without one."""
    head = getattr(model, PREFIX.removesuffix("."), None)
    return head if isinstance(head, PointerHead) else None


def initial_head(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a PointerHead by name, float32; they follow from width and seed alone.

    Weights are uniform: within sqrt(6 / (4 d)) for queries, keys and values, else within 1 / sqrt(d), so
    that p begins nearly uniform at any width. Biases are zero, the norm is the identity.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in PointerHead(width).named_parameters()}
    for name, shape in sorted(shapes.items()):
        if name == "norm.weight":
            found[name] = torch.ones(shape)
        elif len(shape) == 1:
            found[name] = torch.zeros(shape)
        else:
            bound = math.sqrt(6 / sum(shape)) if name.startswith("qkv") else 1 / math.sqrt(width)
            found[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return found
