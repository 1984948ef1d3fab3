"""One rank of a small model that is sharded by FSDP2 and trained for some steps, as a program.

python -m tests.train.sharded_training RANK RANKS MEETING CHECKPOINTS FIRST LAST SAVE [OUT]

Goes on from the newest checkpoint where FIRST is above 0; writes one after step SAVE, and beside the
writing trains on. Rank 0 leaves all tensors of its state, whole, in OUT.
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dart_cli.train.checkpoints.checkpoint import load, load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.checkpoints.saver import CheckpointSaver
from dart_cli.train.state import restore, state_of


def main(rank: int, ranks: int, meeting: str, directory: Path, first: int, last: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, ranks),
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=60),
    )
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
    saver = CheckpointSaver(directory, 2, rank=rank, ranks=ranks)
    dist.barrier()
    if first:
        newest = load_newest(directory) if rank == 0 else None
        dist.barrier()
        checkpoint = newest or load(directory / f"c{first:06d}", verify=False)
        assert checkpoint.progress.updates == first
        restore(checkpoint.tensors, parameters, optimizer)
    save_at = int(sys.argv[7])
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
    if rank == 0 and len(sys.argv) > 8:
        save_file(whole, sys.argv[8])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        *(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])),
        *(int(sys.argv[5]), int(sys.argv[6])),
    )
