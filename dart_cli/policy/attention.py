"""Attention over a pack: trees of token sequences in one row, without an L x L mask.

    use_packed        let a model's language layers take packs besides padded batches
    check_packed      an error for a model that does not
    packed_attention  queries, keys and values of a pack -> its attention

Kernels: `torch.nn.attention.varlen.varlen_attn`, FlashAttention's packed call (arXiv 2307.08691), on
CUDA in bfloat16 and float16; elsewhere one `scaled_dot_product_attention` for each bucket of sequences of
similar length. The choice is the plan's.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bus.errors import ModelError
from dart_cli.policy.pack_plan import PackPlan, PackPlans

PACKED = "dart_packed"
"""Name of our language attention in transformers; without a plan it is `sdpa`."""


class _Gathered(torch.autograd.Function):
    """Rows [K, ...] of a tensor [L, ...], some of them several times.

    The gradient of a row that many sequences see is a sum over them, in float32 or better.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        total.index_add_(0, index, gradient.to(dtype))
        return total.to(gradient.dtype), None


class _Padded(torch.autograd.Function):
    """Rows [Q, ...] of a tensor [L, ...], each once but for padding; `places` [L] inverts `index`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpadded(torch.autograd.Function):
    """Inverts _Padded: rows [L, ...] of a tensor [Q, ...]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        padded = gradient.new_zeros(ctx.shape)
        return padded.index_copy_(0, ctx.saved_tensors[0], gradient), None


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackPlan, scale: float | None
) -> torch.Tensor:
    """Attention of a pack: query [L, heads, D], key and value [L, kv_heads, D] -> [L, heads, D]."""
    if plan.keys is not None:
        key, value = _gathered(key, plan.keys), _gathered(value, plan.keys)
    if plan.buckets:
        return _bucketed(query, key, value, plan, scale)
    return _varlen(query, key, value, plan, scale)


def _gathered(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = _Gathered.apply(rows, index)  # type: ignore[no-untyped-call]
    return gathered


def _bucketed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackPlan, scale: float | None
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if plan.queries is not None:
        query = _Padded.apply(query, plan.queries, plan.places)  # type: ignore[no-untyped-call]
    parts: list[torch.Tensor] = []
    queries = torch.split(query, [bucket.count * bucket.queries for bucket in plan.buckets])
    sizes = [bucket.count * bucket.keys for bucket in plan.buckets]
    keys, values = torch.split(key, sizes), torch.split(value, sizes)
    for bucket, q, k, v in zip(plan.buckets, queries, keys, values, strict=True):
        out = F.scaled_dot_product_attention(
            _sequences(q, bucket.count),
            _sequences(_repeated(k, groups), bucket.count),
            _sequences(_repeated(v, groups), bucket.count),
            attn_mask=bucket.bias,
            is_causal=bucket.bias is None,
            scale=scale,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.queries is not None:
        result = _Unpadded.apply(result, plan.places)  # type: ignore[no-untyped-call]
    return result


def _sequences(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows [count * K, heads, D] of padded sequences: [count, heads, K, D]."""
    return rows.reshape(count, -1, *rows.shape[1:]).transpose(1, 2)


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values [K, kv_heads, D] once per query head: [K, kv_heads * groups, D]."""
    return rows if groups == 1 else rows.repeat_interleave(groups, dim=1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackPlan, scale: float | None
) -> torch.Tensor:
    call, known = _varlen_call()
    groups = query.shape[1] // key.shape[1]
    extra: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in known:
        extra["enable_gqa"] = True
    elif groups > 1:
        key, value = _repeated(key, groups), _repeated(value, groups)
    if "scale" in known:
        extra["scale"] = scale
    elif scale is not None:
        query = query * (scale * math.sqrt(query.shape[2]))  # it divides by this root
    result: torch.Tensor = call(
        query,
        key,
        value,
        plan.query_ends,
        plan.key_ends,
        *plan.longest,
        window_size=(plan.window - 1 if plan.window else -1, 0),
        **extra,
    )
    return result


@cache
def _varlen_call() -> tuple[Callable[..., Any], frozenset[str]]:
    """The packed attention of torch, and the names of its parameters, which differ by version.

    Raises ModelError where this torch has none that is causal from the bottom right.
    """
    call: Any = None
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn as call
    known = frozenset(inspect.signature(call).parameters if call else ())
    if "window_size" not in known:
        raise ModelError(
            f"torch {torch.__version__} has no packed attention on a GPU; install torch 2.11 or later, "
            'or set model.dtype = "float32"'
        )
    return call, known


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, L, D]
    key: torch.Tensor,  # [B, kv_heads, L, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pack_plans: PackPlans | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: a pack where there are plans, else `sdpa`."""
    if pack_plans is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **extra,
        )
        return result
    if dropout:
        raise ModelError(f"packs are not for models with attention dropout {dropout}; set it to 0")
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    plan = pack_plans.plan(query.device, query.dtype, sliding_window or 0)
    return packed_attention(query, key, value, plan, scaling)[None], None


def use_packed(model: PreTrainedModel) -> None:
    """Let the language layers of `model` take packs; padded batches attend as with `sdpa`."""
    inner: Any = model.model
    inner.language_model.config._attn_implementation = PACKED  # noqa: SLF001 (no public setter)


def check_packed(model: PreTrainedModel) -> None:
    """Raise ModelError if `use_packed` was not called: the layout would be ignored."""
    inner: Any = model.model
    name = inner.language_model.config._attn_implementation  # noqa: SLF001
    if name != PACKED:
        raise ModelError(f"the model attends with {name}, not in packs")


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
