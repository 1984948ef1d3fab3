"""How groups and leases begin, in memory and in the store.

    Leasing   opens groups, and leases their trajectories: how many, of how many steps, with which seeds

closing.py has the other end of a group's life.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bus.messages import Lease, LeaseRequest, Sampling
from dart_cli.algo.task_sampling import group_size
from dart_cli.config.schema import Config
from dart_cli.data.groups import (
    Attempt,
    Group,
    GroupTable,
    group_id,
    most_attempts,
    trajectory_id,
)
from dart_cli.data.progress import RunProgress
from dart_cli.data.scheduler import NewGroup, sampling_seed
from dart_cli.data.store.rows import GroupRow
from dart_cli.data.store.writer import Store
from envs.contract.base import Task

LENGTH_SLACK = 2
"""Steps that a trajectory may take above its task's longest success. DART (arXiv 2509.23866) allows none;
with two, a policy that takes a detour still passes."""


class Leasing:
    """The part of the data service that opens groups and leases their trajectories."""

    def __init__(
        self,
        config: Config,
        store: Store,
        tasks: Mapping[str, Task],
        group_table: GroupTable,
        progress: RunProgress,
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """`wall` returns unix seconds; `monotonic` returns the seconds in which leases are measured."""
        self._config = config
        self._store = store
        self._tasks = tasks
        self._group_table = group_table
        self._progress = progress
        self._wall = wall
        self._monotonic = monotonic
        self.leased = sum(store.count("trajectories").values())  # trajectories, over all starts
        self._longest: dict[str, int] = {}  # task id -> steps of its longest success
        if config.data.dynamic_length:
            self._longest = store.longest_successes()

    def step_limit(self, task_id: str) -> int:
        """Return how many steps a trajectory of the task's next group may take.

        With data.dynamic_length and once the task has a success, that is its longest success and
        LENGTH_SLACK (DART, arXiv 2509.23866). It is never more than the task's own limit.
        """
        limit = self._tasks[task_id].max_steps
        longest = self._longest.get(task_id)
        if longest is None or not self._config.data.dynamic_length:
            return limit
        return min(limit, max(longest + LENGTH_SLACK, 1))

    def next_size(self, task_id: str) -> int:
        """Return how many trajectories the task's next group has.

        With data.dynamic_number this depends on the moving average of the task's success, or of its
        reward with data.reward = "value": the variance of rewards in [0, 1] of mean m is at most m (1 - m).
        Until a whole group has counted, the size is data.group_size: one early success does not make a
        task easy.
        """
        config = self._config.data
        task = self._progress.tasks[task_id]
        if not config.dynamic_number or task.counted < config.group_size:
            return config.group_size
        average = task.reward if config.reward == "value" else task.average
        return group_size(average.value, config.group_size)

    def note_success(self, task_id: str, steps: int) -> None:
        """Note that a trajectory of the task passed after `steps` steps."""
        self._longest[task_id] = max(steps, self._longest.get(task_id, 0))

    def open_group(self, new: NewGroup) -> Group:
        """Open a group of a task instance, without an attempt yet, and return it."""
        number = self._group_table.opened + 1
        size = self.next_size(new.task.id)
        group = Group(
            id=group_id(number),
            number=number,
            suite=new.suite,
            task_id=new.task.id,
            task_seed=new.task_seed,
            size=size,
            max_steps=self.step_limit(new.task.id),
            max_attempts=most_attempts(size),
        )
        self._group_table.add(group)
        self._store.add_group(
            GroupRow(
                id=group.id,
                number=number,
                suite=group.suite,
                task_id=group.task_id,
                task_seed=group.task_seed,
                size=group.size,
                state="open",
                reason="",
                opened_at=self._wall(),
                closed_at=None,
                batch_id=None,
            )
        )
        return group

    def add_attempt(self, group: Group, request: LeaseRequest) -> Attempt:
        """Lease one more trajectory of the group to the slot that sent the request, and return it."""
        number = len(group.attempts)
        attempt = Attempt(
            id=trajectory_id(group.id, number),
            number=number,
            worker=request.worker,
            slot=request.slot,
            sampling_seed=sampling_seed(self._config.run.seed, group.number, number),
            renewed_at=self._monotonic(),
            started_at=request.started_at or None,
        )
        self._store.add_lease(
            attempt.id,
            group_id=group.id,
            attempt=number,
            worker=attempt.worker,
            slot=attempt.slot,
            sampling_seed=attempt.sampling_seed,
            at=self._wall(),
            max_steps=group.max_steps,
        )
        self._group_table.add_attempt(group, attempt)
        self.leased += 1
        return attempt

    def as_lease(self, group: Group, attempt: Attempt) -> Lease:
        """Return the lease of an attempt, as it is sent to the slot."""
        rollout = self._config.rollout
        return Lease(
            trajectory_id=attempt.id,
            group_id=group.id,
            suite=group.suite,
            task_id=group.task_id,
            task_seed=group.task_seed,
            max_steps=group.max_steps,
            sampling=Sampling(
                temperature=rollout.temperature,
                max_tokens=rollout.max_tokens,
                seed=attempt.sampling_seed,
            ),
        )
