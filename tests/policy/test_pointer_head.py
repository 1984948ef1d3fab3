"""The head that points, against float64 numpy and against the layers that the release is made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bus.errors import ModelError
from dart_cli.config.architecture import HEADS, head_parameters, name_of
from dart_cli.policy.pointer_head import PointerHead, head_of, initial_head

D, P, N = 16, 7, 3


def random_head(dtype: torch.dtype = torch.float32) -> PointerHead:
    head = PointerHead(D).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return head


def vectors(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed))


def in_numpy(head: PointerHead, visual: torch.Tensor, hidden: torch.Tensor) -> Any:
    """Logits [N, P] in float64, head by head."""
    w = {name: each.detach().double().numpy() for name, each in head.named_parameters()}

    def linear(name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def gelu(x: Any) -> Any:
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    v = visual.double().numpy()
    query, key, value = np.split(linear("qkv", v), 3, axis=1)
    seen, side = np.zeros_like(v), head.width // HEADS
    for each in range(HEADS):
        part = slice(each * side, (each + 1) * side)
        scores = query[:, part] @ key[:, part].T / math.sqrt(side)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        seen[:, part] = weights @ value[:, part] / weights.sum(axis=1, keepdims=True)
    mixed = v + linear("out", seen)
    centred = mixed - mixed.mean(axis=1, keepdims=True)
    mixed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    mixed = mixed * w["norm.weight"] + w["norm.bias"]
    keys = linear("key_out", gelu(linear("key_in", mixed)))
    queries = linear("query_out", gelu(linear("query_in", hidden.double().numpy())))
    return queries @ keys.T / math.sqrt(head.width)


def test_logits_are_those_of_an_independent_computation() -> None:
    head, visual, hidden = random_head(), vectors(P, 1), vectors(N, 2)
    with torch.inference_mode():
        found = head.logits(hidden, head.keys(visual))
    expected = in_numpy(head, visual, hidden)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_a_head_has_as_many_parameters_as_its_paper_says() -> None:
    for width in (16, 96):
        head = PointerHead(width)
        assert sum(each.numel() for each in head.parameters()) == head_parameters(width)
        drawn = {name: each.shape for name, each in initial_head(width, 0).items()}
        assert drawn == {name: each.shape for name, each in head.named_parameters()}


def test_a_head_computes_what_the_releases_layers_compute() -> None:
    """torch's own attention, norm and sequences, with the release's names of tensors."""
    released = nn.ModuleDict(
        {
            "self_attention": nn.MultiheadAttention(D, HEADS, dropout=0.1, batch_first=True),
            "layer_norm": nn.LayerNorm(D),
            "projection_enc": nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
            "projection_dec": nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
        }
    ).eval()
    head = PointerHead(D)
    named = {
        name_of(f"multi_patch_pointer_head.{name}").removeprefix("pointer_head."): tensor
        for name, tensor in released.state_dict().items()
    }
    head.load_state_dict(named)
    head.eval()
    visual, hidden = vectors(P, 1), vectors(N, 2)
    with torch.inference_mode():
        seen, _ = released["self_attention"](visual[None], visual[None], visual[None])
        keys = released["projection_enc"](released["layer_norm"](visual + seen[0]))
        expected = released["projection_dec"](hidden) @ keys.T / D**0.5
        torch.testing.assert_close(head(visual, hidden), expected, atol=1e-6, rtol=1e-5)


def test_logits_of_a_bfloat16_head_are_float32() -> None:
    head = random_head(torch.bfloat16)
    with torch.inference_mode():
        assert head(vectors(P, 1), vectors(N, 2)).dtype == torch.float32
        assert random_head(torch.float64)(vectors(P, 1), vectors(N, 2)).dtype == torch.float64


def test_dropout_is_of_training_alone() -> None:
    head, visual, hidden = random_head(), vectors(P, 1), vectors(N, 2)
    with torch.inference_mode():
        assert torch.equal(head(visual, hidden), head(visual, hidden))
        head.train()
        torch.manual_seed(0)
        assert not torch.equal(head(visual, hidden), head(visual, hidden))


def test_an_initial_head_follows_from_its_seed_and_points_nowhere() -> None:
    made, again, other = initial_head(96, 1), initial_head(96, 1), initial_head(96, 2)
    assert all(torch.equal(made[name], again[name]) for name in made)
    assert not torch.equal(made["qkv.weight"], other["qkv.weight"])
    head = PointerHead(96)
    head.load_state_dict(made)
    visual = torch.randn(30, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logprobs = head.eval()(visual, visual[:4]).log_softmax(-1)
    assert (logprobs + math.log(30)).abs().max() < 0.2


def test_a_width_that_its_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ModelError, match="multiple of 8, not 20"):
        PointerHead(20)


def test_a_model_without_a_head_has_none() -> None:
    assert head_of(nn.Linear(2, 2)) is None
