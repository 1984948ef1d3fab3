"""Gated DeltaNet layers (arXiv 2412.06464) on a CPU.

    recurrent_core      computes the sequences of a pass from the states that vLLM keeps, and updates these
    install_recurrence  puts it in the place of vLLM's operation

vLLM's own operation for CPUs takes bfloat16 alone, and heads of multiples of 32 numbers. What is replaced is
the convolution and the gated delta rule, which is the trainer's here, in float32. vLLM's layers project
the tokens before and after it, keep the states, and decide which request has which.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from dart_cli.policy.delta_net import rule_in_chunks, rule_of_one_token


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
        rows = (slice(0, decodes), None)
        out = _advance(layer, mixed_qkv[rows], decay[rows], beta[rows], slots[:decodes])
        core_attn_out[:decodes] = out[:, 0]
    # 2. The others are prompts or parts of prompts, of different lengths.
    for row in range(decodes, decodes + batch.num_prefills):
        tokens = (None, slice(starts[row], starts[row + 1]))
        slot, continues = slots[row : row + 1], bool(batch.has_initial_state[row])
        out = _advance(
            layer, mixed_qkv[tokens], decay[tokens], beta[tokens], slot, continues=continues
        )
        core_attn_out[starts[row] : starts[row + 1]] = out[0]


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
    widths = [keys, keys, layer.value_dim // layer.tp_size]
    query, key, value = torch.split(convolved, widths, -1)
    query, key = (part.reshape(*part.shape[:2], -1, layer.head_k_dim) for part in (query, key))
    query, key = (
        part.repeat_interleave(layer.num_v_heads // layer.num_k_heads, 2) for part in (query, key)
    )
    rule = rule_of_one_token if mixed.shape[1] == 1 else rule_in_chunks
    value = value.reshape(*value.shape[:2], -1, layer.head_v_dim)
    core, after = rule(query, key, value, decay, beta, begin)
    states[slots] = after.transpose(-1, -2).to(states.dtype)
    return core
