"""Attention heads of sizes that vLLM's CPU kernels lack, filled up with zeros.

Zeros add nothing to a query's product with a key and are cut off the values, so attention over the
larger heads, with the scale of the smaller, is the same. The tiny model's heads are 24 wide.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


def kernel_size(head_size: int) -> int:
    """The least size that a kernel has, of at least `head_size`; that itself beyond the largest."""
    sizes = [size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_size]
    return min(sizes, default=head_size)


class PaddedAttention(Attention):
    """Attention over heads of any size, at the place of vLLM's own in its decoders."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **options: Any) -> None:
        super().__init__(num_heads, kernel_size(head_size), scale, **options)
        self._given_size = head_size

    def forward(
        self,
        query: torch.Tensor,  # [T, heads * head_size]
        key: torch.Tensor,  # [T, kv_heads * head_size]
        value: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Attend; [T, heads * head_size]."""
        given, size = self._given_size, self.head_size
        if given == size:
            attended: torch.Tensor = super().forward(query, key, value, *rest, **options)
            return attended
        query, key, value = (widened(each, given, size) for each in (query, key, value))
        wide: torch.Tensor = super().forward(query, key, value)
        return wide.view(len(wide), -1, size)[..., :given].flatten(1)


def widened(heads: torch.Tensor, given: int, size: int) -> torch.Tensor:
    """[T, heads * given] -> [T, heads * size], each head filled up with zeros."""
    return F.pad(heads.reshape(len(heads), -1, given), (0, size - given)).flatten(1)
