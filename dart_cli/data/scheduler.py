"""What to play next. One interface; which implementation, the configuration says.

A Scheduler is asked whenever an environment slot is free, sees the board, and answers with a group
that gets one more member, with a new group to open, or with what the slot must wait for. It keeps
no state of its own: whatever it decides follows from the board, the success rates and the run's
seed, so a restarted run goes on as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bus.errors import TaskError
from dart_cli.algo.schedule import frontier_weights, uniform_weights
from dart_cli.config import Config
from dart_cli.data.groups import Board, Group
from envs.base import Task
from envs.registry import find_task, tasks_of

TRAIN_SEEDS = 1_000_000
"""Task seeds below this are trained on; evaluation begins here (config.eval.seed)."""

_STRIDE = 387_420_489  # 3 ** 18: shares no factor with TRAIN_SEEDS, so k * _STRIDE meets each once

Success = Mapping[str, float | None]
"""Task id -> moving average of its success; None before the first verdict."""


@dataclass(frozen=True)
class NewGroup:
    """Open a group of this task instance and lease its first member."""

    suite: str  # by the name it is loaded under
    task: Task
    task_seed: int


@dataclass(frozen=True)
class Wait:
    """Nothing may be leased now; `reason` says what has to happen first."""

    reason: str


class Scheduler(Protocol):
    """Chooses the next trajectory."""

    def next(
        self, board: Board, success: Success, suites: Collection[str]
    ) -> Group | NewGroup | Wait:
        """What a free slot that can play `suites` does next.

        Raises TaskError if that is none of the run's.
        """
        ...

    def probabilities(self, success: Success) -> dict[str, float]:
        """Task id -> probability of being the next group's; for the status page."""
        ...


class RolloutWise:
    """A freed slot starts the next trajectory at once; no group or batch is waited for.

    Groups are filled in the order they were opened, and a new one is opened when all are full, up
    to `max_open_groups` that play or wait to be trained: what bounds the work in flight, and so
    how stale it can be when it is trained on.
    """

    def __init__(
        self,
        suite: str,
        tasks: Sequence[Task],
        *,
        seed: int,
        max_open_groups: int,
        early_stop: bool,
        frontier: bool,
    ) -> None:
        self._suite = suite
        self._tasks = list(tasks)
        self._seed = seed
        self._max_open_groups = max_open_groups
        self._early_stop = early_stop
        self._frontier = frontier

    def next(
        self, board: Board, success: Success, suites: Collection[str]
    ) -> Group | NewGroup | Wait:
        """See Scheduler."""
        if self._suite not in suites:
            raise TaskError(f"the run plays {self._suite}, this worker only {', '.join(suites)}")
        for group in board.groups.values():
            if group.wanted(self._early_stop):
                return group
        if len(board.groups) >= self._max_open_groups:
            return Wait(
                f"{len(board.open)} groups play and {len(board.ready)} wait for the trainer; "
                f"data.max_open_groups = {self._max_open_groups}"
            )
        number = board.opened + 1
        # One generator for each group: which task comes next depends on no hidden state.
        choice = random.Random(f"{self._seed}:{number}")  # noqa: S311 - not for secrets
        [task] = choice.choices(self._tasks, self._weights(success))
        return NewGroup(self._suite, task, task_seed(self._seed, number))

    def probabilities(self, success: Success) -> dict[str, float]:
        """See Scheduler."""
        return dict(zip((task.id for task in self._tasks), self._weights(success), strict=True))

    def _weights(self, success: Success) -> list[float]:
        if not self._frontier:
            return uniform_weights(len(self._tasks))
        return frontier_weights([success.get(task.id) for task in self._tasks])


def make_scheduler(config: Config, tasks: Sequence[Task]) -> Scheduler:
    """The scheduler the configuration asks for."""
    return RolloutWise(
        config.env.suite,
        tasks,
        seed=config.run.seed,
        max_open_groups=config.data.max_open_groups,
        early_stop=config.data.early_stop,
        frontier=config.data.task_sampling == "frontier",
    )


def training_tasks(config: Config) -> list[Task]:
    """The tasks the run trains on: config.env.tasks, else the suite's training split.

    Raises TaskError for a suite or task that does not exist.
    """
    if config.env.tasks:
        return [find_task(config.env.suite, task_id) for task_id in config.env.tasks]
    return tasks_of(config.env.suite, "train")


def task_seed(run_seed: int, number: int) -> int:
    """Seed in [0, 1,000,000) of the group opened as `number`; a million groups differ."""
    return (run_seed * 7919 + number * _STRIDE) % TRAIN_SEEDS


def sampling_seed(run_seed: int, group: int, attempt: int) -> int:
    """Seed of one attempt's sampling, below 2 ** 31; step i of the episode adds i."""
    return random.Random(f"{run_seed}:{group}:{attempt}").getrandbits(31)  # noqa: S311 - likewise
