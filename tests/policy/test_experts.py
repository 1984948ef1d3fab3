"""Routers take the rollout's choice of experts: values, gradients, packs and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dart_cli.config.architecture import MIXTURES
from dart_cli.policy.experts import Recording, Replay, RoutingShape, routing_array
from dart_cli.policy.forward import last_hidden
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.packed import PackedInputs, packed_hidden, use_recompute
from tests.policy.test_recompute import inputs_of

Family = Callable[[str], Path]
every_mixture = pytest.mark.parametrize("model_type", MIXTURES)


def shape_of(policy: LoadedPolicy) -> RoutingShape:
    shape = RoutingShape.of(policy.model)
    assert shape is not None
    return shape


def other_choices(policy: LoadedPolicy, tokens: int, seed: int = 0) -> Any:
    """Experts that no router would have chosen so."""
    shape = shape_of(policy)
    rng = np.random.default_rng(seed)
    every = rng.permuted(np.tile(np.arange(shape.experts), (tokens, shape.layers, 1)), axis=-1)
    return every[..., : shape.per_token].astype(shape.dtype)


@every_mixture
def test_routers_choose_as_transformers_do(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    block = policy.model.model.language_model.layers[1].mlp
    hidden = torch.randn(40, block.gate.hidden_dim, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(
        block.gate(hidden), type(block.gate).forward(block.gate, hidden), strict=True
    ):
        assert torch.equal(ours, theirs)


@every_mixture
def test_a_replay_of_its_own_choice_changes_nothing(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    inputs = inputs_of(policy)
    own = own_choices(policy, inputs)
    replay = Replay(own)
    plain = packed_hidden(policy.model, inputs)
    assert torch.equal(packed_hidden(policy.model, replace(inputs, replay=replay)), plain)
    assert replay.counts() == (0, own.shape[0] * own.shape[1])
    assert replay.counts(torch.tensor([0, 3, 3])) == (0, 3 * own.shape[1])
    # The order in which experts were chosen changes only the rounding of their sum.
    turned = packed_hidden(policy.model, replace(inputs, replay=Replay(own[..., ::-1].copy())))
    assert torch.allclose(turned, plain, atol=1e-5)


def own_choices(policy: LoadedPolicy, inputs: PackedInputs) -> Any:
    """Return the choices of a pack's tokens, as a pass over the pack records them."""
    recording = Recording(shape_of(policy))
    inner: Any = policy.model.model
    layers = inner.language_model.layers
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda gate, _inputs, out: recording._layers.__setitem__(gate.place, out[2])
        )
        for layer in layers
    ]
    packed_hidden(policy.model, inputs)
    for hook in hooks:
        hook.remove()
    return recording.choices(1)[0]


@every_mixture
def test_a_token_without_a_record_is_routed_by_the_router(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    inputs = inputs_of(policy)
    nothing = np.zeros_like(own_choices(policy, inputs))
    replay = Replay(nothing)
    plain = packed_hidden(policy.model, inputs)
    assert torch.equal(packed_hidden(policy.model, replace(inputs, replay=replay)), plain)
    assert replay.counts() == (0, 0)


def brute_force(
    block: Any, hidden: torch.Tensor, choices: Any, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's mixture [T, H] without its shared expert, and the gradient [E, H] of its router.

    Written out token by token: of y = sum_i w_i f_i(x) with w the softmax over the chosen experts' logits z,
    dL/dz_i = w_i (s . f_i - s . y), where s = dL/dy.
    """
    gate_up, down = (
        part.detach().numpy() for part in (block.experts.gate_up_proj, block.experts.down_proj)
    )
    router, x, s = block.gate.weight.detach().numpy(), hidden.numpy(), slopes.numpy()
    out, gradient = np.zeros_like(x), np.zeros_like(router)
    for token in range(len(x)):
        chosen = [int(each) for each in choices[token]]
        logits = np.array([router[each] @ x[token] for each in chosen])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        values = []
        for each in chosen:
            gate, up = np.split(gate_up[each] @ x[token], 2)
            values.append(down[each] @ (gate / (1 + np.exp(-gate)) * up))
        out[token] = sum(weight * value for weight, value in zip(weights, values, strict=True))
        for each, weight, value in zip(chosen, weights, values, strict=True):
            gradient[each] += weight * (s[token] @ value - s[token] @ out[token]) * x[token]
    return torch.from_numpy(out), torch.from_numpy(gradient)


def mixture(block: Any, hidden: torch.Tensor, replay: Replay) -> torch.Tensor:
    """Return what the experts of a layer add under a replay, [T, H]."""
    block.gate.routing = replay
    try:
        _, weights, indices = block.gate(hidden)
        return block.experts(hidden, indices, weights)
    finally:
        block.gate.routing = None


@every_mixture
def test_the_routers_gradient_is_that_of_brute_force_in_double(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type), "float64")
    block = policy.model.model.language_model.layers[1].mlp
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(30, block.gate.hidden_dim, generator=generator, dtype=torch.float64)
    slopes = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    choices = other_choices(policy, len(hidden))
    expected, gradient = brute_force(block, hidden, choices[:, 1], slopes)

    out = mixture(block, hidden, Replay(choices))
    (out * slopes).sum().backward()
    assert torch.allclose(out.detach(), expected, atol=1e-12)
    assert torch.allclose(block.gate.weight.grad, gradient, atol=1e-11)
    assert float(gradient.abs().max()) > 1e-3

    # Mutations that the comparison must catch: another token's experts, and the router's own choice.
    shifted = mixture(block, hidden, Replay(np.roll(choices, 1, axis=0)))
    own = mixture(block, hidden, Replay(np.zeros_like(choices)))
    assert not torch.allclose(shifted, expected, atol=1e-3)
    assert not torch.allclose(own, expected, atol=1e-3)


@every_mixture
def test_recomputed_layers_take_the_replay_again(model_type: str, family: Family) -> None:
    def gradients(*, recomputes: bool, replays: bool) -> dict[str, torch.Tensor]:
        policy = load_policy(family(model_type))
        inputs = inputs_of(policy)
        choices = other_choices(policy, inputs.layout.length)
        if recomputes:
            use_recompute(policy.model)
        replay = Replay(choices) if replays else None
        hidden = packed_hidden(policy.model, replace(inputs, replay=replay))
        hidden.log_softmax(-1)[:, ::3].sum().backward()
        if replay is not None:
            differing, recorded = replay.counts()
            assert 0 < differing <= recorded
        named = policy.model.named_parameters()
        return {name: each.grad for name, each in named if each.grad is not None}

    plain = gradients(recomputes=False, replays=True)
    again = gradients(recomputes=True, replays=True)
    other = gradients(recomputes=True, replays=False)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert routers
    assert not any(torch.allclose(plain[name], other[name], atol=1e-4) for name in routers)


@every_mixture
def test_a_tree_with_a_replay_is_each_path_alone_with_its_part(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    inputs = inputs_of(policy)
    choices = other_choices(policy, inputs.layout.length)
    with torch.no_grad():
        hidden = packed_hidden(policy.model, replace(inputs, replay=Replay(choices)))
        for node in range(len(inputs.layout.parents)):
            path = inputs.layout.path(node)
            batch = policy.inputs_of([inputs.input_ids[path].tolist()], [list(inputs.images)])
            batch = replace(batch, position_ids=inputs.position_ids[:, None, path])
            alone = last_hidden(
                policy.model, batch, last=len(path), routing=Replay(choices[path.numpy()])
            )
            assert torch.allclose(hidden[path], alone[0], atol=3e-5)


def test_the_form_of_a_choice() -> None:
    small, large = RoutingShape(2, 2, 256), RoutingShape(2, 2, 257)
    assert (small.nbytes, large.nbytes) == (4, 8)
    assert routing_array(bytes([0, 255, 3, 4]), small).tolist() == [[[0, 255], [3, 4]]]
    assert routing_array(b"\x00\x01" + bytes(6), large).tolist() == [[[256, 0], [0, 0]]]


def test_a_model_without_experts_has_no_routing(family: Family) -> None:
    policy = load_policy(family("qwen3_vl"))
    assert RoutingShape.of(policy.model) is None
    assert not any(
        "forward" in vars(layer)
        for layer in policy.model.model.language_model.layers
        if isinstance(layer, nn.Module)
    )
