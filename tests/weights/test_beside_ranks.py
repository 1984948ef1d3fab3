"""Rank 0 is in two groups at once, by two threads: the ranks' own, and the broadcast's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from dart_cli.hardware import accelerator
from dart_cli.hardware.device import pick_device
from dart_cli.weights.broadcast.transport import Transport
from tests.train.world import run_world
from tests.waiting import PATIENCE_S
from tests.weights.beside_ranks import OVER, VALUES, held_at, trains
from tests.weights.broadcasting import receiving, same, tensors

_GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
TWO_GPUS = pytest.mark.skipif(_GPUS < 2, reason="a GPU for each process")
VERSIONS = 4


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, TWO_GPUS])]
)
async def test_versions_arrive_while_the_ranks_train_and_neither_waits_for_ever(
    tmp_path: Path, backend: str
) -> None:
    """Broadcast to a worker, which with NCCL shares the GPU of the second rank in a separate group."""
    is_gpu = backend == "nccl"
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    mine, others = (
        Transport("nccl" if is_gpu else "gloo", device=f"cuda:{gpu}" if is_gpu else "cpu")
        for gpu in (1, 0)
    )
    of_ranks = accelerator.backend(pick_device("cuda:0" if is_gpu else "cpu"))
    world = asyncio.create_task(
        asyncio.to_thread(run_world, 2, trains, run_dir, others, backend=of_ranks)
    )
    versions: list[int] = []
    try:
        async with receiving(run_dir, mine, deadline_s=PATIENCE_S) as worker:
            async with asyncio.timeout(PATIENCE_S):
                while len(versions) < VERSIONS and not world.done():
                    await worker.prepare(len(versions))
                    if (
                        result := worker.mirror.version
                    ) is not None and result.policy_version == len(versions):
                        expected = tensors(len(versions), VALUES[backend])
                        assert same(dict(worker.mirror.load(expected)), expected)
                        held_at(run_dir, len(versions)).touch()
                        versions.append(len(versions))
                    await asyncio.sleep(0.02)  # until the next one is published
            assert worker.read_bytes > 0
    finally:
        (run_dir / OVER).touch()
        (first, second) = await world
    assert first == second, "the ranks have taken the same steps"
    assert first[0] > 1
    assert versions == list(range(VERSIONS))
