"""The program of the ranks of tests/weights/test_beside_ranks.py: they train, and rank 0 publishes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bus.endpoints import TRAIN, Endpoints
from bus.requests import Replier
from dart_cli.hardware import accelerator
from dart_cli.runtime.background import background
from dart_cli.weights.broadcast.transport import Transport
from tests.weights.broadcasting import make_channel, tensors

VALUES = {"gloo": 500_000, "nccl": 50_000_000}
"""Of a published set; by NCCL several buckets, so that a broadcast lasts for several steps."""
OVER = "over"
"""A file of the run directory: the worker has received enough. `held_at` is one for each version that it holds."""


def held_at(run_dir: Path, version: int) -> Path:
    """Return the file that the worker's end makes once it holds the version."""
    return run_dir / f"held-{version}"


def trains(rank: int, ranks: int, run_dir: Path, transport: Transport) -> tuple[int, float]:
    """Train until OVER exists; return the number of steps, and a sum that is the same on each rank."""
    device = torch.device("cpu")
    if transport.backend == "nccl":
        device = torch.device(accelerator.KIND, rank)
        accelerator.set_device_index(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model.to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def steps() -> tuple[int, float]:
        count, is_over = 0, torch.zeros(1, device=device)
        while not is_over:
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(count))
            model(inputs.to(device)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data -= 0.01 * parameter.grad
            model.zero_grad()
            count += 1
            is_over.fill_((run_dir / OVER).exists())
            dist.all_reduce(is_over)
        whole = sum(float(each.data.full_tensor().sum()) for each in model.parameters())
        return count, whole

    return asyncio.run(_publishing(steps, run_dir, transport)) if rank == 0 else steps()


async def _publishing(
    steps: Callable[[], tuple[int, float]], run_dir: Path, transport: Transport
) -> tuple[int, float]:
    """Publish a version when the one before has arrived, while `steps` runs in a thread, as the trainer's do."""
    channel, values = make_channel(run_dir, transport), VALUES[transport.backend]
    channel.resume(tensors(0, values), 0)
    async with (
        Replier(Endpoints(run_dir).address(TRAIN)) as replier,
        background(replier.serve(channel.answer)),
    ):
        training = asyncio.create_task(asyncio.to_thread(steps))
        version = 0
        while not training.done():
            if held_at(run_dir, version).exists():
                version += 1
                await asyncio.to_thread(channel.publish, tensors(version, values), version)
            await asyncio.wait([training], timeout=0.02)
        channel.close()
        return await training
