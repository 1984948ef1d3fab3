"""Recurrent layers in vLLM, pass by pass, against a plain recurrence: ours on a CPU, vLLM's own kernels on a GPU.

No engine is started. On a GPU vLLM computes these layers by Triton kernels, which its CPU build does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.devices import no_gpu

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

HEADS, KEY_HEADS, WIDTH, COLUMNS = 4, 2, 32, 3
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH
SLOTS = {"a": 3, "b": 5, "c": 1}
LENGTHS = {"a": 140, "b": 8, "c": 70}
PASSES = (
    ({}, {"a": 70}),
    ({}, {"a": 67, "b": 5}),  # a prompt goes on, another begins
    ({"a": 1, "b": 1}, {"c": 9}),
    ({"b": 1}, {"a": 1, "c": 61}),  # as if the last token of a long prompt were read
    ({"a": 1, "b": 1}, {}),
)
"""Tokens of each sequence in each pass: of those that decode, and of prompts. No cut is a chunk's end."""


def drawn(device: str, dtype: torch.dtype) -> tuple[Any, dict[str, dict[str, torch.Tensor]]]:
    """Return what vLLM's layer has, with cached states that no sequence may see, and the inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    layer = SimpleNamespace(
        prefix="layer",
        conv1d=SimpleNamespace(weight=normal(CHANNELS, 1, COLUMNS + 1, scale=0.5), bias=None),
        A_log=torch.linspace(-5.0, 0.0, HEADS, device=device),
        dt_bias=normal(HEADS),
        activation="silu",
        tp_size=1,
        key_dim=KEY_HEADS * WIDTH,
        value_dim=HEADS * WIDTH,
        num_k_heads=KEY_HEADS,
        num_v_heads=HEADS,
        head_k_dim=WIDTH,
        head_v_dim=WIDTH,
        kv_cache=(
            normal(8, COLUMNS, CHANNELS) + 100,
            normal(8, HEADS, WIDTH, WIDTH).float() + 100,
        ),
    )
    inputs = {
        name: {"mixed": normal(n, CHANNELS), "b": normal(n, HEADS), "a": normal(n, HEADS)}
        for name, n in LENGTHS.items()
    }
    return layer, inputs


def plain(layer: Any, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs [T, heads, width] of a whole sequence, token by token in float64 on the CPU."""
    mixed, b, a = (part.double().cpu() for part in parts.values())
    weight = layer.conv1d.weight[:, 0].double().cpu()
    speed = F.softplus(a + layer.dt_bias.double().cpu())
    decay, beta = (-layer.A_log.double().cpu().exp() * speed).exp(), b.sigmoid()
    rows = F.pad(mixed, (0, 0, COLUMNS, 0))
    state, outputs = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.double), []
    for t in range(len(mixed)):
        after = F.silu((rows[t : t + COLUMNS + 1] * weight.T).sum(0)).view(-1, WIDTH)
        query, key, value = after.split([KEY_HEADS, KEY_HEADS, HEADS])
        query, key = (
            (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 0)
            for part in (query, key)
        )
        state = decay[t, :, None, None] * state
        error = beta[t, :, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * error[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query) * WIDTH**-0.5)
    return torch.stack(outputs)


def batch_of(decodes: dict[str, int], prompts: dict[str, int], began: set[str], device: str) -> Any:
    """Return vLLM's description of one pass; the sequences `began` have states."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    names = [*decodes, *prompts]
    count, total = len(decodes), sum(prompts.values())
    ends = F.pad(torch.tensor([*decodes.values(), *prompts.values()]).cumsum(0), (1, 0)).int()
    starts = ends.to(device)
    slots = torch.tensor([SLOTS[name] for name in names], dtype=torch.int32, device=device)
    initial = torch.tensor([name in began for name in names], device=device)
    more: dict[str, Any] = {}
    if prompts:
        numbers, rows, offsets = compute_causal_conv1d_metadata(ends, device=torch.device(device))
        more = {
            "has_initial_state": initial,
            "prefill_query_start_loc": starts[count:] - count,
            "prefill_state_indices": slots[count:],
            "prefill_has_initial_state": initial[count:],
            "nums_dict": numbers,
            "batch_ptr": rows,
            "token_chunk_offset_ptr": offsets,
        }
    return GDNAttentionMetadata(
        num_prefills=len(prompts),
        num_prefill_tokens=total,
        num_decodes=count,
        num_decode_tokens=count,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=count + total,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=slots,
        **more,
    )


def largest_error(device: str, dtype: torch.dtype, core: Callable[..., None]) -> float:
    """Compute all passes by `core`, and return the largest difference from the plain recurrence."""
    layer, inputs = drawn(device, dtype)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in SLOTS}
    for decodes, prompts in PASSES:
        counts = decodes | prompts
        at = {name: sum(map(len, found[name])) for name in counts}
        batch = batch_of(decodes, prompts, {name for name in counts if at[name]}, device)
        parts = [
            torch.cat([inputs[name][part][at[name] : at[name] + n] for name, n in counts.items()])
            for part in ("mixed", "b", "a")
        ]
        out = torch.zeros(len(parts[0]), HEADS, WIDTH, dtype=dtype, device=device)
        core(layer, batch, *parts, out)
        for name, rows in zip(counts, out.split(list(counts.values())), strict=True):
            found[name].append(rows.double().cpu())
    assert {name: sum(map(len, rows)) for name, rows in found.items()} == LENGTHS
    return max(
        float((torch.cat(found[name]) - plain(layer, parts)).abs().max())
        for name, parts in inputs.items()
    )


def test_passes_on_a_cpu_give_the_numbers_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dart_cli.engines.vllm import recurrence

    def core(layer: Any, batch: Any, *parts: torch.Tensor) -> None:
        context = SimpleNamespace(
            no_compile_layers={"layer": layer}, attn_metadata={"layer": batch}
        )
        monkeypatch.setattr(recurrence, "get_forward_context", lambda: context)
        recurrence.recurrent_core(*parts, "layer")

    assert largest_error("cpu", torch.float32, core) < 1e-5


@pytest.mark.gpu
@no_gpu
def test_passes_by_vllms_kernels_give_the_numbers_of_whole_sequences() -> None:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    kind = layers.QwenGatedDeltaNetAttention

    def rule(*, aiter_prefill_metadata: Any, **options: Any) -> Any:
        assert aiter_prefill_metadata is None
        return layers.fla_chunk_gated_delta_rule(**options)

    def core(layer: Any, batch: Any, *parts: torch.Tensor) -> None:
        layer.enable_packed_recurrent_decode = True
        layer.chunk_gated_delta_rule = rule
        layer.rearrange_mixed_qkv = partial(kind.rearrange_mixed_qkv, layer)
        layer._forward_core_decode_non_spec = partial(kind._forward_core_decode_non_spec, layer)
        context = SimpleNamespace(attn_metadata={"layer": batch})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "get_forward_context", lambda: context)
            kind._forward_core(layer, *parts)

    assert largest_error("cuda", torch.bfloat16, core) < 0.02


def test_tensors_that_a_folder_has_in_float32_are_rounded_as_the_trainer_rounds_them() -> None:
    from dart_cli.engines.vllm.models import round_weights

    class Loaded:
        visual = torch.nn.Linear(2, 2, dtype=torch.bfloat16)

        def load_weights(self, weights: Any) -> set[str]:
            self.tensors = dict(weights)
            return set(self.tensors)

    round_weights(Loaded)
    model, exact = Loaded(), torch.tensor([1.0, 2.7182817])
    assert model.load_weights([("A_log", exact)]) == {"A_log"}
    assert torch.equal(model.tensors["A_log"], exact.to(torch.bfloat16))
    assert not torch.equal(model.tensors["A_log"].float(), exact)
