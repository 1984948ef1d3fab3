"""One model over several processes: FSDP2 of a loaded policy.

    ShardingPlan    the processes' mesh, in what type they compute, where the shards are
    shard           which modules are units of FSDP2, and how they are wrapped
    load_sharded    a policy folder, read shard by shard: no rank ever holds the whole model
    Gradients       when a rank's gradients are summed with the others'
    local_shard     the part of a tensor that this rank holds
    published       the tensors as they are published, one at a time, in the model's type

A trained parameter is a float32 shard, its own master: FSDP2 casts it to `compute` (bfloat16) where it
is gathered for a forward pass, and sums its gradients over ranks in float32. Frozen parameters (a
frozen vision tower, the base under adapters) are whole on each rank in the model's type and take no
part. Units, each gathered just before it runs and freed behind it:

    each language layer; each vision block and the rest of the tower, where it is trained;
    the input embedding, unless it is tied to the head
    the root: final norm and head (and the tied embedding), held from forward to backward

Divisors of the loss are the whole batch's, so gradients are summed over ranks, not averaged.

When a rank's gradients are summed decides memory against traffic. Summed after each pack, a rank keeps
float32 shards only (1/N of 4 bytes a parameter), and each pack sends one set of gradients. Summed
after the last pack alone, each rank keeps float32 gradients of all trained parameters: 30 GB for a 7B,
which no plan of memory has room for. So small models (`WHOLE_GRADIENTS_BYTES`) sum once, others each
time; on GPUs the sums of a layer are sent while the layer before it is computed.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from dart_cli.algo.memory_bounds import WHOLE_GRADIENTS_BYTES
from dart_cli.config.schema import LoraConfig, Pointing
from dart_cli.hardware import accelerator
from dart_cli.hardware.device import check_memory
from dart_cli.policy.forward import use_batched_vision
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.lora import first_adapters
from dart_cli.policy.model_files import PolicyFiles, fill, fill_buffers
from dart_cli.policy.packed import use_packed
from dart_cli.weights.flat_weights import TensorStream, specs_of
from dart_cli.weights.manifest import TensorSpec

_distributed: Any = torch.distributed  # whose type stubs lack what is used here
_SPREAD = (
    'spread the model over more train.ranks, set train.offload = "optimizer", or train adapters '
    "(model.lora); `dart doctor CONFIG` says what a run takes"
)
Root = TypeVar("Root", bound=nn.Module)


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is spread over the processes of a mesh of one axis."""

    mesh: DeviceMesh
    device: torch.device  # where this rank computes
    compute: torch.dtype  # of weights and activations; masters are float32
    offload: bool = False  # shards and optimizer in main memory

    @classmethod
    def of(cls, mesh: DeviceMesh, compute: torch.dtype, offload: str) -> ShardingPlan:
        """Return the plan of this process."""
        device = torch.device(mesh.device_type)
        if accelerator.is_gpu(device):
            device = torch.device(device.type, accelerator.current_device_index())
        return cls(mesh, device, compute, offload == "optimizer")

    @property
    def storage(self) -> torch.device:
        """Where this rank's shards are."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """What FSDP2 casts the parameters of a trained model to.

        Not the inputs of its units: the tower's blocks are given the rotations of their patches in float32, and
        the engine does not round them.
        """
        compute = None if self.compute == torch.float32 else self.compute
        return MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    @property
    def placement(self) -> OffloadPolicy:
        """Where FSDP2 keeps shards, gradients and so the optimizer's state."""
        return (
            CPUOffloadPolicy(pin_memory=accelerator.is_gpu(self.device))
            if self.offload
            else OffloadPolicy()
        )


def shard(root: nn.Module, model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Make `root`, whose forward runs `model`, one FSDP2 model over `plan.mesh`, in place.

    Its trained parameters, float32, become shards. A model that trains nothing (a reference) is
    sharded whole, in its own type.
    """
    trained = {each for each in model.parameters() if each.requires_grad}
    kept = {
        each
        for each in model.parameters()
        if (not each.requires_grad if trained else not each.is_meta)  # else it is another model's
    }
    options: dict[str, Any] = {
        "mesh": plan.mesh,
        "mp_policy": plan.precision if trained else MixedPrecisionPolicy(),
        "offload_policy": plan.placement if trained else OffloadPolicy(),
        "ignored_params": kept,
    }
    for unit in _units(model):
        if any(parameter not in kept for parameter in unit.parameters()):
            fully_shard(unit, **options)
    # A trained root stays gathered until its backward pass; that of a reference has none.
    fully_shard(root, **options, reshard_after_forward=None if trained else True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(
                True
            )  # else gloo is asked to divide, and cannot


def _units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules that are gathered by themselves, inner ones before those that hold them."""
    inner: Any = model.model
    yield from inner.visual.blocks
    yield inner.visual
    yield from inner.language_model.layers
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding.weight is not head.weight:
        yield embedding


def load_sharded(
    name: str | Path,
    plan: ShardingPlan,
    *,
    prepare: Callable[[PreTrainedModel], None],
    root: Callable[[LoadedPolicy], Root],
    lora: LoraConfig | None = None,
    seed: int = 0,
    pointing: Pointing = "text",
    adapters: str = "",
) -> tuple[LoadedPolicy, Root]:
    """Return a policy folder over all ranks of `plan`, and the root module that `root` makes around it.

    `prepare` marks what is not trained (all of it: a reference), and may put modules of another model
    in place of its own, which stay as they are. With `lora` the adapters alone are trained, as of `load_policy`. Every rank
    of the mesh calls this. Raises ModelError as `load_policy` does.
    """
    policy = load_policy(name, weights=False, lora=lora, pointing=pointing)
    model = policy.model
    prepare(model)
    for parameter in model.parameters():  # not buffers, which stay as the class computes them
        if parameter.is_meta:
            dtype = torch.float32 if parameter.requires_grad else plan.compute
            parameter.data = parameter.data.to(dtype)
    made = root(policy)
    shard(made, model, plan)
    with check_memory(name, plan.device, _SPREAD), PolicyFiles(policy.folder) as files:
        first = first_adapters(model, seed, adapters) if lora is not None else None
        fill(model, files, lambda parameter: _home(parameter, plan), first)
    fill_buffers(model, plan.device)
    use_batched_vision(model)
    use_packed(model)
    model.eval()
    return policy, made


def _home(parameter: nn.Parameter, plan: ShardingPlan) -> torch.device:
    """Where a parameter is kept: offloaded if it is a trained shard."""
    return plan.storage if parameter.requires_grad else plan.device


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """Return a mesh of this process alone, for a model whose masters are of another type than its weights."""
    if not torch.distributed.is_initialized():
        if accelerator.is_gpu(device):
            accelerator.set_device_index(device)
        torch.distributed.init_process_group(
            accelerator.backend(device), store=_distributed.HashStore(), rank=0, world_size=1
        )
        atexit.register(_leave)
    return init_device_mesh(device.type, (1,))


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Gradients:
    """When the gradients of a sharded model are summed over ranks; see the module."""

    def __init__(self, root: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        self._root = root if isinstance(root, FSDPModule) else None
        size = sum(parameter.numel() * torch.float32.itemsize for parameter in trained)
        self.once = size <= WHOLE_GRADIENTS_BYTES

    def before(self, *, is_last: bool) -> None:
        """Tell FSDP2 that the next backward is that of the update's last pack, or of another."""
        if self._root is not None:
            self._root.set_requires_gradient_sync(is_last or not self.once)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor; all if it is not sharded. They share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def published(named: Mapping[str, torch.Tensor], dtype: torch.dtype) -> TensorStream:
    """Return the tensors as they are published: trained ones, which are sharded, whole and in `dtype`.

    Every rank makes it of the same tensors, and reads it whole; what the first rank reads is of meaning.
    Of several ranks each shard is cast before it is gathered, so that ranks send the model's type and
    not float32, and one tensor at a time is whole. A rank alone gives its shards as they are: the reader
    casts them.
    """
    specs = specs_of(named)
    sharded = {name: each for name, each in named.items() if isinstance(each, DTensor)}
    for name in sharded:
        specs[name] = TensorSpec(specs[name].shape, str(dtype).removeprefix("torch."))
    if all(each.device_mesh.size() == 1 for each in sharded.values()):
        return TensorStream(
            specs, [(name, local_shard(each.detach())) for name, each in named.items()]
        )

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in named.items():
            if not isinstance(each, DTensor):
                yield name, each.detach()
                continue
            with torch.no_grad():
                whole = _gathered(each, dtype)
            yield name, whole
            del whole  # freed before the next is gathered

    return TensorStream(specs, tensors(), is_gathered=True)


def _gathered(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a tensor on the first rank of its mesh, on the mesh's device; elsewhere of no meaning.

    Other ranks send their part and receive nothing.
    """
    mesh = tensor.device_mesh
    # Parts are of ceil(rows / ranks) rows, the last ones of fewer: what is missing is at the end.
    assert tensor.placements == (Shard(0),)
    rows = -(-tensor.shape[0] // mesh.size())
    local = tensor.to_local()
    part = torch.empty((rows, *tensor.shape[1:]), dtype=dtype, device=mesh.device_type)
    part[: len(local)].copy_(local)
    is_first = mesh.get_rank() == 0
    parts = part.new_empty((mesh.size() if is_first else 0, *part.shape))
    _distributed.gather(
        part, list(parts.unbind()) if is_first else None, group=mesh.get_group(), group_dst=0
    )
    return parts.flatten(0, 1)[: tensor.shape[0]]
