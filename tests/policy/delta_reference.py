"""A DeltaNet layer written out token by token, from the formulas of arXiv 2412.06464.

    Trace          what a layer computes of some sequences
    layer_alone    computes a layer over whole sequences
    recurrence     the gated delta rule alone
    small_layer    makes a random layer of transformers
    drawn_layout   draws trees that are cut at awkward places

It shares nothing with dart_cli/policy/delta_net.py but the parameters of the layer, and is float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from dart_cli.policy.pack_plan import PackLayout

HIDDEN, COLUMNS = 24, 3
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 6, 8, 5  # no two widths are equal
DEEPEST = 5
LENGTHS = (
    1,
    1,
    1,
    2,
    3,
    4,
    7,
    20,
    63,
    64,
    65,
    70,
    129,
)  # of a node: chunks of the rule have 64 tokens


@dataclass(frozen=True)
class Trace:
    """What a layer computes of P sequences of L tokens."""

    out: torch.Tensor  # [P, L, H]
    inputs: torch.Tensor  # [P, L, channels], of the convolution
    states: torch.Tensor  # [P, L, heads, key, value], after each token


def small_layer(seed: int) -> Any:
    """Return a random layer in float64, whose slowest head remembers hundreds of tokens."""
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
    )
    layer = Qwen3_5GatedDeltaNet(config, 0).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
            if name == "A_log":
                parameter.add_(torch.linspace(-6.0, 0.0, len(parameter)))
            elif name == "norm.weight":
                parameter.add_(1.0)
    return layer


def layer_alone(layer: Any, hidden: torch.Tensor) -> Trace:
    """Compute `layer` over sequences `hidden` [P, L, H], each from nothing."""
    inputs = hidden @ layer.in_proj_qkv.weight.T
    taps = layer.conv1d.weight[:, 0]  # [channels, 4], the last is of the token itself
    before = F.pad(inputs, (0, 0, taps.shape[1] - 1, 0))
    length = hidden.shape[1]
    mixed = sum(before[:, tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1]))
    mixed = mixed * mixed.sigmoid()
    heads, groups = layer.num_v_heads, layer.num_v_heads // layer.num_k_heads
    keys = layer.num_k_heads * layer.head_k_dim
    query = mixed[..., :keys].unflatten(-1, (layer.num_k_heads, -1))
    key = mixed[..., keys : 2 * keys].unflatten(-1, (layer.num_k_heads, -1))
    value = mixed[..., 2 * keys :].unflatten(-1, (heads, -1))
    owner = torch.arange(heads) // groups  # the key head of each value head
    beta = (hidden @ layer.in_proj_b.weight.T).sigmoid()
    rate = (1 + (hidden @ layer.in_proj_a.weight.T + layer.dt_bias).exp()).log()
    decay = -layer.A_log.exp() * rate
    state = hidden.new_zeros(len(hidden), heads, layer.head_k_dim, layer.head_v_dim)
    core, states = recurrence(query[:, :, owner], key[:, :, owner], value, decay, beta, state)
    scale = (core.square().mean(-1, keepdim=True) + layer.layer_norm_epsilon).sqrt()
    gate = (hidden @ layer.in_proj_z.weight.T).unflatten(-1, (heads, -1))
    core = layer.norm.weight * core / scale * gate * gate.sigmoid()
    return Trace(core.flatten(2) @ layer.out_proj.weight.T, inputs, states)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [P, L, heads, value] and the states [P, L, heads, key, value] after each token."""
    query, key = (
        each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key)
    )
    query = query / query.shape[-1] ** 0.5
    outputs, states = [], []
    for token in range(query.shape[1]):
        state = decay[:, token, :, None, None].exp() * state
        recalled = torch.einsum("phk,phkv->phv", key[:, token], state)
        change = beta[:, token, :, None] * (value[:, token] - recalled)
        state = state + key[:, token, :, :, None] * change[:, :, None, :]
        outputs.append(torch.einsum("phk,phkv->phv", query[:, token], state))
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def drawn_layout(seed: int) -> PackLayout:
    """Return trees of up to 12 nodes and DEEPEST levels, most of whose cuts are no multiples of 64."""
    dice = Random(seed)
    starts, parents, depth = [0], [], []
    for node in range(dice.randint(2, 12)):
        starts.append(starts[-1] + dice.choice(LENGTHS))
        allowed = [-1, *(each for each in range(node) if depth[each] < DEEPEST - 1)]
        last = allowed[-1]
        parent = dice.choice([-1, last, last, dice.choice(allowed)])
        parents.append(parent)
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return PackLayout(tuple(starts), tuple(parents))
