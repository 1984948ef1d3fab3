"""Rollouts and updates in one process, in turns: staleness exactly as requested, and repeatable.

    Loop          plays a batch, keeps it until it is due, trains on it, and on each once more if asked to
    uses_of       what each update trains on
    updates_for   how many updates so many fresh batches take

The engine, the learner, the episodes, the advantages and the order of replays are those of a run. Time
plays no part: a fresh batch is trained on exactly `delay` versions after the weights that sampled it (fewer
in the first `delay` updates, when there were no older weights).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import mean

from benchmarks.speed.playing import GroupMember, Played, Player, step_of
from bus.messages import Batch, StepValue
from dart_cli.algo.task_sampling import MovingAverage, deviation_weights
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import trained_tasks
from dart_cli.data.baselines import Baselines
from dart_cli.data.batches import Replays
from dart_cli.data.curate import FinishedGroup, Member, curate, no_gradient
from dart_cli.data.loading import chained
from dart_cli.data.scheduler import task_seed
from dart_cli.data.store.rows import TrackerRow
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.hardware.device import pick_device
from dart_cli.policy.loader import load_policy
from dart_cli.train.critic import key_of
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from envs.contract.base import Task


@dataclass(frozen=True)
class Use:
    """What one update trains on."""

    first: int
    """The update, from 1, that trained on these samples first: this one, if `reused` is 0."""
    reused: int  # how often they were trained on before


def uses_of(reuse: int) -> Iterator[Use]:
    """Yield what each update trains on, forever, in the order of a run that refuses no replay."""
    replays = Replays(reuse)
    for update in count(1):
        due = replays.due()
        use = Use(update, 0) if due is None else Use(due.first, due.reused + 1)
        replays.filed(update, use.first if use.reused else None, use.reused)
        yield use


def updates_for(fresh: int, reuse: int) -> int:
    """How many updates it takes to train on so many fresh batches."""
    number = 0
    for update, use in enumerate(uses_of(reuse), start=1):
        number += not use.reused
        if number == fresh:
            return update
    raise AssertionError("uses_of does not end")


@dataclass
class Loop:
    """Training with batches that wait for `delay` updates. Axis of `history`: the updates.

    Each is trained on again as `train.reuse` says.
    """

    config: Config
    delay: int
    groups: int  # of a batch, spread evenly over the tasks unless data.task_sampling = "deviation"
    fresh: int = 0  # batches that were trained on, each counted once
    trajectories: int = 0  # played for training
    history: list[dict[str, float]] = field(default_factory=list)  # the learner's metrics

    def __post_init__(self) -> None:
        config = self.config
        device = pick_device(config.train.device)
        self.learner = PolicyLearner(TrainModel.load(config), config.train)
        policy = load_policy(config.model.path, config.model.dtype, device, lora=config.model.lora)
        self._tasks = trained_tasks(config)
        self._engine = TransformersEngine(
            policy,
            max_batch=config.rollout.max_batch,
            load_weights=lambda _directory, _mine: {
                name: tensor.detach().clone()
                for name, tensor in self.learner.model.weights().items()
            },
        )
        self._player = Player(config, policy, self._engine)
        self._uses = uses_of(config.train.reuse)
        self._coming: deque[Use] = deque()  # of the next updates, their batches played
        self._held: dict[int, Batch] = {}  # by id, those that are due at least once more
        self._batches = 0
        self._baselines = Baselines(config.data, _Unsaved())
        self._success = {task.id: MovingAverage() for task in self._tasks}

    @property
    def version(self) -> int:
        """Of the weights that sample now: updates done."""
        return len(self.history)

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()

    async def update(self) -> dict[str, float]:
        """Play what will be trained on in `delay` versions, train, take the new weights."""
        while len(self._coming) <= self.delay:
            use = next(self._uses)
            self._coming.append(use)
            if not use.reused:
                self._held[use.first] = await self._batch()
        use = self._coming.popleft()
        batch = self._held[use.first].model_copy(update={"reuse": use.reused})
        if use.reused == self.config.train.reuse:
            del self._held[use.first]
        done = await asyncio.to_thread(self.learner.update, batch, self.version, self.version)
        if use.first in self._held:
            self._held[use.first] = _valued(batch, done.values)
        self.fresh += not use.reused
        self.history.append(done.metrics | {"reuse": float(use.reused)})
        await self._engine.update_weights(self.config.run.dir, self.version)
        return done.metrics

    async def success(self, episodes: int) -> float:
        """On held-out episodes, each task counting alike; the same episodes at every call."""
        planned = [
            GroupMember(f"e{index}", 0, task, TRAIN_SEEDS + index, index)
            for index, task in zip(range(episodes), _over(self._tasks), strict=False)
        ]
        played = await self._player.play(planned)
        return mean(
            mean(each.end.outcome == "pass" for each in played if each.planned.task is task)
            for task in self._tasks
        )

    async def _batch(self) -> Batch:
        """Return what can be learnt from of `groups` that the present weights play."""
        self._batches += 1
        seed, size = self.config.run.seed, self.config.data.group_size
        first = (self._batches - 1) * self.groups
        planned = [
            GroupMember(
                f"g{number:06d}",
                member,
                task,
                task_seed(seed, number),
                Random(f"{seed}:{number}:{member}").getrandbits(31),
            )
            for number, task in zip(
                range(first, first + self.groups), self._drawn(first), strict=False
            )
            for member in range(size)
        ]
        played = await self._played(planned)
        self.trajectories += len(played)
        groups = [played[index : index + size] for index in range(0, len(played), size)]
        for each in played:
            task_id = each.planned.task.id
            self._success[task_id] = self._success[task_id].add(each.end.outcome == "pass")
        return self._filed(groups)

    async def _played(self, planned: Sequence[GroupMember]) -> list[Played]:
        """Episodes for a batch."""
        return await self._player.play(planned)

    def _filed(self, groups: Sequence[Sequence[Played]]) -> Batch:
        """Return the batch of what was played, in groups."""
        return batch_of(groups, self._batches, self.config, self._baselines)

    def _drawn(self, first: int) -> Iterator[Task]:
        """Return the tasks of the groups from number `first` on: in turn, or by their deviation."""
        if self.config.data.task_sampling != "deviation":
            return _over(self._tasks, first)
        rates = [self._success[task.id].value for task in self._tasks]
        weights = deviation_weights([None if p is None else p * (1 - p) for p in rates])
        seed = self.config.run.seed
        return (
            Random(f"{seed}:{number}").choices(self._tasks, weights)[0] for number in count(first)
        )


def _valued(batch: Batch, values: Sequence[StepValue]) -> Batch:
    """Return the batch with the advantages of a critic, as a run serves it the next time."""
    found = {(each.group_id, each.trajectory_id, each.step): each.advantage for each in values}
    samples = [
        each.model_copy(update={"advantage": found.get(key_of(each), each.advantage)})
        for each in batch.samples
    ]
    return batch.model_copy(update={"samples": samples})


class _Unsaved:
    """What Baselines asks of a store, for a run that keeps nothing."""

    def trackers(self) -> list[TrackerRow]:
        """None from before."""
        return []

    def save_trackers(self, rows: Iterable[TrackerRow]) -> None:
        """See Store; a generator's rows are not made."""


def batch_of(
    groups: Sequence[Sequence[Played]],
    number: int,
    config: Config,
    baselines: Baselines,
) -> Batch:
    """One update's work, by the rules of a run: what teaches nothing is left out (curate.py)."""
    finished = [
        FinishedGroup(
            group[0].planned.group,
            tuple(
                Member(each.end.trajectory_id, each.end.outcome, len(each.records))
                for each in group
            ),
            task_id=group[0].planned.task.id,
        )
        for group in groups
    ]
    by_tracker = baselines.in_use
    fit = [
        group
        for group in finished
        if no_gradient([(each.outcome, each.reward) for each in group.valid], alone=by_tracker)
        is None
    ]
    curation = curate(
        fit,
        groups_per_batch=len(fit),
        max_staleness=0,  # of nothing: the members do not say how old they are
        advantage=config.data.advantage,
        tracking=baselines.tracking,
    )
    baselines.learn(curation.chosen)
    records = {
        (record.trajectory_id, record.step): record
        for group in groups
        for each in group
        for record in each.records
    }
    planned = [(records[each.trajectory_id, each.step], each) for each in curation.samples]
    chains, samples = chained(
        [
            step_of(record, each.advantage, each.group_id, each.reward, each.baseline)
            for record, each in planned
        ]
    )
    return Batch(
        batch_id=number,
        group_ids=[group.id for group in curation.chosen],
        temperature=config.rollout.temperature,
        chains=chains,
        samples=samples,
        images={record.image_hashes[-1]: record.screenshot for record, _ in planned},
    )


def _over(tasks: Sequence[Task], start: int = 0) -> Iterator[Task]:
    """Yield the tasks in turn, forever."""
    index = start
    while True:
        yield tasks[index % len(tasks)]
        index += 1
