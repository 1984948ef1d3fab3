"""The check of scripts/gpu-check that needs two GPUs; with `--device cpu` two processes, by gloo in NCCL's place.

    two_gpus   two trainer ranks: an update, its publication, the broadcast to a worker, and one rank in their place

Rank 0 is this process, on the first GPU. The other rank and the worker are processes on the second one. So rank 0
is in two groups at once, the ranks' and the broadcast's, as in a run with `weights.channel = "nccl"`.

    python -m benchmarks.gpu.ranks JSON     the worker: receives each version that standard input names
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.parts import trajectories
from benchmarks.gpu.settings import (
    ROOT,
    BrokenError,
    Figures,
    MissedError,
    Settings,
    compared_layers,
    config_of,
    tokens_alone,
)
from bus.messages import Batch
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    from dart_cli.train.ranks.lead import RankedLearner
    from dart_cli.weights.file import FileChannel, Publication

Tensors = dict[str, torch.Tensor]

RATE = 1e-3
"""Of learning: steps that bfloat16 shows."""
METRIC = 0.02
"""Largest relative difference of loss and gradient norm, two ranks against one, in bfloat16."""
MOVED = 0.1
"""Largest difference of the weights after the update, relative to how far it moved them."""
DEADLINE_S = 60.0
"""Seconds that the worker may take to receive a version."""


def two_gpus(settings: Settings) -> Figures:
    """Train and broadcast with two ranks; then check that one rank makes the same update to the same weights."""
    if settings.device.startswith("cuda") and torch.cuda.device_count() < 2:
        raise MissedError(f"two GPUs are needed, torch sees {torch.cuda.device_count()}")
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.trained_policy import TrainModel

    config = _config(settings)
    config.run.dir.mkdir(mode=0o700)
    batch = trajectories(tokens_alone(settings), settings.size)
    figures, update, versions = asyncio.run(_on_two(settings, config, batch))
    _free(settings)
    began = time.monotonic()
    train = config.train.model_copy(update={"ranks": 1})
    alone = PolicyLearner(TrainModel.load(config.model_copy(update={"train": train})), train)
    start = _in_type(alone.model.weights(), versions[0])
    differing = [
        name for name, tensor in start.items() if not torch.equal(tensor, versions[0][name])
    ]
    if differing:
        raise BrokenError(f"v0 of two ranks has another {differing[0]} than the model", figures)
    result = alone.update(batch, 0, 0)
    figures["seconds_on_one"] = round(time.monotonic() - began, 2)
    for name in ("loss", "grad_norm"):
        one, two = result.metrics[name], update.metrics[name]
        figures[name] = [two, one]
        if not abs(two - one) <= METRIC * max(abs(one), 1e-3):
            raise BrokenError(f"{name} of two ranks is {two:g}, of one {one:g}", figures)
    mine = _in_type(alone.model.weights(), versions[1])
    moved = _distance(mine, start)
    figures["moved"] = round(moved, 4)
    figures["different_of_moved"] = _distance(versions[1], mine) / max(moved, 1e-30)
    if not moved or not figures["different_of_moved"] <= MOVED:
        raise BrokenError("two ranks have other weights after the update than one", figures)
    return figures


def _config(settings: Settings) -> Config:
    """Return the configuration of the two ranks."""
    config = config_of(settings, compared_layers(settings), ranks=2, lr=RATE)
    channel = "nccl" if settings.device.startswith("cuda") else "gloo"
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": settings.scratch / "ranks"}),
            "weights": config.weights.model_copy(update={"channel": channel}),
        }
    )


async def _on_two(
    settings: Settings, config: Config, batch: Batch
) -> tuple[Figures, Any, list[Tensors]]:
    """Update on two ranks and broadcast the weights; return (figures, the update, the weights before and after)."""
    from bus.endpoints import TRAIN
    from bus.requests import Replier
    from dart_cli.config.endpoints import run_endpoints
    from dart_cli.runtime.background import background
    from dart_cli.train.publishing import make_channel
    from dart_cli.train.ranks.lead import RankedLearner
    from dart_cli.train.ranks.processes import Ranks
    from dart_cli.weights.broadcast.channel import BroadcastChannel

    loop, in_torch = asyncio.get_running_loop(), ThreadPoolExecutor(1, "torch")
    figures: Figures = {}
    versions: list[Tensors] = []
    error: BaseException | None = None
    ranks, channel = Ranks(config), make_channel(config)
    assert isinstance(channel, BroadcastChannel)
    began = time.monotonic()
    try:
        lead = await loop.run_in_executor(in_torch, RankedLearner.begin, config, ranks)
        figures["start_s"] = round(time.monotonic() - began, 2)
        address = run_endpoints(config).address(TRAIN)
        async with (
            Replier(address) as replier,
            background(replier.serve(channel.answer)),
        ):
            with _worker(settings, config) as worker:
                for version in (0, 1):
                    began = time.monotonic()
                    publication = await loop.run_in_executor(
                        in_torch, partial(_begin_publication, channel, lead, version)
                    )
                    published = await asyncio.to_thread(publication.result)
                    figures[f"publish_v{version}_s"] = round(time.monotonic() - began, 2)
                    message = {
                        "path": str(published.path),
                        "version": version,
                        "digest": published.digest,
                    }
                    received = await asyncio.to_thread(_ask, worker, message)
                    figures[f"receive_v{version}_s"] = received["seconds"]
                    versions.append(
                        {
                            name: tensor.clone()
                            for name, tensor in channel.last.tensors.tensors.items()
                        }
                    )
                    if not received["by_broadcast"] or received["sums"] != sums(versions[-1]):
                        raise BrokenError(f"v{version} of the worker is another one", figures)
                    if version == 0:
                        began = time.monotonic()
                        update = await loop.run_in_executor(in_torch, lead.update, batch, 0, 0)
                        figures["update_s"] = round(time.monotonic() - began, 2)
                        if not update.applied:
                            raise BrokenError(f"the update was not applied: {update.note}", figures)
        figures["rank_memory_mb"] = lead.gauges["rank_memory_mb"]
        channel.close()
    except BaseException as raised:
        error = raised
        raise
    finally:
        await loop.run_in_executor(in_torch, ranks.end, error)
        in_torch.shutdown()
    return figures, update, versions


def _begin_publication(channel: FileChannel, lead: RankedLearner, version: int) -> Publication:
    """Begin to publish what all ranks hold."""
    return channel.begin(lead.model.stream(), version)


# --- the worker -----------------------------------------------------------------------------------


def _worker(settings: Settings, config: Config) -> subprocess.Popen[str]:
    """Start the worker, on the second GPU."""
    is_gpu = settings.device.startswith("cuda")
    settings_of_worker = {
        "run_dir": str(config.run.dir),
        "backend": config.weights.channel,
        "device": "cuda:1" if is_gpu else "cpu",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.ranks", json.dumps(settings_of_worker)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(worker: subprocess.Popen[str], message: Mapping[str, object]) -> Figures:
    """Let the worker receive a version; return its answer. The deadline of the check ends an endless wait."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(message) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise BrokenError(f"the worker ended with {worker.wait()}", {})
    answer: Figures = json.loads(line)
    return answer


async def _receive(run_dir: Path, backend: Any, device: str) -> None:
    """Receive each version that a line of standard input names; print the seconds, and a sum of each tensor."""
    from bus.endpoints import TRAIN, Endpoints
    from bus.requests import Requester
    from dart_cli.weights.broadcast.receiver import BroadcastReceiver
    from dart_cli.weights.broadcast.transport import Transport
    from dart_cli.weights.file import load
    from dart_cli.weights.manifest import read_manifest

    name, address = "rollout-0", Endpoints(run_dir).address(TRAIN)
    async with Requester(address, name=name, peer="train") as train:
        transport = Transport(backend, device=device)
        receiver = BroadcastReceiver(name, train, run_dir / "copies" / name, transport, DEADLINE_S)
        while line := await asyncio.to_thread(sys.stdin.readline):
            message, began = json.loads(line), time.monotonic()
            path = Path(message["path"])
            received = await receiver.receive(path, message["version"], message["digest"])
            seconds = round(time.monotonic() - began, 2)
            like = {
                key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                for key, tensor in read_manifest(path).tensors.items()
            }
            source = received.source
            weights = load(source, like) if isinstance(source, Path) else source.load(like)
            message = {
                "seconds": seconds,
                "by_broadcast": not isinstance(source, Path),
                "sums": sums(weights),
            }
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        receiver.close()


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a check sum of the bytes of each tensor."""
    return {
        name: zlib.crc32(each.cpu().contiguous().flatten().view(torch.uint8).numpy())
        for name, each in sorted(tensors.items())
    }


# --- weights --------------------------------------------------------------------------------------


def _in_type(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> Tensors:
    """Return copies in main memory, in the types of `like`."""
    return {name: tensors[name].to("cpu", tensor.dtype, copy=True) for name, tensor in like.items()}


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all differences together."""
    squares = (
        float((tensor.float() - other[name].float()).square().sum()) for name, tensor in one.items()
    )
    return sum(squares) ** 0.5


def _free(settings: Settings) -> None:
    """Leave the GPU's memory to what comes next."""
    gc.collect()
    if settings.device.startswith("cuda"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    settings_of_worker = json.loads(sys.argv[1])
    asyncio.run(
        _receive(
            Path(settings_of_worker["run_dir"]),
            settings_of_worker["backend"],
            settings_of_worker["device"],
        )
    )
