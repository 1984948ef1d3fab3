"""Adapters of low rank: what they are, where they are, and that they add what they should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bus.errors import MissingPartError
from dart_cli.config import adapters
from dart_cli.config.architecture import HYBRID, shape_of
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.forward import ModelInputs, logits
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.lora import (
    adapters_by_layer,
    adapters_off,
    is_adapter,
    merge_adapter,
    peft_config,
    peft_names,
)
from scripts.small_models import FAMILIES
from tests.engines.conftest import screenshot

Family = Callable[[str], Path]

every_family = pytest.mark.parametrize("model_type", FAMILIES)
LORA = LoraConfig(rank=3, alpha=7.0)


def inputs_of(policy: LoadedPolicy) -> ModelInputs:
    """Two prompts, one with a screen."""
    image = policy.images.prepare(screenshot(1, 112, 112))
    shown = [policy.image_token_id] * image.tokens
    return policy.inputs_of([[9, *shown, 11, 12], [13, 14, 15]], [[image], []])


def frozen(folder: Path) -> LoadedPolicy:
    """The base, of which nothing needs a gradient: torch's matmul adds in another order where it does."""
    policy = load_policy(folder)
    policy.model.requires_grad_(False)
    return policy


@torch.no_grad()
def values(policy: LoadedPolicy) -> torch.Tensor:
    """Logits [2, 2, V] of the last two positions of both prompts."""
    return logits(policy.model, inputs_of(policy), last=2)


def moved(policy: LoadedPolicy, seed: int = 1) -> LoadedPolicy:
    """The policy with random numbers in every adapter."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weight_tensors(policy.model).values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return policy


@every_family
def test_adapters_are_the_weights_and_the_model_begins_as_its_base(
    model_type: str, family: Family
) -> None:
    base, adapted = frozen(family(model_type)), load_policy(family(model_type), lora=LORA)
    tensors = weight_tensors(adapted.model)
    assert all(is_adapter(name) for name in tensors)
    assert not any("visual" in name for name in tensors)
    assert torch.equal(values(base), values(adapted))
    trained = {name for name, p in adapted.model.named_parameters() if p.requires_grad}
    assert trained == set(tensors)
    light = load_policy(family(model_type), lora=LORA, weights=False)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    assert shapes == {n: (t.shape, t.dtype) for n, t in weight_tensors(light.model).items()}


@every_family
def test_every_linear_layer_of_the_language_model_is_adapted(
    model_type: str, family: Family
) -> None:
    tensors = weight_tensors(load_policy(family(model_type), lora=LORA).model)
    base = frozen(family(model_type)).model.get_submodule("model.language_model.layers")
    linear = [name for name, each in base.named_modules() if isinstance(each, torch.nn.Linear)]
    adapted = {layer.rpartition("layers.")[2] for layer in adapters_by_layer(tensors)}
    narrow = {name for name in linear if name.endswith(("in_proj_a", "in_proj_b"))}
    if model_type in HYBRID:
        assert len(narrow) == 6
    if model_type == "qwen3_5_moe":
        narrow |= {name for name in linear if name.endswith("shared_expert_gate")}
        assert len(narrow) == 10
    assert adapted == set(linear) - narrow
    shape = shape_of(json.loads((family(model_type) / "config.json").read_text()))
    assert shape.adapters(LORA.rank) == sum(tensor.numel() for tensor in tensors.values())


@every_family
def test_merged_weights_compute_what_adapters_beside_them_do(
    model_type: str, family: Family
) -> None:
    """float64."""
    base = load_policy(family(model_type), "float32")
    beside = moved(load_policy(family(model_type), "float32", lora=LORA))
    base.model.double()
    beside.model.double()
    expected = values(beside)
    assert float((expected - values(base)).abs().max()) > 0.01
    with torch.no_grad():
        for layer, (a, b) in adapters_by_layer(weight_tensors(beside.model)).items():
            weight = base.model.get_submodule(layer).weight
            assert isinstance(weight, torch.Tensor)
            weight.copy_(merge_adapter(weight, a, b, 7 / 3))
    # `logits` are float32 at its end.
    assert torch.allclose(values(base), expected, rtol=0, atol=2e-6)


def test_the_sum_of_a_layer_is_that_of_the_paper() -> None:
    w, a, b = torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 3)
    x = torch.randn(4)
    assert torch.allclose(
        merge_adapter(w, a, b, 7 / 3) @ x, w @ x + 7 / 3 * (b @ (a @ x)), atol=1e-5
    )


def test_without_its_adapters_the_model_is_its_base_and_graphs_stay(family: Family) -> None:
    base = frozen(family("qwen3_vl"))
    adapted = moved(load_policy(family("qwen3_vl"), lora=LORA))
    with_them = values(adapted)
    built = logits(adapted.model, inputs_of(adapted), last=2)
    with adapters_off(adapted.model):
        assert torch.equal(values(adapted), values(base))
    assert torch.equal(values(adapted), with_them)
    built.square().mean().backward()
    gradients = {n: p.grad for n, p in adapted.model.named_parameters() if p.grad is not None}
    assert gradients.keys() == weight_tensors(adapted.model).keys()
    # What the last layer adds to an image's tokens reaches no later one: the language model has two.
    no_path = "deepstack_merger_list.1."
    assert not [n for n, each in gradients.items() if not bool(each.any()) and no_path not in n]


def test_a_seed_is_always_the_same_adapters_and_draws_nothing_else(family: Family) -> None:
    folder = family("qwen2_5_vl")
    before = torch.get_rng_state()
    one, same, other = (
        weight_tensors(load_policy(folder, lora=LORA, seed=seed).model) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert differ == {name for name in one if ".lora_A." in name}
    assert not any(bool(tensor.any()) for name, tensor in one.items() if ".lora_B." in name)
    columns = [tensor.shape[1] for name, tensor in one.items() if ".lora_A." in name]
    assert all(
        float(one[name].abs().max()) <= size**-0.5
        for name, size in zip(sorted(differ, key=list(one).index), columns, strict=True)
    )


def test_adapters_have_the_dtype_of_the_model(family: Family) -> None:
    adapted = load_policy(family("qwen3_vl"), "bfloat16", lora=LORA)
    assert {tensor.dtype for tensor in weight_tensors(adapted.model).values()} == {torch.bfloat16}
    assert values(adapted).isfinite().all()


@every_family
def test_peft_loads_what_we_name_for_it(model_type: str, family: Family, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    adapted = moved(load_policy(family(model_type), lora=LORA))
    tensors = weight_tensors(adapted.model)
    save_file(peft_names(tensors), tmp_path / "adapter_model.safetensors")
    config = peft_config(LORA, str(family(model_type)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForImageTextToText.from_pretrained(family(model_type), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path)
    loaded = {name: p for name, p in theirs.named_parameters() if is_adapter(name)}
    assert len(loaded) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[f"base_model.model.{name}"], tensor), name
    # Their vision tower attends image by image, ours in one call: equal up to rounding.
    adapted.model = theirs.get_base_model()
    assert torch.allclose(values(moved_like(adapted, tensors)), values(adapted), atol=1e-5)


def moved_like(policy: LoadedPolicy, tensors: dict[str, torch.Tensor]) -> LoadedPolicy:
    for name, mine in weight_tensors(policy.model).items():
        assert torch.equal(mine, tensors[name])
    return policy


def test_without_peft_there_is_one_line_with_the_cure(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        MissingPartError,
        match=r"^model.lora: peft and accelerate are not installed; pip install -e '\.\[lora\]' in dart's folder$",
    ):
        load_policy(family("qwen2_vl"), lora=LORA)
