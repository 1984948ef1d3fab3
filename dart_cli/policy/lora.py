"""Adapters of low rank (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x, with W unchanged.

    add_adapters       injects adapters through peft and freezes all other parameters
    first_adapters     returns the adapters before any update: drawn, or read from a folder
    initial_adapter    draws one tensor of an adapter from a seed and its name
    is_adapter         tells whether a parameter belongs to an adapter
    adapters_off       a context in which the model computes without adapters, as the reference of the KL
    peft_names         renames published tensors as peft and vLLM expect them
    peft_config        the contents of adapter_config.json, for peft and vLLM
    merge_adapter      adds an adapter to its weight
    base_of            returns the arguments with which vLLM's workers call with_adapters
    with_adapters      adds adapters to the tensors of a whole folder
    merge_into         adds published adapters to the weights of a model without adapters
    adapters_by_layer  groups published tensors into the (A, B) of each layer

A is [rank, inputs] and B is [outputs, rank]. B begins at zero, so that the first version equals the base
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from bus.errors import MissingPartError, ModelError, first_line
from dart_cli.config.adapters import ADAPTER_TENSORS, TARGETS, lora_problem
from dart_cli.config.architecture import canonical
from dart_cli.config.model_folder import model_folder
from dart_cli.config.schema import LoraConfig

_NAME = "default"
"""The name of the one adapter of a model in peft."""
_A, _B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_PEFT = "base_model.model."
"""The prefix of the names in peft's own files."""
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYERS = rf"(.*\.)?language_model\.layers\.\d+\..*\.({'|'.join(TARGETS)})"
"""A pattern that matches exactly the names of the layers that get adapters."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int = 0, folder: str = "") -> None:
    """Inject adapters into `model`, in its dtype, and freeze all its other parameters.

    Their values are read from `folder` (`model.adapters`) if it is named, else drawn with `seed`. A model on
    the meta device gets adapters without values. Raises MissingPartError if peft is not installed.
    """
    if problem := lora_problem():
        raise MissingPartError(f"model.lora: {problem}")
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    config = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=_LAYERS, lora_dropout=0.0
    )
    # peft draws A, which is replaced below; the state of the global generator must not change.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, _NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(model.dtype)  # peft makes float32
    if next(model.parameters()).device.type != "meta":
        parameters = dict(model.named_parameters())
        for name, tensor in first_adapters(model, seed, folder).items():
            parameters[name].data.copy_(tensor)


def first_adapters(model: PreTrainedModel, seed: int, folder: str = "") -> dict[str, torch.Tensor]:
    """Return the adapters of `model` before any update, by name, on the CPU: read from `folder`, else drawn.

    Raises ModelError if the folder lacks one of them, or has others.
    """
    parameters = {name: tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    if not folder:
        return {
            name: initial_adapter(name, parameter.shape, seed)
            for name, parameter in parameters.items()
        }
    try:
        tensors = load_file(model_folder(folder) / ADAPTER_TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.adapters: {folder} cannot be read: {first_line(error)}") from None
    unused = {_canonical_adapter(name): tensor for name, tensor in tensors.items()}
    adapters = {}
    for name, parameter in parameters.items():
        [peft_name] = peft_names({name: parameter})
        tensor = unused.pop(_canonical_adapter(peft_name), None)
        if tensor is None or tensor.shape != parameter.shape:
            raise ModelError(
                f"model.adapters: {folder} lacks the adapter of {name}, or has it in another shape; set "
                "model.path to the model that it adapts"
            )
        adapters[name] = tensor
    if unused:
        raise ModelError(
            f"model.adapters: {folder} also adapts {next(iter(unused))}; dart has adapters on "
            f"{', '.join(TARGETS)} of the language model alone"
        )
    return adapters


def _canonical_adapter(name: str) -> str:
    """Return one name for a tensor of an adapter, whichever of its names a peft folder uses."""
    match = _PEFT_NAME.fullmatch(name)
    return name if match is None else f"{canonical(f'{match[1]}.weight')} {match[2]}"


def initial_adapter(name: str, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Return an adapter's tensor before any update, float32: zeros for B, uniform numbers for A.

    The numbers are within 1 / sqrt(inputs), as in the paper's own code, and depend on seed and name alone.
    """
    if name.endswith(_B):
        return torch.zeros(*shape)
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    rank, inputs = shape
    bound = 1 / inputs**0.5
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Return True if the parameter `name` belongs to an adapter."""
    return name.endswith((_A, _B))


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute without its adapters in the block. Not thread-safe.

    peft's own switch also changes which parameters need gradients. This one does not, so that a graph that
    was built before stays valid.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001 - see above
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


def peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return published adapters under the names that peft has in adapter_model.safetensors."""
    return {f"{_PEFT}{name.replace(f'.{_NAME}.', '.')}": tensor for name, tensor in tensors.items()}


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json; `base` is the folder of the base model."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _LAYERS,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def merge_adapter(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `weight` [O, I] + `factor` B A in the dtype of `weight`, computed in float32 or better."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + factor * (b.to(wide) @ a.to(wide))).to(weight.dtype)


@torch.no_grad()
def merge_into(
    model: PreTrainedModel, adapters: Mapping[str, torch.Tensor], lora: LoraConfig
) -> None:
    """Add published adapters to the weights of `model`, which itself has no adapters."""
    weights = dict(model.named_parameters())
    for layer, (a, b) in adapters_by_layer(adapters).items():
        weight = weights[f"{layer}.weight"]
        weight.copy_(merge_adapter(weight, a, b, lora.alpha / lora.rank))


def base_of(folder: Path, lora: LoraConfig) -> dict[str, Any]:
    """Return the arguments of `with_adapters` in vLLM's workers: the base model's files and the factor."""
    files = [str(file) for file in sorted(folder.absolute().glob("*.safetensors"))]
    return {"base": files, "factor": lora.alpha / lora.rank}


def with_adapters(
    base: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
    factor: float,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `base` with their adapters added, and the other tensors of the same modules.

    An engine may have joined all tensors of an attention or an MLP into one, so it needs all of them if one
    has changed. The tensors of `base` may have any of their names (dart_cli/config/architecture.py).
    """
    by_layer = {canonical(f"{n}.weight"): ab for n, ab in adapters_by_layer(adapters).items()}
    parents = {name.rsplit(".", 2)[0] for name in by_layer}
    for name, tensor in base:
        weight_name = canonical(name)
        if weight_name.rsplit(".", 2)[0] not in parents:
            continue
        if weight_name in by_layer:
            a, b = by_layer[weight_name]
            yield name, merge_adapter(tensor.to(dtype), a, b, factor)
        else:
            yield name, tensor.to(dtype)


def adapters_by_layer(
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the (A, B) of each layer, by the layer's name, from published tensors."""
    return {
        name.removesuffix(_A): (tensor, tensors[f"{name.removesuffix(_A)}{_B}"])
        for name, tensor in tensors.items()
        if name.endswith(_A)
    }
