"""The files of a model folder: read in parts, and written.

    PolicyFiles     the safetensors files of a folder, by the names of the model
    fill            parameters on `meta` -> real ones: a shard (DTensor) or the whole of each
    fill_buffers    buffers on `meta` -> real ones, computed as the model's class computes them
    new_folder      a folder that appears when all of it is written
    write_model     the model's tensors, and its config.json with their dtype
    write_adapters  adapters alone, as peft writes them
    copy_rest       tokenizer, template and preprocessor of the folder that it was loaded from

A rank of N holds 1/N of each sharded tensor. Its file is mapped, and only the rows of its shard are
copied, so that neither the host nor the device ever holds the whole model for one rank.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from bus.errors import DiskError, ModelError, cure_of, first_line
from dart_cli.config.architecture import name_of
from dart_cli.config.model_folder import weight_files
from dart_cli.config.rules.machine import refuse_out
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.lora import peft_config, peft_names


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
        """Return the shape of a tensor, without reading it."""
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
        """Return a tensor of any shape, on the CPU, in the file's own type."""
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
            cure = cure_of(error, "copy them again")
            raise ModelError(
                f"{self.folder}: its safetensors files cannot be read ({first_line(error)}); {cure}"
            ) from None


def _name_in_model(key: str) -> str:
    """Return a checkpoint's name of a tensor as the model's class has it now.

    Checkpoints written before transformers 4.52 have the towers side by side (`visual.`, `model.`).
    """
    if key.startswith("visual."):
        return f"model.{key}"
    if key.startswith("model.") and not key.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{key.removeprefix('model.')}"
    return name_of(key)


def _of_base(name: str) -> str:
    """Return the name of a parameter before adapters were put around its layer."""
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
        # Not DTensor.from_local, which moves an offloaded shard to the mesh's device.
        value = torch.empty_like(sharded, device=device)
        assert isinstance(value, DTensor)
        value.to_local().copy_(part)
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


SHARD = "5GB"
"""A larger model is written in shards with an index."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_OWN = frozenset({"config.json", "README.md"})
_DTYPES = ("dtype", "torch_dtype")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to `out` when the block ends, and removed if it fails.

    Raises UserError as `refuse_out` does, DiskError where it cannot be written.
    """
    refuse_out(out)
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        yield draft
        _share(draft)
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        cure = cure_of(error, "is the disk full?")
        raise DiskError(f"{out} cannot be written: {error}; {cure}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model(
    model: PreTrainedModel, base: Path, draft: Path, dtype: str, shard: str = SHARD
) -> None:
    """Write the tensors, and config.json as that of `base` says, with the dtype of these tensors."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(draft, max_shard_size=shard)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _set_dtype(config, dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_adapters(
    tensors: Mapping[str, torch.Tensor], lora: LoraConfig, base: str, draft: Path
) -> None:
    """Write adapters, by their names in a model; `base` is the folder of the model that they are of."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(peft_names(whole), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    told = json.dumps(peft_config(lora, base), indent=2)
    (draft / "adapter_config.json").write_text(told + "\n", encoding="utf-8")


def copy_rest(base: Path, draft: Path) -> None:
    """Tokenizer, template and preprocessor as the model's makers wrote them."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)


def _share(draft: Path) -> None:
    """Let others read the tensors if they may read the rest: safetensors makes its files private."""
    listed = [path for path in draft.iterdir() if path.suffix != ".safetensors"]
    mode = listed[0].stat().st_mode
    for file in draft.glob("*.safetensors"):
        file.chmod(stat.S_IMODE(mode))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """State the dtype of the weights wherever the configuration states one."""
    for key, value in config.items():
        if key in _DTYPES:
            config[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
    if not any(key in config for key in _DTYPES) and "architectures" in config:
        config["dtype"] = dtype
