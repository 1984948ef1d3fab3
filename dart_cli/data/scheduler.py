"""What to play next, as data.scheduling says.

    Scheduler     a freed slot starts the next trajectory at once
    BatchWise     one batch's groups are played; the next batch begins when they are served
    April         more groups than a batch needs; what is unfinished when it is full goes on later

A Scheduler is asked whenever an environment slot is free, sees the situation, and answers with a
group that gets one more member, with a new group to open, or with what the slot must wait for. It
keeps no state of its own: whatever it decides follows from the situation and the run's seed, so a
restarted run goes on as it would have.

All of them open no more groups than can be trained in time (`groups_in_time`), fill groups in the
order they were opened, and replace a group that turned out to teach nothing, as DAPO's dynamic
sampling does (arXiv 2503.14476 section 3.2). Whether it is the trainer's turn is the situation's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd

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
from envs.contract.own_code import did_you_mean

_STRIDE = 387_420_489  # 3 ** 18: shares no factor with most ranges, so k * _STRIDE meets each once

Estimates = Mapping[str, TaskEstimate]
"""By task id; a task without an entry is unknown."""


@dataclass(frozen=True)
class Situation:
    """What a scheduler sees."""

    group_table: GroupTable
    estimates: Estimates = field(default_factory=dict)
    untrained: int = 0  # batches served and not trained yet
    owed: int = 0  # batches that are trained on again after these and before the next fresh one
    unpublished: int = 0  # updates since the newest published weights
    lag: int = 0  # versions that the oldest worker which is asked is behind the newest weights;
    # negative while the trainer does again what led to those that it serves
    turn: str = ""  # what the rollouts wait for where turns are taken; empty while it is theirs


@dataclass(frozen=True)
class NewGroup:
    """Open a group of this task instance and lease its first member."""

    suite: str  # by the name it is loaded under
    task: Task
    task_seed: int


@dataclass(frozen=True)
class NotYet:
    """No lease or batch can be given now; `reason` is what has to happen first."""

    reason: str
    one_slot: bool = False  # it holds for the slot that asked; another may be given something


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
    """How many groups may live so that the newest of them is trained in time.

    Groups are trained in the order they were opened. A group with L live groups before it is in
    the batch after `untrained + owed` others and `floor(L / groups_per_batch)` fresh ones, each
    followed by at most `reuse` that are trained on again. By then the trainer has
    published `floor((unpublished + that many) / publish_every)` versions more, and the group's
    first tokens may come from a worker that is `lag` versions behind already:

        staleness(L) = lag + floor((unpublished + untrained + owed
                                    + (1 + reuse) floor(L / groups_per_batch)) / publish_every)

    This is the number of L >= 0 for which it is at most `max_staleness`. For `untrained` = `owed` = 0,
    `unpublished` < `publish_every` and `lag` <= `max_staleness` that is at least one batch, so
    that a run with `max_staleness` = 0 is on-policy and goes on.
    """
    updates = (max_staleness - lag + 1) * publish_every - unpublished - untrained - owed
    return groups_per_batch * max(0, ceil(updates / (1 + reuse)))


class Scheduler:
    """A freed slot starts the next trajectory at once; no group or batch is waited for."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        self._suite = config.env.suite
        self._seed = config.run.seed
        self._seeds = config.env.seeds
        self._data = config.data
        self._publish_every = config.weights.publish_every
        self._reuse = config.train.reuse
        self._tasks = list(tasks)
        self._by_id = {task.id: task for task in self._tasks}

    def next(self, seen: Situation, request: LeaseRequest) -> Group | NewGroup | NotYet:
        """Return what a free slot does next; of the task that it names, if it does.

        Raises TaskError if it plays none of the run's suites, or names no task or seed of the run.
        """
        if self._suite not in request.suites:
            only = ", ".join(request.suites)
            raise TaskError(f"the run plays {self._suite}, this worker only {only}")
        self._check_named(request)
        if seen.turn:
            return NotYet(seen.turn)
        found = self._next(seen, request)
        if request.task and isinstance(found, NotYet):
            return NotYet(found.reason, one_slot=True)  # a group of another task may want members
        return found

    def limit(self, seen: Situation) -> int:
        """How many groups may play or wait for a batch at once; for the status page, too."""
        return min(self._bounds(seen))[0]

    def probabilities(self, estimates: Estimates) -> dict[str, float]:
        """Task id -> probability of being the next group's; for the status page."""
        weights = self._weights(estimates)
        return dict(zip((task.id for task in self._tasks), weights, strict=True))

    # --- inside -------------------------------------------------------------------------

    def _check_named(self, request: LeaseRequest) -> None:
        """Raise TaskError where the request names a task or a seed that this run does not train on."""
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

    def _next(self, seen: Situation, request: LeaseRequest) -> Group | NewGroup | NotYet:
        (in_time, too_late), *_ = bounds = self._bounds(seen)
        # More than one only after the trainer went back: what is sampled now is as old as it is then.
        has_gone_back = seen.untrained > 1
        for number, group in enumerate(seen.group_table.groups.values()):
            if has_gone_back and number >= in_time:
                return NotYet(f"{_described(seen)}; {too_late}")
            if self._wants(group) and _fits(group, request):
                return group
        limit, why = min(bounds)
        if len(seen.group_table.groups) >= limit:
            return NotYet(f"{_described(seen)}; {why}")
        number = seen.group_table.opened + 1
        # One generator for each group: which task comes next depends on no hidden state.
        choice = random.Random(f"{self._seed}:{number}")  # noqa: S311 - not for secrets
        if request.task:
            task = self._by_id[request.task]
        else:
            [task] = choice.choices(self._tasks, self._weights(seen.estimates))
        seed = request.task_seed
        if seed is None:
            seed = task_seed(self._seed, number, self._seeds)
        return NewGroup(self._suite, task, seed)

    def _wants(self, group: Group) -> bool:
        return group.wanted(self._data.early_stop) > 0

    def _bounds(self, seen: Situation) -> list[tuple[int, str]]:
        """Most groups that may live, and why no more; the least of them binds."""
        data = self._data
        in_time = groups_in_time(
            groups_per_batch=data.groups_per_batch,
            max_staleness=data.max_staleness,
            publish_every=self._publish_every,
            untrained=seen.untrained,
            owed=seen.owed,
            reuse=self._reuse,
            unpublished=seen.unpublished,
            lag=seen.lag,
        )
        why = f"one more would be trained too late for data.max_staleness = {data.max_staleness}"
        if seen.lag > 0:
            versions = "version" if seen.lag == 1 else "versions"
            why += f", a rollout worker is {seen.lag} {versions} behind"
        bounds = [(in_time, why)]
        if data.max_open_groups:
            bounds.append((data.max_open_groups, f"data.max_open_groups = {data.max_open_groups}"))
        return bounds

    def _weights(self, estimates: Estimates) -> list[float]:
        if self._data.task_sampling == "uniform":
            return uniform_weights(len(self._tasks))
        known = [estimates.get(task.id, UNKNOWN) for task in self._tasks]
        shares = [each.invalid_share for each in known]
        variances = [each.variance for each in known]
        if self._data.task_sampling == "deviation":
            return deviation_weights(variances, shares)
        return frontier_weights(variances, shares)


class BatchWise(Scheduler):
    """One batch's groups are played to their end; the next begins when they have been served."""

    def _bounds(self, seen: Situation) -> list[tuple[int, str]]:
        most = self._data.groups_per_batch
        return [*super()._bounds(seen), (most, f"a batch of {most} groups is played at once")]


class April(Scheduler):
    """Active partial rollouts (arXiv 2509.18521): more groups than a batch needs are in play.

    When the batch is full the trainer's turn suspends the others, which then go on first: groups
    are filled oldest first. What finished too much waits for the next batch. With `oversample` the others
    are dropped when the batch is formed.
    """

    def _bounds(self, seen: Situation) -> list[tuple[int, str]]:
        most = OVER_PROVISION * self._data.groups_per_batch
        why = f'data.scheduling = "{self._data.scheduling}" lets {most} groups play'
        return [*super()._bounds(seen), (most, why)]


SCHEDULERS: dict[str, type[Scheduler]] = {
    "rollout": Scheduler,
    "batch": BatchWise,
    "april": April,
    "oversample": April,
}
"""By config.data.scheduling."""


def make_scheduler(config: Config, tasks: Sequence[Task]) -> Scheduler:
    """Return the scheduler the configuration asks for."""
    return SCHEDULERS[config.data.scheduling](config, tasks)


def _fits(group: Group, request: LeaseRequest) -> bool:
    """Whether the group is of the task, and of the seed, that the request names."""
    if request.task_seed is not None and group.task_seed != request.task_seed:
        return False
    return request.task in ("", group.task_id)


def _described(seen: Situation) -> str:
    """Return the groups in words, e.g. "6 groups play and 2 wait for the trainer"."""
    group_table = seen.group_table
    text = f"{len(group_table.open)} groups play and {len(group_table.ready)} wait for the trainer"
    before = seen.untrained + seen.owed
    return f"{text}, batches before them: {before}" if before else text


def task_seed(run_seed: int, number: int, seeds: Sequence[int] = (0, TRAIN_SEEDS)) -> int:
    """Seed in the range `seeds` of the group opened as `number`; as many groups as seeds differ."""
    first, end = seeds
    count, stride = end - first, _STRIDE
    while gcd(stride, count) > 1:
        stride += 1
    return first + (run_seed * 7919 + number * stride) % count


def sampling_seed(run_seed: int, group: int, attempt: int) -> int:
    """Seed of one attempt's sampling, below 2 ** 31; step i of the episode adds i."""
    return random.Random(f"{run_seed}:{group}:{attempt}").getrandbits(31)  # noqa: S311 - likewise
