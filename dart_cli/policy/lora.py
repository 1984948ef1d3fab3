"""Adapters of low rank (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x, with W as it was.

    add_adapters      injects them through peft; from then on they alone are the model's weights
    first_adapters    what adapters are before any update: drawn, or those of a folder
    initial_adapter   what an adapter's tensor is before any update, of a seed and its name
    is_adapter        whether a parameter's name is an adapter's
    adapters_off      the model without them, meanwhile: the reference of the KL
    peft_names        published tensors as peft and vLLM name them
    peft_config       adapter_config.json, for peft and vLLM
    merged            a weight with its adapter added; with_adapters, those of a whole folder
    merge_into        adapters of a model, added to the weights of the model that they are of

A is [rank, inputs] and B [outputs, rank]. B begins at zero, so that the first version is the base.
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
"""What peft calls the one adapter of a model."""
_A, _B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_PEFT = "base_model.model."
"""What the names in peft's own files begin with."""
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYERS = rf"(.*\.)?language_model\.layers\.\d+\..*\.({'|'.join(TARGETS)})"
"""What matches the names of the layers that get adapters, and of no others."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int = 0, folder: str = "") -> None:
    """Inject adapters into `model`, in its own dtype, and freeze all its other parameters.

    They begin as those of `folder` (`model.adapters`), else they are drawn by `seed`.

    On the meta device they have shapes alone. Raises MissingPartError without peft.
    """
    if problem := lora_problem():
        raise MissingPartError(f"model.lora: {problem}")
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    given = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_LAYERS, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):  # it draws A, which is drawn again below
        inject_adapter_in_model(given, model, _NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(model.dtype)  # peft would compute in float32
    if next(model.parameters()).device.type != "meta":
        parameters = dict(model.named_parameters())
        for name, tensor in first_adapters(model, seed, folder).items():
            parameters[name].data.copy_(tensor)


def first_adapters(model: PreTrainedModel, seed: int, folder: str = "") -> dict[str, torch.Tensor]:
    """Return what the adapters of `model` are before any update, by name, on the CPU: those of `folder`, else drawn.

    Raises ModelError where the folder has not all of them.
    """
    adapters = {name: each for name, each in model.named_parameters() if is_adapter(name)}
    if not folder:
        return {name: initial_adapter(name, each.shape, seed) for name, each in adapters.items()}
    try:
        read = load_file(model_folder(folder) / ADAPTER_TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.adapters: {folder} cannot be read: {first_line(error)}") from None
    held = {_adapter_of(name): tensor for name, tensor in read.items()}
    found = {}
    for name, each in adapters.items():
        [wanted] = [_adapter_of(own) for own in peft_names({name: each})]
        tensor = held.pop(wanted, None)
        if tensor is None or tensor.shape != each.shape:
            raise ModelError(
                f"model.adapters: {folder} lacks the adapter of {name}, or has it in another shape; set "
                "model.path to the model that it is of"
            )
        found[name] = tensor
    if held:
        raise ModelError(
            f"model.adapters: {folder} also adapts {next(iter(held))}; dart has adapters on "
            f"{', '.join(TARGETS)} of the language model alone"
        )
    return found


def _adapter_of(name: str) -> str:
    """One name for an adapter's tensor, whatever a peft folder calls it."""
    found = _PEFT_NAME.fullmatch(name)
    return name if found is None else f"{canonical(f'{found[1]}.weight')} {found[2]}"


def initial_adapter(name: str, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Return an adapter's tensor before any update, float32: of B zeros, of A uniform numbers.

    They are within 1 / sqrt(inputs), as in the paper's own code, and follow from seed and name alone.
    """
    if name.endswith(_B):
        return torch.zeros(*shape)
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    rank, inputs = shape
    bound = 1 / inputs**0.5
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is an adapter's."""
    return name.endswith((_A, _B))


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model computes as its base does.

    peft's own switch also changes which parameters need gradients; this one leaves a graph that was
    built before as it is. Not thread-safe.
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
    """Return published adapters by the names that peft's adapter_model.safetensors has."""
    return {f"{_PEFT}{name.replace(f'.{_NAME}.', '.')}": each for name, each in tensors.items()}


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """adapter_config.json of adapters; `base` is the base's folder."""
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


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
    """`weight` [O, I] with `factor` B A added, in its dtype; the sum is made in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + factor * (b.to(wide) @ a.to(wide))).to(weight.dtype)


@torch.no_grad()
def merge_into(
    model: PreTrainedModel, adapters: Mapping[str, torch.Tensor], lora: LoraConfig
) -> None:
    """Add published adapters to the weights of `model`, which has none."""
    weights = dict(model.named_parameters())
    for layer, (a, b) in adapters_by_layer(adapters).items():
        weight = weights[f"{layer}.weight"]
        weight.copy_(merged(weight, a, b, lora.alpha / lora.rank))


def base_of(folder: Path, lora: LoraConfig) -> dict[str, Any]:
    """Return what `with_adapters` needs, for vLLM's workers: the base's files and the factor."""
    files = [str(file) for file in sorted(folder.absolute().glob("*.safetensors"))]
    return {"base": files, "factor": lora.alpha / lora.rank}


def with_adapters(
    base: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
    factor: float,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `base` that adapters change, changed, and all those beside them.

    `base` may have any of a tensor's names (architecture.py). Beside a changed one are the others of
    its attention or MLP, with which an engine may have joined it.
    """
    by_layer = {canonical(f"{n}.weight"): ab for n, ab in adapters_by_layer(adapters).items()}
    parents = {name.rsplit(".", 2)[0] for name in by_layer}
    for name, tensor in base:
        known = canonical(name)
        if known.rsplit(".", 2)[0] not in parents:
            continue
        if known in by_layer:
            yield name, merged(tensor.to(dtype), *by_layer[known], factor)
        else:
            yield name, tensor.to(dtype)


def adapters_by_layer(
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (A, B) of each layer of published tensors, by the layer's name."""
    return {
        name.removesuffix(_A): (tensor, tensors[f"{name.removesuffix(_A)}{_B}"])
        for name, tensor in tensors.items()
        if name.endswith(_A)
    }
