"""Less memory for a backward pass: each layer keeps its input and computes the rest again.

    use_recompute   switch it on, and prove that it is on

Activation checkpointing (arXiv 1604.06174) by transformers' own switch, which does nothing in
evaluation mode: the model is put into training mode. That changes no number as long as nothing is
dropped at random, so every dropout must be 0.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bus.errors import ModelError
from dart_cli.policy.pointer.head import head_of


def use_recompute(model: PreTrainedModel) -> None:
    """Recompute each language layer in the backward pass, and each vision block where it is trained.

    Gradients stay bit-equal. The model must not be used with a KV cache afterwards: transformers drops
    it here. Call it after freezing. Raises ModelError if the model drops values at random, or has a
    layer without the switch.
    """
    if dropping := _dropping(model):
        name, value = dropping
        raise ModelError(
            f'train.recompute = "layer" needs a model without dropout, {name} is {value}; '
            "set it to 0 in the model's config.json, or train.recompute to none"
        )
    # Nothing is drawn at random, so no generator's state has to be kept.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    inner: Any = model.model
    if not any(parameter.requires_grad for parameter in inner.visual.parameters()):
        inner.visual.eval()
    if (head := head_of(model)) is not None:
        head.eval()  # it drops values at random in training mode, which engines do not
    if off := [name for name, layer in _layers(inner) if not _recomputes(layer)]:
        raise ModelError(
            f"{off[0]} of {type(model).__name__} cannot be recomputed; set train.recompute to none"
        )


def _layers(inner: Any) -> list[tuple[str, nn.Module]]:
    """The layers that training goes back through, with names for messages."""
    layers = [(f"layer {index}", layer) for index, layer in enumerate(inner.language_model.layers)]
    if inner.visual.training:
        layers += [(f"vision block {i}", block) for i, block in enumerate(inner.visual.blocks)]
    return layers


def _recomputes(layer: nn.Module) -> bool:
    return (
        isinstance(layer, GradientCheckpointingLayer)
        and layer.gradient_checkpointing
        and layer.training
    )


def _dropping(model: nn.Module) -> tuple[str, float] | None:
    """The first part of the model that drops values at random, and its probability."""
    for path, module in model.named_modules():
        is_dropout = "Drop" in type(module).__name__  # torch's hold their probability as `p`
        for name, value in vars(module).items():
            is_rate = "drop" in name or (is_dropout and name == "p")
            if is_rate and isinstance(value, int | float) and float(value) != 0:
                return f"{path}.{name}", float(value)
    return None
