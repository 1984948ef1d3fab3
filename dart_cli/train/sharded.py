"""One model over several processes: FSDP2 of a loaded policy.

    ShardingPlan       the mesh of processes, the type in which they compute, the place of the shards
    shard              wraps the modules of a model as units of FSDP2
    load_sharded       reads a policy folder shard by shard: no rank ever holds the whole model
    Gradients          decides after which packs gradients are summed over ranks
    local_shard        the part of a tensor that this rank holds
    full_tensor        the whole of a tensor, on every rank
    published_stream   the tensors as they are published, one at a time, in the model's type

A trained parameter is a float32 shard. FSDP2 casts it to `compute` (bfloat16) when it gathers the parameter
for a forward pass, and sums its gradients over ranks in float32. Frozen parameters (a frozen vision tower,
the base under adapters) are whole on each rank in the model's type, and FSDP2 ignores them. Only the experts of
a mixture under adapters, which are nearly the whole model, are shards in the model's type. These modules are
units, each gathered just before it runs and freed after it:

    each language layer; the experts of each layer under adapters;
    each vision block and the rest of the tower, if it is trained;
    the input embedding, unless it is tied to the head;
    the root: final norm and head (and the tied embedding), which stays gathered from forward to backward.

The divisors of the loss are of the whole batch, so gradients are summed over ranks, not averaged.

The moment of summing trades memory against traffic. If gradients are summed after each pack, a rank keeps
only float32 shards (1/N of 4 bytes a parameter), and each pack sends one set of gradients. If they are
summed only after the last pack, each rank keeps float32 gradients of all trained parameters: 30 GB for a
7B, for which there is no memory. So small models (`WHOLE_GRADIENTS_BYTES`) sum once, and larger ones after
each pack; on GPUs the gradients of a layer are sent while the layer before it is computed.
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
from dart_cli.policy.experts import RoutingShape
from dart_cli.policy.loader import LoadedPolicy, load_policy, use_our_layers
from dart_cli.policy.lora import first_adapters
from dart_cli.policy.model_files import PolicyFiles, fill, fill_buffers
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
    compute: torch.dtype  # of weights and activations; trained shards are float32
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
        """The device of this rank's shards."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The types to which FSDP2 casts the parameters and gradients of a trained model.

        It does not cast the inputs of its units: the tower's blocks get the rotations of their patches in
        float32, and the engine does not round them either.
        """
        compute = None if self.compute == torch.float32 else self.compute
        return MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    @property
    def placement(self) -> OffloadPolicy:
        """Where FSDP2 keeps shards and gradients, and therefore the optimizer keeps its state."""
        return (
            CPUOffloadPolicy(pin_memory=accelerator.is_gpu(self.device))
            if self.offload
            else OffloadPolicy()
        )


def shard(
    root: nn.Module, model: PreTrainedModel, plan: ShardingPlan, *, keeps_head: bool = False
) -> None:
    """Make `root`, whose forward runs `model`, one FSDP2 model over `plan.mesh`, in place.

    Trained parameters, which are float32, become shards. If nothing of the model is trained (a reference),
    all of its parameters become shards in their own type. With `keeps_head` its root stays gathered after a
    forward pass, until it is resharded.
    """
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    frozen_experts = _frozen_experts(model) if trained and plan.mesh.size() > 1 else []
    for experts in frozen_experts:
        fully_shard(experts, mesh=plan.mesh)
    # Not sharded: frozen parameters of a trained model; in a reference, those shared with the policy.
    ignored = {
        parameter
        for parameter in model.parameters()
        if (not parameter.requires_grad if trained else not parameter.is_meta)
    }
    options: dict[str, Any] = {
        "mesh": plan.mesh,
        "mp_policy": plan.precision if trained else MixedPrecisionPolicy(),
        "offload_policy": plan.placement if trained else OffloadPolicy(),
        "ignored_params": ignored,
    }
    for unit in _units(model):
        if any(parameter not in ignored for parameter in unit.parameters()):
            fully_shard(unit, **options)
    # A trained root stays gathered until its backward pass; a reference has no backward pass.
    stays = None if trained else not keeps_head
    fully_shard(root, **options, reshard_after_forward=stays)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise FSDP2 asks gloo to divide, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def _frozen_experts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the module of the experts of each layer, if the model has experts that are not trained."""
    if RoutingShape.of(model) is None:
        return []
    inner: Any = model.model
    experts = [layer.mlp.experts for layer in inner.language_model.layers]
    return [each for each in experts if not any(part.requires_grad for part in each.parameters())]


def _units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that become units of FSDP2, inner modules before the modules that contain them."""
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
    keeps_head: bool = False,
) -> tuple[LoadedPolicy, Root]:
    """Load a policy folder over all ranks of `plan`; return it and the module that `root` makes around it.

    `prepare` freezes parameters (all of them for a reference). It may also replace modules by modules of
    another model, which are left unchanged. With `lora` only the adapters are trained, as in `load_policy`.
    `keeps_head` is for `shard`.
    Every rank of the mesh must call this. Raises ModelError as `load_policy` does.
    """
    policy = load_policy(name, weights=False, lora=lora, pointing=pointing)
    model = policy.model
    prepare(model)
    # Buffers keep the type in which their class computes them.
    for parameter in model.parameters():
        if parameter.is_meta:
            dtype = torch.float32 if parameter.requires_grad else plan.compute
            parameter.data = parameter.data.to(dtype)
    scorer = root(policy)
    shard(scorer, model, plan, keeps_head=keeps_head)
    with check_memory(name, plan.device, _SPREAD), PolicyFiles(policy.folder) as files:
        first = first_adapters(model, seed, adapters) if lora is not None else None
        fill(model, files, lambda parameter: _home(parameter, plan), first)
    fill_buffers(model, plan.device)
    use_our_layers(model, plan.compute)
    model.eval()
    return policy, scorer


def _home(parameter: nn.Parameter, plan: ShardingPlan) -> torch.device:
    """Return the device of a parameter; only trained shards may be offloaded."""
    return plan.storage if parameter.requires_grad else plan.device


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """Return a mesh of this process alone, for a model that computes in another type than float32."""
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
    """The rule after which packs the gradients of a sharded model are summed over ranks (see the module)."""

    def __init__(self, root: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        self._root = root if isinstance(root, FSDPModule) else None
        size = sum(parameter.numel() * torch.float32.itemsize for parameter in trained)
        self.once = size <= WHOLE_GRADIENTS_BYTES

    def before(self, *, is_last: bool) -> None:
        """Make FSDP2 sum the gradients of the next backward pass over ranks, or leave them unsummed.

        `is_last` is True before the backward pass of the update's last pack.
        """
        if self._root is not None:
            self._root.set_requires_gradient_sync(is_last or not self.once)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor, all rows if it is not sharded. They share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def published_stream(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> TensorStream:
    """Return the tensors as they are published; trained ones, which are sharded, are whole and in `dtype`.

    Every rank makes the stream of the same tensors and reads all of it; only the first rank gets whole
    tensors. With several ranks, each shard is cast before it is gathered, so that ranks send the model's
    type instead of float32, and only one tensor at a time is whole. A rank alone gives its shards without a
    copy: the reader casts them.
    """
    specs = specs_of(tensors)
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for name in sharded:
        specs[name] = TensorSpec(specs[name].shape, str(dtype).removeprefix("torch."))
    if all(tensor.device_mesh.size() == 1 for tensor in sharded.values()):
        return TensorStream(
            specs, [(name, local_shard(tensor.detach())) for name, tensor in tensors.items()]
        )

    def gather_each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                yield name, tensor.detach()
                continue
            with torch.no_grad():
                whole = _gather(tensor, dtype)
            yield name, whole
            del whole  # freed before the next is gathered

    return TensorStream(specs, gather_each(), is_gathered=True)


def _gather(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather a tensor on the first rank of its mesh, on the mesh's device, and return it there.

    Other ranks send their part and receive nothing; their result is empty.
    """
    mesh = tensor.device_mesh
    # Each part has ceil(rows / ranks) rows, the last ones fewer: their padding is at the end of the whole.
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
