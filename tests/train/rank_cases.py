"""The program of the ranks of tests/train/test_rank_updates.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.policy.model_files import shard_rows
from dart_cli.train.base import read_all
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.ranks.distributed import Command, DistributedGroup
from dart_cli.train.ranks.follower import follow
from dart_cli.train.ranks.lead import RankedLearner
from dart_cli.train.ranks.watch import Membership, RankWatch
from dart_cli.train.sharded import local_shard
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import FileChannel
from dart_cli.weights.flat_weights import TensorStream

Case = tuple[Config, list[Batch]]


def updated(
    rank: int, size: int, folder: Path, cases: dict[str, Case], device: str = "cpu"
) -> dict[str, Any]:
    """Return the results of each case's updates on rank 0; an empty dict on the other ranks."""
    rank_group = _group(rank, size, folder, device)
    return {name: _case(rank_group, folder / name, *case) for name, case in cases.items()}


def _group(rank: int, size: int, folder: Path, device: str = "cpu") -> DistributedGroup:
    member = Membership(rank, size, rank, folder, is_ours=True)
    watch = RankWatch(member, folder, 60.0, lambda _reason: os._exit(1))
    return DistributedGroup(member, watch, torch.device(device))


def slowed(rank: int, size: int, folder: Path, case: Case, seconds: float) -> dict[str, float]:
    """Return the gauges of rank 0's heartbeats if a layer of rank 1 takes so much longer."""
    rank_group = _group(rank, size, folder)
    config, batches = case
    model = TrainModel.load(config, rank_group.mesh)
    if rank == 1:
        inner: Any = model.policy.model.model
        layer = inner.language_model.layers[0]
        compute = layer.forward

        def slow(*inputs: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return compute(*inputs, **options)

        layer.forward = slow
    learner = PolicyLearner(model, config.train, rank_group)
    if rank:
        follow(learner, rank_group, _saver(config, rank_group))
        return {}
    lead = RankedLearner(learner, rank_group)
    lead.update(batches[0], 0)
    rank_group.tell(Command.STOP)
    return lead.gauges


def _saver(config: Config, rank_group: DistributedGroup) -> CheckpointSaver:
    directory = config.run.dir / "checkpoints"
    return CheckpointSaver(directory, rank=rank_group.rank, ranks=rank_group.size)


def fill_b(model: TrainModel) -> None:
    """Set B of the adapters, which begins at zero, so that A has a gradient and a rank's shard matters."""
    for name, parameter in model.trainable().items():
        if ".lora_B." in name:
            draw = torch.Generator().manual_seed(len(name) + 1000 * sum(name.encode()))
            value = 0.02 * torch.randn(parameter.shape, generator=draw)
            if isinstance(parameter.data, DTensor):
                begin, end = shard_rows(parameter.data)
                value = value[begin:end]
            local_shard(parameter.data).copy_(value)


def _case(
    rank_group: DistributedGroup, folder: Path, config: Config, batches: list[Batch]
) -> dict[str, Any]:
    model = TrainModel.load(config, rank_group.mesh)
    fill_b(model)
    learner = PolicyLearner(model, config.train, rank_group)
    results: dict[str, Any] = {}
    if rank_group.rank:
        follow(learner, rank_group, _saver(config, rank_group))
    else:
        lead = RankedLearner(learner, rank_group)
        before = published(read_all(lead.model.stream()))
        updates = [lead.update(batch, index, index) for index, batch in enumerate(batches)]
        results = as_numbers(updates)
        whole = read_all(lead.model.stream())
        results |= {"before": before, "published": published(whole)}
        results["digests"] = digests(folder, lead.model.stream(), whole)
        lead.beat()
        rank_group.tell(Command.STOP)
    results["gradients"] = gradients(model)
    return results if rank_group.rank == 0 else {}


def alone(config: Config, batches: list[Batch]) -> dict[str, Any]:
    """The same in this process, without ranks."""
    model = TrainModel.load(config)
    fill_b(model)
    learner = PolicyLearner(model, config.train)
    before = published(model.weights())
    results = as_numbers(
        [learner.update(batch, index, index) for index, batch in enumerate(batches)]
    )
    results |= {"before": before, "published": published(model.weights())}
    results["gradients"] = gradients(learner.model)
    return results


def digests(folder: Path, stream: TensorStream, whole: dict[str, torch.Tensor]) -> list[str]:
    """Return the digests of a version published from the stream, and from all tensors at once."""
    folder.mkdir(parents=True)
    results = []
    for name, tensors in (("streamed", stream), ("whole", whole)):
        channel = FileChannel(folder / name)
        channel.resume(whole, 0)
        results.append(channel.begin(tensors, 1).result().digest)
    return results


def published(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: each.detach().float().cpu().numpy().copy() for name, each in weights.items()}


def as_numbers(updates: list[Any]) -> dict[str, Any]:
    return {
        "metrics": [
            {name: value for name, value in each.metrics.items() if not name.endswith("_s")}
            for each in updates
        ],
        "told": [(each.applied, each.note, each.alarm) for each in updates],
        "mismatches": [
            sorted((gap.trajectory_id, gap.step, gap.mean, gap.largest) for gap in each.mismatches)
            for each in updates
        ],
    }


def gradients(model: TrainModel) -> dict[str, Any]:
    results = {}
    for name, parameter in model.trainable().items():
        if parameter.grad is not None:
            whole = (
                parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
            )
            results[name] = whole.float().cpu().numpy().copy()
    return results
