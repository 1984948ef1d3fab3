"""One learner on many ranks: rank 0 sends commands to the others (follower.py), which make the same calls.

    RankedLearner   the learner of rank 0: each of its calls is a turn of all ranks (distributed.Command)
    train_share     does a rank's share of an update
    OwnForward      measures how long a rank computes without waiting for the others

Every rank has the same PolicyLearner over its own shards. Rank 0 plans an update and sends each rank its
share: its packs, with only the chains and screens that they need.
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
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bus.codec import joined
from bus.messages import Batch
from bus.ranks import Share
from dart_cli.config.schema import Config
from dart_cli.hardware import accelerator
from dart_cli.train.base import SavedState, Tensors, Update
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.ranks.distributed import Command, DistributedGroup, memory_mb
from dart_cli.train.ranks.processes import Ranks
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.flat_weights import TensorStream

log = logging.getLogger(__name__)

Moment = Any  # seconds of the monotonic clock, or an event of a stream


class RankedLearner:
    """The Learner (dart_cli/train/base.py) of rank 0, for its computing thread."""

    def __init__(self, learner: PolicyLearner, rank_group: DistributedGroup) -> None:
        self._learner = learner
        self._rank_group = rank_group
        self._own = OwnForward(learner.model.scorer, rank_group.device)
        self.model = _GatheredModel(learner, rank_group)
        self.gauges: dict[str, float] = {"ranks": float(rank_group.size)}
        """For heartbeats: the number of ranks; the rank that computed longest without waiting in the last
        update, and its seconds (`own_s` of `train_share`); the largest memory of a rank."""

    @property
    def before_change(self) -> Callable[[], None]:
        """The call before the weights of this rank change, as in Learner; its weights are published."""
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
        """Train once on `batch`, on all ranks. Raises as PolicyLearner.update does, and RankError."""
        began = time.monotonic()
        self._rank_group.doing(f"cutting batch {batch.batch_id} into shares")
        shares = self._learner.shares(batch, updates_done, policy_version)
        self._rank_group.tell(Command.UPDATE)
        with self._rank_group.working(f"sending its shares of batch {batch.batch_id}"):
            self._rank_group.send_parts([b"", *map(joined, shares[1:])])
        return self._train(shares[0], began)

    def _train(self, share: Share, began: float) -> Update:
        """Do rank 0's share of an update, and set the gauges from the facts about all ranks."""
        update, facts = train_share(self._learner, self._rank_group, self._own, share, began)
        slowest = max(range(len(facts)), key=lambda rank: facts[rank]["own_s"])
        self.gauges |= {
            "slowest_rank": float(slowest),
            "slowest_rank_s": facts[slowest]["own_s"],
            "rank_memory_mb": max(fact["memory_mb"] for fact in facts),
        }
        return update

    def begin_checkpoint(self, progress: TrainerProgress, model: str) -> None:
        """Make every other rank begin its part of a checkpoint; the caller then begins this rank's part."""
        header = {"progress": progress.model_dump_json(), "model": model}
        self._rank_group.tell(Command.CHECKPOINT, json.dumps(header).encode())
        self._rank_group.rest()

    def begin_restore(self, checkpoint: Path) -> None:
        """Make every other rank restore its part; the caller then restores this rank's part."""
        self._rank_group.tell(Command.RESTORE, str(checkpoint).encode())
        self._rank_group.watch.doing("restoring a checkpoint", within_s=self._rank_group.disk_s)

    def alone(self, what: str) -> AbstractContextManager[None]:
        """Return a context for work of this rank's computing thread in which no other rank has a part."""
        return self._rank_group.alone(what)

    def beat(self) -> None:
        """Tell the other ranks that this one lives, and wait until they have answered."""
        self._rank_group.tell(Command.BEAT)
        self._rank_group.gather(b"")
        self._rank_group.rest()

    def state(self) -> Tensors:
        """Return this rank's part of the state that a checkpoint holds."""
        return self._learner.state()

    def restore(self, saved: SavedState) -> None:
        """Restore this rank's part. Raises ValueError if it belongs to another model."""
        self._learner.restore(saved)
        self._rank_group.rest()


class _GatheredModel:
    """The weights of all ranks, for the weight channel."""

    def __init__(self, learner: PolicyLearner, rank_group: DistributedGroup) -> None:
        self._learner = learner
        self._rank_group = rank_group

    def stream(self) -> TensorStream:
        """Return all tensors that are published, whole, one after another.

        Reading them is a turn of all ranks.
        """
        stream = self._learner.model.stream()
        return replace(stream, tensors=self._turn(stream.tensors))

    def _turn(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors; while they are read, all ranks gather them."""
        self._rank_group.tell(Command.PUBLISH)
        with self._rank_group.working("gathering the weights"):
            yield from tensors
        self._rank_group.rest()


def train_share(
    learner: PolicyLearner,
    rank_group: DistributedGroup,
    own: OwnForward,
    share: Share,
    began: float,
) -> tuple[Update, list[dict[str, float]]]:
    """Do this rank's share of an update; return its result, and facts about each rank.

    `own_s` are the seconds in which a rank computed without waiting for another: it prepared screens and
    packs (rank 0 also cut and sent the shares) and computed forward passes of layers. Backward passes are
    not included; all ranks meet equally often in them.
    """
    with rank_group.working(f"an update of {len(share.work.packs)} packs"):
        update = learner.train_on(share, began)
    facts = {
        "own_s": update.metrics["prepare_s"] + own.take_seconds(),
        "memory_mb": memory_mb(rank_group.device),
    }
    all_facts: list[Any] = [
        json.loads(text) for text in rank_group.gather(json.dumps(facts).encode())
    ]
    rank_group.rest()
    return update, all_facts


class OwnForward:
    """A clock of the innermost units of an FSDP2 model, from the gathering of their weights to their output.

    Ranks meet in each layer, since its weights are gathered before it runs. A slow rank makes all others wait
    there, so whole forward passes take about the same time on all ranks. Only the time between the gathering
    of a layer and its end shows how fast a rank is.

    On a GPU it is measured by events of the stream, which wait for the gathering as the layer's work does.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._device = device
        self._is_gpu = accelerator.is_gpu(device)
        self._spans: list[tuple[Moment, Moment]] = []
        self._began: dict[nn.Module, Moment] = {}
        for module in root.modules():
            units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
            if units == [module]:
                # After the hook of FSDP2 that gathers, and before its hook that frees.
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end, prepend=True)

    def take_seconds(self) -> float:
        """Return the seconds since the last call; wait until the GPU has finished this work."""
        spans, self._spans = self._spans, []
        if self._is_gpu and spans:
            accelerator.current_stream(self._device).synchronize()
        seconds: float = sum(
            begin.elapsed_time(end) / 1000 if self._is_gpu else end - begin for begin, end in spans
        )
        return seconds

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        self._began[module] = self._now()

    def _end(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._spans.append((self._began.pop(module), self._now()))

    def _now(self) -> Moment:
        if not self._is_gpu:
            return time.monotonic()
        event = accelerator.new_event(timed=True)
        event.record()
        return event
