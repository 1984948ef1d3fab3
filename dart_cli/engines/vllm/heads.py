"""Attention heads of sizes that vLLM's CPU kernels lack, padded with zeros.

Zeros add nothing to a query's product with a key and are cut off the output, so attention over the
larger heads, with the scale of the smaller, is the same. The tiny model's heads are 24 wide.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


def kernel_size(head_size: int) -> int:
    """The least kernel size >= `head_size`; `head_size` itself if there is none."""
    sizes = [size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_size]
    return min(sizes, default=head_size)


class PaddedAttention(Attention):
    """Attention over heads of any size, which replaces vLLM's own in its decoders."""

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
        query, key, value = (pad_heads(each, given, size) for each in (query, key, value))
        padded: torch.Tensor = super().forward(query, key, value)
        return padded.view(len(padded), -1, size)[..., :given].flatten(1)


def pad_heads(heads: torch.Tensor, given: int, size: int) -> torch.Tensor:
    """[T, heads * given] -> [T, heads * size], each head padded with zeros."""
    return F.pad(heads.reshape(len(heads), -1, given), (0, size - given)).flatten(1)
