"""What the ranks of tests/train/test_rank_updates.py run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.model import TrainModel
from dart_cli.train.ranks.board import Membership
from dart_cli.train.ranks.distributed import Command, DistributedGroup
from dart_cli.train.ranks.lead import RankedLearner, follow
from dart_cli.train.ranks.watch import RankWatch

Case = tuple[Config, list[Batch]]


def updated(rank: int, size: int, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """What each case's updates gave, as rank 0 tells the others; empty on the others."""
    member = Membership(rank, size, rank, folder, is_ours=True)
    watch = RankWatch(member, folder, 60.0, lambda _reason: os._exit(1))
    rank_group = DistributedGroup(member, watch, torch.device("cpu"))
    return {name: _case(rank_group, *case) for name, case in cases.items()}


def _case(rank_group: DistributedGroup, config: Config, batches: list[Batch]) -> dict[str, Any]:
    model = TrainModel.load(config, rank_group.mesh)
    learner = PolicyLearner(model, config.train, rank_group)
    found: dict[str, Any] = {}
    if rank_group.rank:
        follow(learner, rank_group, lambda _: None, lambda _: None)
    else:
        lead = RankedLearner(learner, rank_group)
        updates = [lead.update(batch, done, done) for done, batch in enumerate(batches)]
        found = told(updates)
        found["published"] = {
            name: each.float().numpy() for name, each in lead.model.weights().items()
        }
        lead.beat()
        rank_group.tell(Command.STOP)
    found["gradients"] = gradients(model)
    return found if rank_group.rank == 0 else {}


def alone(config: Config, batches: list[Batch]) -> dict[str, Any]:
    """The same in this process, without ranks."""
    learner = PolicyLearner(TrainModel.load(config), config.train)
    found = told([learner.update(batch, done, done) for done, batch in enumerate(batches)])
    weights = learner.model.weights()
    found["published"] = {name: each.float().numpy() for name, each in weights.items()}
    found["gradients"] = gradients(learner.model)
    return found


def told(updates: list[Any]) -> dict[str, Any]:
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
    found = {}
    for name, parameter in model.trainable().items():
        if parameter.grad is not None:
            whole = (
                parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
            )
            found[name] = whole.float().numpy().copy()
    return found
