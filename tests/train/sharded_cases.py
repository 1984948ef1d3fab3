"""The program of the ranks of tests/train/test_sharded.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dart_cli.config.schema import LoraConfig
from dart_cli.policy import model_files
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.packed import use_recompute
from dart_cli.policy.pointer_head import head_of
from dart_cli.train import sharded
from dart_cli.train.base import read_all
from dart_cli.train.sharded import (
    Gradients,
    ShardingPlan,
    load_sharded,
    local_shard,
)

BATCH = 4  # samples, dealt out to the ranks in turn


class Root(nn.Module):
    """A forward pass whose head is read without its own forward, as the trainer's."""

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        self.model = policy.model
        self.forbidden = policy.forbidden(torch.device("cpu"))

    def forward(self, sample: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.model.model(**sample, use_cache=False).last_hidden_state[0]
        logits = (hidden @ self.model.lm_head.weight.T).float()
        logprobs = logits.index_fill(-1, self.forbidden, float("-inf")).log_softmax(-1)
        picked = logprobs[4:12].gather(1, sample["input_ids"][0, 5:13, None] * 0 + 7).flatten()
        if (pointer := head_of(self.model)) is not None:
            patches = pointer(hidden[:6], hidden[-1:]).log_softmax(-1)
            picked = torch.cat([picked, patches[0, 2:3]])
        return picked.clone(), hidden.clone()


def sample(model: Any, number: int) -> dict[str, torch.Tensor]:
    config = model.config
    merge, patch = config.vision_config.spatial_merge_size, config.vision_config.patch_size
    draw = torch.Generator().manual_seed(number)
    grid = (1, 4 * merge, 2 * merge)
    screen = [config.image_token_id] * (grid[1] * grid[2] // merge**2)
    ids = torch.randint(0, 200, (20 + 3 * number,), generator=draw).tolist()
    ids = torch.tensor([ids[:5] + screen + ids[5:]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(grid[1] * grid[2], 3 * 2 * patch * patch, generator=draw),
        "image_grid_thw": torch.tensor([grid]),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def freeze_vision(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def freeze_nothing(model: Any) -> None:
    model.requires_grad_(True)


def freeze_all(model: Any) -> None:
    model.requires_grad_(False)


def trained(
    rank: int,
    size: int,
    folder: Path,
    *,
    freeze: Any = freeze_nothing,
    compute: torch.dtype = torch.float32,
    offload: bool = False,
    once: bool = True,
    plain: bool = False,
    updates: int = 2,
) -> dict[str, Any]:
    """Return loss and norm of some updates, the last gradients, and the weights as they are published."""
    if plain:
        policy = load_policy(folder, compute)
        freeze(policy.model)
        root: nn.Module = Root(policy)
    else:
        plan = ShardingPlan(init_device_mesh("cpu", (size,)), torch.device("cpu"), compute, offload)
        policy, root = load_sharded(folder, plan, prepare=freeze, root=Root)
    model = policy.model
    tensors = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-3, fused=True)
    gradients = Gradients(root, tensors.values())
    gradients.once = once
    curve = []
    for _ in range(updates):
        optimizer.zero_grad(set_to_none=True)
        mine = list(range(rank, BATCH, size))
        loss = torch.zeros((), dtype=torch.float64)
        for number in mine:
            gradients.before(is_last=number == mine[-1])
            part = -root(sample(model, number))[0].sum() / 100
            part.backward()
            loss += part.detach().double()
        torch.distributed.all_reduce(loss)
        norm = torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    result = {name: whole(each.grad) for name, each in tensors.items()}
    published = read_all(
        sharded.published_stream({n: p.data for n, p in model.named_parameters()}, compute)
    )
    return {
        "curve": curve,
        "gradients": result,
        "published": {name: each.float().numpy() for name, each in published.items()},
    }


def whole(tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.float().numpy()


def published(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The bits of an untrained model as it is published."""
    plan = ShardingPlan(init_device_mesh("cpu", (size,)), torch.device("cpu"), torch.bfloat16)
    policy, _ = load_sharded(folder, plan, prepare=freeze_vision, root=Root)
    tensors = {name: each.data for name, each in policy.model.named_parameters()}
    whole = read_all(sharded.published_stream(tensors, plan.compute))
    return {name: each.view(torch.int16).numpy() for name, each in whole.items()}


def all_of(rank: int, size: int, cases: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Run several cases of `trained` in one world."""
    return {
        name: trained(rank, size, folder, **options) for name, (folder, options) in cases.items()
    }


def all_loaded(rank: int, size: int, folders: dict[str, Path]) -> dict[str, Any]:
    """Run `loaded` for several models in one world."""
    return {kind: loaded(rank, size, folder) for kind, folder in folders.items()}


def loaded(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Return what one rank reads and holds of a model, and whether it equals the whole model."""
    sizes: dict[str, int] = {}
    read: list[model_files.PolicyFiles] = []

    class Counted(model_files.PolicyFiles):
        def __init__(self, where: Path) -> None:
            super().__init__(where)
            read.append(self)

    sharded.PolicyFiles = Counted  # type: ignore[misc]
    plan = ShardingPlan(init_device_mesh("cpu", (size,)), torch.device("cpu"), torch.bfloat16)
    policy, _ = load_sharded(folder, plan, prepare=freeze_vision, root=Root)
    reference = load_policy(folder)
    equal = True
    for name, parameter in policy.model.named_parameters():
        local = local_shard(parameter.data)
        sizes[name] = local.untyped_storage().nbytes()
        value = dict(reference.model.named_parameters())[name].data
        if isinstance(parameter.data, DTensor):
            begin, end = model_files.shard_rows(parameter.data)
            value = value[begin:end]
        equal = equal and torch.equal(local, value.to(local.dtype))
    buffers = {name: each.numpy() for name, each in policy.model.named_buffers()}
    return {"held": sizes, "read": read[0].read_bytes, "equal": equal, "buffers": buffers}


def adapted(
    rank: int, size: int, folder: Path, *, plain: bool = False, recompute: bool = False
) -> dict[str, Any]:
    """Return loss and gradients of adapters of a mixture after two packs, and the bytes of its experts here."""
    lora = LoraConfig(rank=4, alpha=8.0)
    if plain:
        policy = load_policy(folder, lora=lora)
        root: nn.Module = Root(policy)
    else:
        plan = ShardingPlan(init_device_mesh("cpu", (size,)), torch.device("cpu"), torch.float32)
        policy, root = load_sharded(folder, plan, prepare=lambda _: None, root=Root, lora=lora)
    if recompute:
        use_recompute(policy.model)
    named = dict(policy.model.named_parameters())
    trained = {name: each for name, each in named.items() if each.requires_grad}
    gradients = Gradients(root, trained.values())
    loss = torch.zeros((), dtype=torch.float64)
    mine = list(range(rank, BATCH, size))
    for number in mine:
        gradients.before(is_last=number == mine[-1])
        part = -root(sample(policy.model, number))[0].sum() / 100
        part.backward()
        loss += part.detach().double()
    if size > 1:
        torch.distributed.all_reduce(loss)
    stacked = [each for name, each in named.items() if ".mlp.experts." in name]
    return {
        "loss": loss.item(),
        "gradients": {name: whole(each.grad) for name, each in trained.items()},
        "experts": sum(local_shard(each.data).untyped_storage().nbytes() for each in stacked),
        "whole": sum(each.numel() * each.element_size() for each in stacked),
    }


def all_adapted(rank: int, size: int, folders: dict[str, Path]) -> dict[str, Any]:
    """Run `adapted` for several models in one world, without and with recomputation."""
    return {
        (kind, recompute): adapted(rank, size, folder, recompute=recompute)
        for kind, folder in folders.items()
        for recompute in (False, True)
    }
