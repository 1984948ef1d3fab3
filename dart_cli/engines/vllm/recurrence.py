"""Gated DeltaNet layers (arXiv 2412.06464) on a CPU in float32, in place of vLLM's, which takes bfloat16 alone.

    recurrent_core     computes the sequences of a batch from the states that vLLM keeps, and updates these
    install_recurrence puts it in the place of vLLM's operation

vLLM's layers project the tokens, keep the states, and decide which request has which. What is replaced is the
convolution and the gated delta rule between the projections, which transformers computes here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Unwrapped, because transformers would call an installed kernel that does not run on a CPU.
_CHUNKED: Rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
_RECURRENT: Rule = inspect.unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)


def install_recurrence() -> None:
    """Let the layers that are built from now on in this process compute by `recurrent_core`."""
    gdn_attention.cpu_gdn_attention_core = recurrent_core


def recurrent_core(
    mixed_qkv: torch.Tensor,  # [T, channels], the inputs of the convolution
    b: torch.Tensor,  # [T, heads]
    a: torch.Tensor,  # [T, heads]
    core_attn_out: torch.Tensor,  # [T, heads, value], is written
    layer_name: LayerNameType,
) -> None:
    """Compute all sequences of this pass; vLLM calls it for each layer."""
    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a dry run
        return
    batch = context.attn_metadata[layer.prefix]
    beta = b.sigmoid()
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    slots = batch.non_spec_state_indices_tensor.long()
    starts = batch.non_spec_query_start_loc.tolist()
    # 1. Sequences that decode have one token each, and are first.
    if decodes := batch.num_decodes:
        rows = slice(0, decodes)
        parts = (part[rows, None] for part in (mixed_qkv, decay, beta))
        core_attn_out[rows] = _advance(layer, *parts, slots[rows])[:, 0]
    # 2. The others are prompts or parts of prompts, of different lengths.
    for row in range(decodes, decodes + batch.num_prefills):
        tokens = slice(starts[row], starts[row + 1])
        parts = (part[None, tokens] for part in (mixed_qkv, decay, beta))
        continues = bool(batch.has_initial_state[row])
        out = _advance(layer, *parts, slots[row : row + 1], continues=continues)
        core_attn_out[tokens] = out[0]


def _advance(
    layer: Any,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    *,
    continues: bool = True,
) -> torch.Tensor:
    """Return the outputs [B, N, heads, value] of the next N tokens of B sequences, and keep their states.

    Take the inputs of the convolution `mixed` [B, N, channels], `decay` and `beta` [B, N, heads], and the
    `slots` [B] of vLLM's cache. A sequence that does not continue begins from zeros, whatever its slot has.
    """
    inputs, states = layer.kv_cache  # [slots, columns, channels], [slots, heads, value, key]
    earlier, begin = inputs[slots], states[slots].transpose(-1, -2)
    if not continues:
        earlier, begin = torch.zeros_like(earlier), torch.zeros_like(begin)
    rows = torch.cat([earlier, mixed], 1)
    inputs[slots] = rows[:, -earlier.shape[1] :]
    weight = gdn_attention._unpacked_conv_weight(layer)[:, None]  # noqa: SLF001 - vLLM packs it
    convolved = F.silu(F.conv1d(rows.transpose(1, 2), weight, groups=len(weight))).transpose(1, 2)
    keys = layer.key_dim // layer.tp_size
    query, key, value = convolved.split([keys, keys, layer.value_dim // layer.tp_size], -1)
    query, key = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (query, key))
    query, key = (
        part.repeat_interleave(layer.num_v_heads // layer.num_k_heads, 2) for part in (query, key)
    )
    rule = _RECURRENT if mixed.shape[1] == 1 else _CHUNKED
    core, after = rule(
        query,
        key,
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=decay,
        beta=beta,
        initial_state=begin,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots] = after.transpose(-1, -2).to(states.dtype)
    return core
