"""One rank of a small model that FSDP2 shards, trained for some steps; tests/train/world.py runs it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dart_cli.train.base import restore, state_of
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load, load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress


def trained(
    rank: int, ranks: int, directory: Path, first: int, last: int, save_at: int, out: Path
) -> None:
    """Train from the newest checkpoint if `first` is above 0; write a checkpoint after step `save_at`.

    Beside the writing it trains on. Rank 0 leaves all tensors of its state, whole, in `out`.
    """
    torch.manual_seed(first)  # what is loaded is not what is made here
    # 37 rows do not divide by 2 and 4; of 3 rows a fourth rank has none.
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 37), torch.nn.Tanh(), torch.nn.Linear(37, 3), torch.nn.LayerNorm(3)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, fused=True)
    saver = CheckpointSaver(directory, rank=rank, ranks=ranks)
    dist.barrier()
    if first:
        newest = load_newest(directory) if rank == 0 else None
        dist.barrier()
        checkpoint = newest or load(directory / f"c{first:06d}", verify=False)
        assert checkpoint.progress.updates == first
        restore(checkpoint.tensors, parameters, optimizer)
    for step in range(first, last):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            saver.begin(TrainerProgress(updates=step + 1), state_of(parameters, optimizer), "m")
    saver.wait()
    whole = {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().clone()
        for name, tensor in state_of(parameters, optimizer).items()
    }
    if rank == 0:
        save_file(whole, out)
