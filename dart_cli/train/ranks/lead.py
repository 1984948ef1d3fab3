"""One learner on many ranks: what rank 0 tells, and what the others do.

    RankedLearner   rank 0's: each of its calls is a turn of all ranks (distributed.Command)
    follow          the other ranks': the same calls, until STOP

Every rank has the same PolicyLearner over its shards. Rank 0 plans an update and deals each rank its
share: its packs, and the chains and screens that they show, and nothing of the others'.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bus.codec import BATCH_LIMITS, joined, parted
from bus.messages import Batch
from bus.ranks import Share
from dart_cli.config.schema import Config
from dart_cli.train.base import SavedState, Tensors, Update
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.model import TrainModel
from dart_cli.train.ranks.distributed import Command, DistributedGroup, memory_mb
from dart_cli.train.ranks.own_work import OwnForward
from dart_cli.train.ranks.processes import Ranks
from dart_cli.weights.flat_weights import TensorStream

log = logging.getLogger(__name__)

Begin = Callable[[str], None]
"""Begins to write this rank's part of a checkpoint; the text is rank 0's."""


class RankedLearner:
    """See dart_cli.train.base.Learner. For rank 0's computing thread."""

    def __init__(self, learner: PolicyLearner, rank_group: DistributedGroup) -> None:
        self._learner = learner
        self._rank_group = rank_group
        self._own = OwnForward(learner.model.scorer, rank_group.device)
        self.model = _GatheredModel(learner, rank_group)
        self.gauges: dict[str, float] = {"ranks": float(rank_group.size)}
        """For heartbeats: the number of ranks; which worked longest by itself in the last update, and
        its seconds (`_trained`); the most memory of any."""

    @property
    def before_change(self) -> Callable[[], None]:
        """See Learner: of this rank, whose weights are published."""
        return self._learner.before_change

    @before_change.setter
    def before_change(self, call: Callable[[], None]) -> None:
        self._learner.before_change = call

    @classmethod
    def begin(cls, config: Config, ranks: Ranks) -> RankedLearner:
        """Start the other ranks and load the model with them. Raises ModelError, RankError."""
        rank_group = ranks.__enter__().rank_group
        with rank_group.working("loading the model", within_s=ranks.start_s):
            model = TrainModel.load(config, rank_group.mesh)
        learner = cls(PolicyLearner(model, config.train, rank_group), rank_group)
        rank_group.rest()
        return learner

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Take one step on `batch`, on all ranks. Raises as PolicyLearner.update does, and RankError."""
        began = time.monotonic()
        self._rank_group.doing(f"cutting batch {batch.batch_id} into shares")
        shares = self._learner.shares(batch, updates_done, policy_version)
        self._rank_group.tell(Command.UPDATE)
        with self._rank_group.working(f"sending its shares of batch {batch.batch_id}"):
            self._rank_group.deal([[b""], *([joined(share)] for share in shares[1:])])
        return self._train(shares[0], began)

    def _train(self, share: Share, began: float) -> Update:
        update, facts = _trained(self._learner, self._rank_group, self._own, share, began)
        slowest = max(range(len(facts)), key=lambda rank: facts[rank]["own_s"])
        self.gauges |= {
            "slowest_rank": float(slowest),
            "slowest_rank_s": facts[slowest]["own_s"],
            "rank_memory_mb": max(each["memory_mb"] for each in facts),
        }
        return update

    def begin_checkpoint(self, progress: TrainerProgress, model: str) -> None:
        """Have every other rank begin its part of a checkpoint; this one begins its own at once."""
        told = {"progress": progress.model_dump_json(), "model": model}
        self._rank_group.tell(Command.CHECKPOINT, json.dumps(told).encode())
        self._rank_group.rest()

    def begin_restore(self, checkpoint: Path) -> None:
        """Have every other rank restore its part; this one restores its own at once."""
        self._rank_group.tell(Command.RESTORE, str(checkpoint).encode())
        self._rank_group.watch.doing("restoring a checkpoint", within_s=self._rank_group.disk_s)

    def alone(self, what: str) -> AbstractContextManager[None]:
        """Around work of this rank's computing thread in which no other rank has a part."""
        return self._rank_group.alone(what)

    def beat(self) -> None:
        """Tell the others that this one lives, and hear it of them."""
        self._rank_group.tell(Command.BEAT)
        self._rank_group.gathered(b"")
        self._rank_group.rest()

    def state(self) -> Tensors:
        """This rank's part of what a checkpoint holds."""
        return self._learner.state()

    def restore(self, saved: SavedState) -> None:
        """Restore this rank's part. Raises ValueError if it is of another model."""
        self._learner.restore(saved)
        self._rank_group.rest()


class _GatheredModel:
    """The weights of all ranks, for the channel."""

    def __init__(self, learner: PolicyLearner, rank_group: DistributedGroup) -> None:
        self._learner = learner
        self._rank_group = rank_group

    def weights(self) -> Tensors:
        """All tensors that are published, whole; a turn of all ranks."""
        self._rank_group.tell(Command.PUBLISH)
        with self._rank_group.working("gathering the weights"):
            tensors = self._learner.model.weights()
        self._rank_group.rest()
        return tensors

    def stream(self) -> TensorStream:
        """The same, one after another; reading it is a turn of all ranks."""
        stream = self._learner.model.stream()
        return replace(stream, tensors=self._turn(stream.tensors))

    def _turn(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._rank_group.tell(Command.PUBLISH)
        with self._rank_group.working("gathering the weights"):
            yield from tensors
        self._rank_group.rest()

    def frozen(self) -> frozenset[str]:
        """Names of those that training does not change."""
        return self._learner.model.frozen()


def follow(
    learner: PolicyLearner, rank_group: DistributedGroup, save: Begin, restore: Begin
) -> None:
    """Do what rank 0 says, until STOP. Raises RankError where another rank is lost."""
    own = OwnForward(learner.model.scorer, rank_group.device)
    while True:
        command, more = rank_group.heard()
        if command is Command.STOP:
            return
        if command is Command.UPDATE:
            with rank_group.working("receiving its share"):
                [frame] = rank_group.dealt()
            share = parted(frame, BATCH_LIMITS)
            assert isinstance(share, Share)
            _trained(learner, rank_group, own, share, time.monotonic())
        elif command is Command.PUBLISH:
            with rank_group.working("gathering the weights"):
                for _ in learner.model.stream().tensors:
                    pass
        elif command is Command.CHECKPOINT:
            with rank_group.working("beginning a checkpoint"):
                save(more.decode())
        elif command is Command.RESTORE:
            with rank_group.working("restoring a checkpoint", within_s=rank_group.disk_s):
                restore(more.decode())
        elif command is Command.BEAT:
            rank_group.gathered(b"")


def _trained(
    learner: PolicyLearner,
    rank_group: DistributedGroup,
    own: OwnForward,
    share: Share,
    began: float,
) -> tuple[Update, list[dict[str, float]]]:
    """This rank's part in an update; its result, and facts about each rank.

    `own_s` is what a rank did without waiting for another: it prepared screens and packs (rank 0: cut
    and sent the shares too), and computed layers forward. Backward passes, where all ranks meet as
    often, are not in it.
    """
    with rank_group.working(f"an update of {len(share.work.packs)} packs"):
        update = learner.train_on(share, began)
    facts = {
        "own_s": update.metrics["prepare_s"] + own.taken(),
        "memory_mb": memory_mb(rank_group.device),
    }
    found: list[Any] = [
        json.loads(each) for each in rank_group.gathered(json.dumps(facts).encode())
    ]
    rank_group.rest()
    return update, found
