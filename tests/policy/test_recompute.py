"""Recomputing layers changes memory and nothing else, and it really happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bus.errors import ModelError
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.packed import PackedInputs, packed_hidden, use_recompute
from scripts.small_models import FAMILIES

Family = Callable[[str], Path]
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def inputs_of(policy: LoadedPolicy) -> PackedInputs:
    """A root that shows a screen, and two nodes under it."""
    noise = np.random.default_rng(1).integers(0, 256, (84, 112, 3), dtype=np.uint8)
    image = policy.images.of_image("noise", Image.fromarray(noise))
    tokens = [20, 21, *[policy.image_token_id] * image.tokens, *range(30, 60)]
    length = len(tokens)
    return PackedInputs(
        torch.tensor(tokens),
        torch.arange(length).expand(3, -1),
        PackLayout((0, length - 20, length - 8, length), (-1, 0, 0)),
        (image,),
        (0,),
    )


def loaded(folder: Path, *, freeze_vision: bool) -> LoadedPolicy:
    policy = load_policy(folder)
    inner: Any = policy.model.model
    inner.visual.requires_grad_(not freeze_vision)
    return policy


def gradients(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    hidden = packed_hidden(policy.model, inputs_of(policy))
    hidden.log_softmax(-1)[:, ::3].sum().backward()
    named = policy.model.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


@every_family
@pytest.mark.parametrize("freeze_vision", [False, True])
def test_gradients_are_bit_equal(model_type: str, freeze_vision: bool, family: Family) -> None:
    plain = loaded(family(model_type), freeze_vision=freeze_vision)
    recomputing = loaded(family(model_type), freeze_vision=freeze_vision)
    use_recompute(recomputing.model)
    expected, found = gradients(plain), gradients(recomputing)
    assert expected.keys() == found.keys()
    assert len(found) > 10
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@every_family
@pytest.mark.parametrize("freeze_vision", [False, True])
def test_every_trained_layer_runs_twice(
    model_type: str, freeze_vision: bool, family: Family
) -> None:
    """transformers' switch does nothing in evaluation mode and says nothing."""
    policy = loaded(family(model_type), freeze_vision=freeze_vision)
    use_recompute(policy.model)
    inner: Any = policy.model.model
    runs: Counter[nn.Module] = Counter()
    layers, blocks = list(inner.language_model.layers), list(inner.visual.blocks)
    for layer in layers + blocks:
        layer.register_forward_pre_hook(lambda module, _: runs.update([module]))
    gradients(policy)
    assert [runs[layer] for layer in layers] == [2] * len(layers)
    assert [runs[block] for block in blocks] == [1 if freeze_vision else 2] * len(blocks)


@pytest.mark.parametrize("kind", ["config", "module"])
def test_dropout_is_refused(kind: str, family: Family) -> None:
    policy = load_policy(family("qwen2_5_vl"))
    inner: Any = policy.model.model
    layer = inner.language_model.layers[1]
    if kind == "config":
        layer.self_attn.attention_dropout = 0.1
    else:
        layer.mlp.register_module("extra", nn.Dropout(0.1))
    with pytest.raises(ModelError, match=r"layers\.1\..* is 0\.1; set it to 0"):
        use_recompute(policy.model)
    assert not policy.model.training


def test_a_layer_without_the_switch_is_refused(family: Family) -> None:
    policy = load_policy(family("qwen2_5_vl"))
    inner: Any = policy.model.model
    inner.language_model.layers[1] = nn.Identity()
    with pytest.raises(ModelError, match="layer 1 of Qwen2_5_VLForConditionalGeneration"):
        use_recompute(policy.model)
