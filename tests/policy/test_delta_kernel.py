"""On a GPU in half precision recurrent layers use the kernels of flash-linear-attention.

The kernels must give what transformers' rule gives in float32. Without a GPU the same kernels were run under
Triton's interpreter (docs/log.md).
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from dart_cli.config.devices import kernel_problem
from dart_cli.policy.delta_net import LayerStates, StateCache, delta_net
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.state_plan import plan_layout, plan_rows
from tests.devices import no_gpu

HALF = {torch.bfloat16: 0.03, torch.float16: 0.004}
"""Largest difference relative to the norm, by rounding."""

kernel = pytest.mark.skipif(kernel_problem() != "", reason="no flash-linear-attention")


def layer_of(dtype: torch.dtype) -> tuple[Qwen3_5GatedDeltaNet, Qwen3_5GatedDeltaNet]:
    """Return a layer in `dtype` on the GPU, and the same rounded weights in float32 on the CPU."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    half = Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    return copy.deepcopy(half).cuda(), half.float()


def assert_near(mine: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    difference = mine.detach().cpu().float() - exact
    assert float(difference.norm() / exact.norm()) <= tolerance


@pytest.mark.gpu
@no_gpu
@kernel
@pytest.mark.parametrize("dtype", list(HALF))
def test_the_kernel_computes_a_tree_and_its_gradients(dtype: torch.dtype) -> None:
    half, exact = layer_of(dtype)
    layout = PackLayout((0, 70, 75, 160, 163, 200), (-1, 0, 0, 2, -1))
    hidden, aim = torch.randn(200, 64).to(dtype), torch.randn(200, 64)
    results = []
    for layer, values in ((half, hidden.cuda()), (exact, hidden.float())):
        values.requires_grad_()
        out = delta_net(layer, values, plan_layout(layout, 3, values.device))
        (out.float() * aim.to(values.device)).sum().backward()
        weights = [parameter.grad.flatten().float() for parameter in layer.parameters()]
        results.append((out.detach(), values.grad, torch.cat(weights)))
    for mine, theirs in zip(*results, strict=True):
        assert_near(mine, theirs, HALF[dtype])


@pytest.mark.gpu
@no_gpu
@kernel
@pytest.mark.parametrize("dtype", list(HALF))
@torch.inference_mode()
def test_the_kernel_continues_a_batch_from_its_states(dtype: torch.dtype) -> None:
    half, exact = layer_of(dtype)
    prompts, token = torch.randn(40, 64).to(dtype), torch.randn(2, 64).to(dtype)
    mask = torch.tensor([[1] * 20, [0] * 7 + [1] * 13])
    results: list[tuple[torch.Tensor, LayerStates]] = []
    for layer, place in ((half, "cuda"), (exact, "cpu")):
        cache, device, wide = StateCache(), torch.device(place), next(layer.parameters()).dtype
        delta_net(layer, prompts.to(device, wide), plan_rows(mask, 3, device), cache)
        step = plan_rows(torch.ones_like(token[:, :1]).long(), 3, device, continues=True)
        out = delta_net(layer, token.to(device, wide), step, cache)
        assert cache.kept is not None
        results.append((out, cache.kept))
    (mine, left), (theirs, expected) = results
    assert_near(mine, theirs, HALF[dtype])
    assert_near(left.states, expected.states, HALF[dtype])
