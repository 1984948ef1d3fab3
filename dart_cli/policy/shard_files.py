"""A policy folder's tensors in parts: what one rank holds is read, and nothing else.

    PolicyFiles     the safetensors files of a folder, by the names of the model
    fill            parameters on `meta` -> real ones: a shard (DTensor) or the whole of each
    fill_buffers    buffers on `meta` -> real ones, computed as the model's class computes them

A rank of N holds 1/N of each sharded tensor. Its file is mapped, and only the rows of its shard are
copied, so that neither the host nor the device ever holds the whole model for one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from bus.errors import ModelError, first_line
from dart_cli.config.architecture import name_of
from dart_cli.config.model_folder import weight_files


class PolicyFiles:
    """The tensors of a Hugging Face folder, under the names of transformers' model classes.

    `read_bytes` counts what was read. Raises ModelError where the folder has no readable safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes = 0
        self._open = contextlib.ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}  # the model's name -> open file, its own name
        with self._as_model_error():
            for path in weight_files(folder):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files |= {_name_in_model(key): (file, key) for key in file.keys()}  # noqa: SIM118

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def check(self, model: nn.Module, given: Collection[str] = ()) -> None:
        """Raise ModelError unless every parameter of `model` is here in its shape, but those `given`."""
        wrong = sorted(
            name
            for name, parameter in model.named_parameters()
            if name not in given
            and (_of_base(name) not in self or self.shape(_of_base(name)) != tuple(parameter.shape))
        )
        if wrong:
            raise ModelError(
                f"{self.folder}: {len(wrong)} tensors are missing or of another shape, the first is "
                f"{wrong[0]}; the folder is incomplete or belongs to another model"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        file, key = self._files[name]
        return tuple(file.get_slice(key).get_shape())

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a tensor's first axis, on the CPU, in the file's own type."""
        with self._as_model_error():
            file, key = self._files[name]
            part: torch.Tensor = file.get_slice(key)[begin:end]
        self.read_bytes += part.numel() * part.element_size()
        return part

    def whole(self, name: str) -> torch.Tensor:
        """A tensor of any shape, on the CPU, in the file's own type."""
        with self._as_model_error():
            file, key = self._files[name]
            tensor: torch.Tensor = file.get_tensor(key)
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @contextlib.contextmanager
    def _as_model_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.folder}: its safetensors files cannot be read ({first_line(error)}); copy them again"
            ) from None


def _name_in_model(key: str) -> str:
    """A checkpoint's name of a tensor as the model's class has it now.

    Checkpoints written before transformers 4.52 have the towers side by side (`visual.`, `model.`).
    """
    if key.startswith("visual."):
        return f"model.{key}"
    if key.startswith("model.") and not key.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{key.removeprefix('model.')}"
    return name_of(key)


def _of_base(name: str) -> str:
    """The name of a parameter before adapters were put around its layer."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    files: PolicyFiles,
    home: Callable[[nn.Parameter], torch.device],
    initial: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace the model's parameters on `meta` by real ones on the device `home`, each in its own dtype.

    Those that are real already stay. A DTensor gets the rows of its own shard. Values are the files', or those of `initial` (whole
    tensors, by name) where the files have none, as of adapters. Tied parameters stay tied. Raises
    ModelError for a tensor that is missing or of another shape.
    """
    values = initial or {}
    named = {name: each for name, each in model.named_parameters() if each.is_meta}
    files.check(
        model, {*values, *(name for name, each in model.named_parameters() if not each.is_meta)}
    )
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            homes.setdefault(id(parameter), []).append((module, name))
    for name, parameter in named.items():
        made = _filled(name, parameter, files, values, home(parameter))
        for module, attribute in homes[id(parameter)]:
            module.register_parameter(attribute, made)


def _filled(
    name: str,
    parameter: nn.Parameter,
    files: PolicyFiles,
    initial: Mapping[str, torch.Tensor],
    device: torch.device,
) -> nn.Parameter:
    if isinstance(parameter.data, DTensor):
        sharded = parameter.data
        begin, end = shard_rows(sharded)
        part = (
            initial[name][begin:end] if name in initial else files.rows(_of_base(name), begin, end)
        )
        local = torch.empty(sharded.to_local().shape, dtype=parameter.dtype, device=device).copy_(
            part
        )
        value: torch.Tensor = DTensor.from_local(
            local,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
    else:
        source = initial[name] if name in initial else files.whole(_of_base(name))
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(source)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def shard_rows(tensor: DTensor) -> tuple[int, int]:
    """Rows [begin, end) of a tensor that this rank holds: of N ranks each the next ceil(rows / N)."""
    rows = int(tensor.shape[0])
    share = -(-rows // tensor.device_mesh.size())
    begin = min(rows, share * tensor.device_mesh.get_local_rank())
    return begin, min(rows, begin + share)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (frequencies of RoPE), on `device`.

    Raises ModelError for a buffer that the class does not compute.
    """
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in buffers.values()):
            continue
        for key, buffer in buffers.items():
            empty = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype, device=device)
            module.register_buffer(key, empty, persistent=False)
        owner = model
        owner._init_weights(module)  # noqa: SLF001 - what from_pretrained computes them with
        for key, buffer in module.named_buffers(recurse=False):
            if not bool(buffer.isfinite().all()):
                raise ModelError(
                    f"{name}.{key} is not computed by this version of transformers when a model is "
                    "loaded in shards; train with train.ranks = 1 and float32, or update transformers"
                )
