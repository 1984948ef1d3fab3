"""Reading the tensors of a model folder in parts, and writing a model folder.

    PolicyFiles     the tensors of a folder's safetensors files, by their names in the model
    fill            replaces parameters on `meta` by real ones, whole or this rank's shard (DTensor)
    fill_buffers    replaces buffers on `meta` by real ones, computed as the model's class computes them
    new_folder      yields a folder that appears under its name only when it is complete
    write_model     writes the model's tensors, and its config.json with their dtype
    published_state returns a model's tensors as published folders of its class have them
    drafting_layers returns the tensors of a folder that only speculative decoding uses
    write_adapters  writes adapters alone, in peft's format
    copy_rest       copies tokenizer, template and preprocessor from the folder of the base model

Each of N ranks holds 1/N of a sharded tensor. The files are mapped into memory and a rank copies only the
rows of its shard, so that neither the host nor the device ever holds the whole model for one rank.

**Experts.** A model has the experts of a layer in two stacked tensors: gate and up [E, 2 N, H], and down
[E, H, N], with E experts of N neurons. Published folders of qwen3_5_moe have them so, those of qwen3_vl_moe
[E, H, 2 N] and [E, N, H], and folders that transformers saved may have a tensor for each expert. All are read.
What is written is laid out as published folders are, which is also how vLLM reads them.
"""

from __future__ import annotations

import contextlib
import json
import re
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
from dart_cli.config.architecture import MIXTURES, Experts, name_of, shape_of
from dart_cli.config.model_folder import read_json, weight_files
from dart_cli.config.rules.machine import refuse_out
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.lora import peft_config, peft_names

_EXPERT = re.compile(
    r"(model\.language_model\..+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight"
)
"""The name in the model's form of a tensor that belongs to one expert."""
_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_TRANSPOSED = ("qwen3_vl_moe",)
"""Classes whose published folders have the last two axes of stacked experts in the other order."""


class PolicyFiles:
    """The tensors of a Hugging Face folder, under the names of transformers' model classes.

    `read_bytes` counts the bytes that were read. Raises ModelError if the folder has no readable safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes = 0
        self._open = contextlib.ExitStack()
        # name in the model -> the open file and the name in it
        self._files: dict[str, tuple[Any, str]] = {}
        # name of a stacked tensor in the model -> (expert, gate, up or down) -> likewise
        self._split: dict[str, dict[tuple[int, str], tuple[Any, str]]] = {}
        self._experts = _experts_of(folder)
        with self._as_model_error():
            for path in weight_files(folder):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                for key in file.keys():  # noqa: SIM118
                    name = _name_in_model(key)
                    if match := _EXPERT.fullmatch(name):
                        stack = "down_proj" if match[3] == "down" else "gate_up_proj"
                        parts = self._split.setdefault(f"{match[1]}.{stack}", {})
                        parts[int(match[2]), match[3]] = file, key
                    else:
                        self._files[name] = file, key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._split

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._files, *self._split]

    def check(self, model: nn.Module, skip: Collection[str] = ()) -> None:
        """Raise ModelError unless the files have every parameter of `model` in its shape.

        The parameters named in `skip` are not checked.
        """
        wrong = sorted(
            name
            for name, parameter in model.named_parameters()
            if name not in skip
            and (_of_base(name) not in self or self.shape(_of_base(name)) != tuple(parameter.shape))
        )
        if wrong:
            raise ModelError(
                f"{self.folder}: {len(wrong)} tensors are missing or of another shape, the first is "
                f"{wrong[0]}; the folder is incomplete or belongs to another model"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the model, without reading it."""
        if name in self._split:
            (file, key), *others = self._split[name].values()
            rows, columns = file.get_slice(key).get_shape()
            stacked = 1 if name.endswith("down_proj") else 2
            count = (1 + len(others)) // stacked
            return count, rows * stacked, columns
        file, key = self._files[name]
        shape = tuple(file.get_slice(key).get_shape())
        return (shape[0], shape[2], shape[1]) if self._is_transposed(name, shape) else shape

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return rows [begin, end) of a tensor's first axis, on the CPU, in the dtype of the file."""
        if name in self._split:
            part = self._joined(name, begin, end)
        else:
            with self._as_model_error():
                file, key = self._files[name]
                part = file.get_slice(key)[begin:end]
            if self._is_transposed(name, tuple(part.shape)):
                part = part.transpose(1, 2)
        self.read_bytes += part.numel() * part.element_size()
        return part

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor of any shape, on the CPU, in the dtype of the file."""
        with self._as_model_error():
            if len(shape := self.shape(name)) == _STACKED_AXES:
                return self.rows(name, 0, shape[0])
            file, key = self._files[name]
            tensor: torch.Tensor = file.get_tensor(key)
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _joined(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the experts [begin, end) of a stacked tensor whose files have each expert by itself."""
        parts = self._split[name]
        kinds = ("down",) if name.endswith("down_proj") else ("gate", "up")
        experts = []
        with self._as_model_error():
            for expert in range(begin, end):
                read = [parts[expert, kind] for kind in kinds]
                experts.append(torch.cat([file.get_tensor(key) for file, key in read]))
            if not experts:
                file, key = parts[0, kinds[0]]
                first: torch.Tensor = file.get_tensor(key)
                return first.new_empty((0, *self.shape(name)[1:]))
        return torch.stack(experts)

    def _is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if the files have the last two axes of a stacked tensor in the other order."""
        if self._experts is None or not name.endswith(_STACKED):
            return False
        width, neurons = self._experts.width, self._experts.neurons
        other = (neurons, width) if name.endswith("down_proj") else (width, 2 * neurons)
        return shape[1:] == other

    @contextlib.contextmanager
    def _as_model_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            fix = cure_of(error, "copy them again")
            raise ModelError(
                f"{self.folder}: its safetensors files cannot be read ({first_line(error)}); {fix}"
            ) from None


_STACKED_AXES = 3


def _experts_of(folder: Path) -> Experts | None:
    """Return the experts of a folder whose stacked tensors may be transposed; None for any other folder."""
    config = read_json(folder, "config.json") if (folder / "config.json").is_file() else {}
    return shape_of(config).experts if config.get("model_type") in _TRANSPOSED else None


def published_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a mixture by name, as published folders of its class have them; {} for other classes.

    They share the memory of the model's. transformers' own writer would save each expert by itself, or stacked
    in an order that vLLM reads as another matrix.
    """
    kind = model.config.model_type
    if kind not in MIXTURES:
        return {}
    state: dict[str, torch.Tensor] = model.state_dict()
    if kind not in _TRANSPOSED:
        return state
    return {
        name: tensor.transpose(1, 2) if name.endswith(_STACKED) else tensor
        for name, tensor in state.items()
    }


def _name_in_model(key: str) -> str:
    """Return the name that the model's class has now for a tensor that a checkpoint calls `key`.

    Checkpoints from before transformers 4.52 have the two towers side by side (`visual.`, `model.`).
    """
    if key.startswith("visual."):
        return f"model.{key}"
    if key.startswith("model.") and not key.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{key.removeprefix('model.')}"
    return name_of(key)


def _of_base(name: str) -> str:
    """Return the name that a parameter had before adapters were put around its layer."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    files: PolicyFiles,
    home: Callable[[nn.Parameter], torch.device],
    initial: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace parameters on `meta` by real ones of the same dtype on the device `home(parameter)`.

    Values come from `initial` (whole tensors by name, such as adapters), else from the files. A DTensor gets
    the rows of its own shard. Parameters that are real already are left alone, and tied parameters stay tied.
    Raises ModelError for a tensor that is missing or has another shape.
    """
    values = initial or {}
    parameters = dict(model.named_parameters())
    on_meta = {name: parameter for name, parameter in parameters.items() if parameter.is_meta}
    files.check(model, skip={*values, *(parameters.keys() - on_meta.keys())})
    # A tied parameter is an attribute of several modules: all of them get the same new one.
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for name, parameter in on_meta.items():
        real = _load_parameter(name, parameter, files, values, home(parameter))
        for module, attribute in owners[id(parameter)]:
            module.register_parameter(attribute, real)


def _load_parameter(
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
    """Return the rows [begin, end) of a tensor that this rank holds; each of N ranks has ceil(rows / N)."""
    rows = int(tensor.shape[0])
    share = -(-rows // tensor.device_mesh.size())
    begin = min(rows, share * tensor.device_mesh.get_local_rank())
    return begin, min(rows, begin + share)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute on `device` the buffers that no checkpoint has, such as the frequencies of RoPE.

    Raises ModelError for a buffer that the model's class does not compute.
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
"""Size of a file above which a model is written in shards with an index."""
_DRAFTING, _DRAFTING_KEY = "mtp.", "mtp_num_hidden_layers"
"""The prefix of Qwen3.5's multi-token prediction layers, and the key that says how many there are."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_OWN = frozenset({"config.json", "README.md"})
_DTYPES = ("dtype", "torch_dtype")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to `out` after the block, or removed if the block fails.

    Raises UserError as `refuse_out` does, and DiskError if the folder cannot be written.
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
        fix = cure_of(error, "is the disk full?")
        raise DiskError(f"{out} cannot be written: {error}; {fix}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model(
    model: PreTrainedModel, base: Path, draft: Path, dtype: str, shard: str = SHARD
) -> bool:
    """Write the model's tensors, and the config.json of `base` with the dtype of these tensors.

    The drafting layers of `base` are written unchanged, in that dtype; return True if it has some.
    """
    transformers_logging.disable_progress_bar()
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    drafting = drafting_layers(base, getattr(torch, dtype))
    published = published_state(model)
    state = {**(published or model.state_dict()), **drafting} if drafting else published
    model.save_pretrained(
        draft,
        state_dict=state or None,
        max_shard_size=shard,
        save_original_format=not published,
    )
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    if _DRAFTING_KEY in text and not drafting:
        text[_DRAFTING_KEY] = 0  # an engine that drafts would look for their tensors
    _set_dtype(config, dtype)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return bool(drafting)


def drafting_layers(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's multi-token prediction layers in `dtype`; {} if it has none.

    Qwen3.5's checkpoints have one such layer, which drafts tokens for speculative decoding. transformers does
    not load it, and dart does not train it. Folders that transformers saved have lost it, whatever their
    config.json says, and a folder may not have its weights yet.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    if not text.get(_DRAFTING_KEY) or not any(folder.glob("*.safetensors")):
        return {}
    with PolicyFiles(folder) as files:
        names = [name for name in files.names() if name.startswith(_DRAFTING)]
        # Copies, because the file that they are mapped from may be replaced.
        return {name: files.whole(name).to(dtype, copy=True) for name in names}


def write_adapters(
    tensors: Mapping[str, torch.Tensor], lora: LoraConfig, base: str, draft: Path
) -> None:
    """Write adapters, which `tensors` has by their names in the model, into `draft`.

    `base` is the folder of the model that they adapt.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(peft_names(whole), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.dumps(peft_config(lora, base), indent=2)
    (draft / "adapter_config.json").write_text(config + "\n", encoding="utf-8")


def copy_rest(base: Path, draft: Path) -> None:
    """Copy tokenizer, template and preprocessor from `base`, as the model's makers wrote them."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)


def _share(draft: Path) -> None:
    """Give the safetensors files, which are written as private, the mode of the other files."""
    others = [path for path in draft.iterdir() if path.suffix != ".safetensors"]
    mode = others[0].stat().st_mode
    for file in draft.glob("*.safetensors"):
        file.chmod(stat.S_IMODE(mode))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype wherever a model's configuration states one, nested sections included."""
    for key, value in config.items():
        if key in _DTYPES:
            config[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
    if not any(key in config for key in _DTYPES) and "architectures" in config:
        config["dtype"] = dtype
