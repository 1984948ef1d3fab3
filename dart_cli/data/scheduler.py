"""Decide which trajectory a free environment slot plays next, by data.scheduling.

    Scheduler     a free slot starts the next trajectory at once
    BatchWise     the groups of one batch are played; the next batch begins when they have been served
    April         more groups than a batch needs are played; those unfinished when it is full go on later

A Scheduler is called whenever an environment slot is free. It gets the situation and returns a group that
needs one more member, a new group to open, or what the slot must wait for. It keeps no state: its decisions
follow from the situation and the run's seed, so a restarted run goes on as it would have.

All schedulers open no more groups than can be trained in time (`groups_in_time`), fill groups in the order
they were opened, and replace a group without a gradient, as DAPO's dynamic sampling does (arXiv 2503.14476
section 3.2).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd

from bus.error_texts import did_you_mean
from bus.errors import TaskError
from bus.messages import LeaseRequest
from dart_cli.algo.task_sampling import (
    UNKNOWN,
    TaskEstimate,
    deviation_weights,
    frontier_weights,
    uniform_weights,
)
from dart_cli.config.schema import OVER_PROVISION, TRAIN_SEEDS, Config
from dart_cli.data.groups import Group, GroupTable
from envs.contract.base import Task

_STRIDE = 387_420_489  # 3 ** 18: it shares no factor with most ranges, so k * _STRIDE meets each seed once

Estimates = Mapping[str, TaskEstimate]
"""Task id -> what is known of the task's rewards; a task without an entry is unknown."""


@dataclass(frozen=True)
class Situation:
    """The state of the run by which a scheduler decides."""

    group_table: GroupTable
    estimates: Estimates = field(default_factory=dict)
    untrained: int = 0  # batches that are formed and not trained on yet
    owed: int = 0  # replays that come after these and before the next fresh batch
    unpublished: int = 0  # updates since the newest published weights
    lag: int = 0
    """Versions that the oldest worker in use is behind the newest weights. It is negative while the trainer
    repeats the updates that led to the weights which the worker serves."""
    turn: str = ""
    """What the rollout workers wait for if it is the trainer's turn; else empty."""


@dataclass(frozen=True)
class NewGroup:
    """The answer that a new group of this task instance is to be opened, and its first member leased."""

    suite: str  # the name that it is loaded by
    task: Task
    task_seed: int


@dataclass(frozen=True)
class NotYet:
    """The answer that there is no lease or batch yet; `reason` is what has to happen first."""

    reason: str
    one_slot: bool = False  # the reason holds for this slot alone; another slot may get a lease


def groups_in_time(
    *,
    groups_per_batch: int,
    max_staleness: int,
    publish_every: int = 1,
    untrained: int = 0,
    owed: int = 0,
    reuse: int = 0,
    unpublished: int = 0,
    lag: int = 0,
) -> int:
    """Return how many groups may be live so that the newest of them is trained in time.

    Groups are trained in the order they were opened. A group with L live groups before it is in the batch
    that comes after `untrained + owed` batches and `floor(L / groups_per_batch)` fresh ones, each of which is
    followed by at most `reuse` replays. By then the trainer has published `floor((unpublished + those
    batches) / publish_every)` more versions, and the group's first tokens may come from a worker that is
    `lag` versions behind already:

        staleness(L) = lag + floor((unpublished + untrained + owed
                                    + (1 + reuse) floor(L / groups_per_batch)) / publish_every)

    The result is the number of L >= 0 for which the staleness is at most `max_staleness`. With `untrained` =
    `owed` = 0, `unpublished` < `publish_every` and `lag` <= `max_staleness` this is at least one batch, so
    that a run with `max_staleness` = 0 is on-policy and never stands still.
    """
    updates = (max_staleness - lag + 1) * publish_every - unpublished - untrained - owed
    return groups_per_batch * max(0, ceil(updates / (1 + reuse)))


class Scheduler:
    """A scheduler that starts the next trajectory at once and waits for no group or batch."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        self._suite = config.env.suite
        self._seed = config.run.seed
        self._seeds = config.env.seeds
        self._data_config = config.data
        self._publish_every = config.weights.publish_every
        self._reuse = config.train.reuse
        self._tasks = list(tasks)
        self._by_id = {task.id: task for task in self._tasks}

    def next(self, situation: Situation, request: LeaseRequest) -> Group | NewGroup | NotYet:
        """Return what a free slot plays next, of the requested task if the request has one.

        Raises TaskError if the slot does not play the run's suite, or requests a task or seed that the run
        does not have.
        """
        if self._suite not in request.suites:
            only = ", ".join(request.suites)
            raise TaskError(f"the run plays {self._suite}, this worker only {only}")
        self._check_request(request)
        if situation.turn:
            return NotYet(situation.turn)
        assignment = self._next(situation, request)
        if request.task and isinstance(assignment, NotYet):
            # A slot that plays any task may still get a lease.
            return NotYet(assignment.reason, one_slot=True)
        return assignment

    def limit(self, situation: Situation) -> int:
        """Return how many groups may be played or wait for a batch at once, by the lowest bound."""
        return min(self._bounds(situation))[0]

    def probabilities(self, estimates: Estimates) -> dict[str, float]:
        """Return each task's probability of being the next group's task, for the status page."""
        weights = self._weights(estimates)
        return dict(zip((task.id for task in self._tasks), weights, strict=True))

    # --- inside -------------------------------------------------------------------------

    def _check_request(self, request: LeaseRequest) -> None:
        """Raise TaskError if the request has a task or a seed that this run does not train on."""
        if request.task and request.task not in self._by_id:
            raise TaskError(
                f"no training task {request.task!r} in this run"
                f"{did_you_mean(request.task, self._by_id)}; env.tasks and env.heldout say which it has"
            )
        first, end = self._seeds
        if request.task_seed is not None and not (
            request.task and first <= request.task_seed < end
        ):
            raise TaskError(
                f"seed {request.task_seed}: a seed needs a task and must be in env.seeds, [{first}, {end})"
            )

    def _next(self, situation: Situation, request: LeaseRequest) -> Group | NewGroup | NotYet:
        """Return what the slot plays next, while it is the turn of the rollout workers."""
        (in_time, too_late), *_ = bounds = self._bounds(situation)
        # 1. Fill the groups that are open, the oldest first. There is more than one untrained batch only
        # after the trainer went back to a checkpoint: then groups that could not be trained in time are not
        # filled.
        has_gone_back = situation.untrained > 1
        for number, group in enumerate(situation.group_table.groups.values()):
            if has_gone_back and number >= in_time:
                return NotYet(f"{_describe(situation)}; {too_late}")
            if self._has_vacancy(group) and _fits(group, request):
                return group
        # 2. Open a new group, if one more may be live.
        limit, why = min(bounds)
        if len(situation.group_table.groups) >= limit:
            return NotYet(f"{_describe(situation)}; {why}")
        number = situation.group_table.opened + 1
        # Each group has a generator, so that the next task depends on no hidden state.
        generator = random.Random(f"{self._seed}:{number}")  # noqa: S311 - not for secrets
        if request.task:
            task = self._by_id[request.task]
        else:
            [task] = generator.choices(self._tasks, self._weights(situation.estimates))
        seed = request.task_seed
        if seed is None:
            seed = task_seed(self._seed, number, self._seeds)
        return NewGroup(self._suite, task, seed)

    def _has_vacancy(self, group: Group) -> bool:
        return group.vacancies(self._data_config.early_stop) > 0

    def _bounds(self, situation: Situation) -> list[tuple[int, str]]:
        """Return upper bounds of the number of live groups, each with its reason; the lowest one holds.

        The first is the bound by staleness.
        """
        config = self._data_config
        in_time = groups_in_time(
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            publish_every=self._publish_every,
            untrained=situation.untrained,
            owed=situation.owed,
            reuse=self._reuse,
            unpublished=situation.unpublished,
            lag=situation.lag,
        )
        why = f"one more would be trained too late for data.max_staleness = {config.max_staleness}"
        if situation.lag > 0:
            versions = "version" if situation.lag == 1 else "versions"
            why += f", a rollout worker is {situation.lag} {versions} behind"
        bounds = [(in_time, why)]
        if most := config.max_open_groups:
            bounds.append((most, f"data.max_open_groups = {most}"))
        return bounds

    def _weights(self, estimates: Estimates) -> list[float]:
        """Return the probability of each task, by data.task_sampling."""
        if self._data_config.task_sampling == "uniform":
            return uniform_weights(len(self._tasks))
        by_task = [estimates.get(task.id, UNKNOWN) for task in self._tasks]
        shares = [estimate.invalid_share for estimate in by_task]
        variances = [estimate.variance for estimate in by_task]
        if self._data_config.task_sampling == "deviation":
            return deviation_weights(variances, shares)
        return frontier_weights(variances, shares)


class BatchWise(Scheduler):
    """A scheduler that plays the groups of one batch to their end before it opens groups of the next."""

    def _bounds(self, situation: Situation) -> list[tuple[int, str]]:
        most = self._data_config.groups_per_batch
        return [*super()._bounds(situation), (most, f"a batch of {most} groups is played at once")]


class April(Scheduler):
    """A scheduler with active partial rollouts (arXiv 2509.18521): it plays more groups than a batch needs.

    When the batch is full, the trainer's turn suspends the unfinished groups. They go on first afterwards,
    since the oldest groups are filled first. Surplus groups that have finished wait for the next batch.
    With `oversample` unfinished groups are dropped when the batch is formed.
    """

    def _bounds(self, situation: Situation) -> list[tuple[int, str]]:
        config = self._data_config
        most = OVER_PROVISION * config.groups_per_batch
        why = f'data.scheduling = "{config.scheduling}" lets {most} groups play'
        return [*super()._bounds(situation), (most, why)]


SCHEDULERS: dict[str, type[Scheduler]] = {
    "rollout": Scheduler,
    "batch": BatchWise,
    "april": April,
    "oversample": April,
}
"""data.scheduling -> its class."""


def make_scheduler(config: Config, tasks: Sequence[Task]) -> Scheduler:
    """Return the scheduler of data.scheduling."""
    return SCHEDULERS[config.data.scheduling](config, tasks)


def _fits(group: Group, request: LeaseRequest) -> bool:
    """Return True if the group has the task and the seed that the request asks for, if it does."""
    if request.task_seed is not None and group.task_seed != request.task_seed:
        return False
    return request.task in ("", group.task_id)


def _describe(situation: Situation) -> str:
    """Return the number of groups in words, e.g. "6 groups play and 2 wait for the trainer"."""
    group_table = situation.group_table
    text = f"{len(group_table.open)} groups play and {len(group_table.ready)} wait for the trainer"
    before = situation.untrained + situation.owed
    return f"{text}, batches before them: {before}" if before else text


def task_seed(run_seed: int, number: int, seeds: Sequence[int] = (0, TRAIN_SEEDS)) -> int:
    """Return the task seed of the group opened as `number`, in the range `seeds`.

    No seed repeats before all of the range were used.
    """
    first, end = seeds
    count, stride = end - first, _STRIDE
    while gcd(stride, count) > 1:
        stride += 1
    return first + (run_seed * 7919 + number * stride) % count


def sampling_seed(run_seed: int, group: int, attempt: int) -> int:
    """Return the seed of one attempt's sampling, below 2 ** 31; step i of the episode adds i."""
    return random.Random(f"{run_seed}:{group}:{attempt}").getrandbits(31)  # noqa: S311 - likewise
