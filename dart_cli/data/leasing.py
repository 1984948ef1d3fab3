"""How groups begin and end, in memory and in the store.

Leasing          new groups and leases: how many trajectories, of how many steps, with which seeds
Closing          groups that are done with: ready for a batch, or dropped for a reason
finished_group   a group as curate sees it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from bus.messages import Lease, LeaseRequest, Sampling
from dart_cli.algo.advantage import RewardKind, training_reward
from dart_cli.algo.task_sampling import group_size
from dart_cli.config.schema import Config, DataConfig
from dart_cli.data.baselines import Baselines
from dart_cli.data.curate import FinishedGroup, Member, drop_decisions, no_gradient
from dart_cli.data.groups import (
    Attempt,
    Group,
    GroupTable,
    group_id,
    most_attempts,
    trajectory_id,
)
from dart_cli.data.pool import StoredPool
from dart_cli.data.progress import RunProgress
from dart_cli.data.scheduler import NewGroup, sampling_seed
from dart_cli.data.store.rows import Decision, GroupRow
from dart_cli.data.store.writer import Store
from envs.contract.base import Task

LENGTH_SLACK = 2
"""Steps above the longest success: DART has none; a policy that gets a little lost still passes."""


class Leasing:
    """Opens groups and leases their trajectories."""

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
        self._config = config
        self._store = store
        self._tasks = tasks
        self._group_table = group_table
        self._progress = progress
        self._wall = wall
        self._monotonic = monotonic
        self.leased = sum(store.count("trajectories").values())  # of the run, over all starts
        self._longest: dict[str, int] = {}  # task id -> steps of its longest success
        if config.data.dynamic_length:
            self._longest = store.longest_successes()

    def step_limit(self, task_id: str) -> int:
        """Return how many steps a trajectory of the task's next group may take.

        With data.dynamic_length those of its longest success and LENGTH_SLACK, once it has one (DART,
        arXiv 2509.23866); never more than the task's own limit.
        """
        limit = self._tasks[task_id].max_steps
        longest = self._longest.get(task_id)
        if longest is None or not self._config.data.dynamic_length:
            return limit
        return min(limit, max(longest + LENGTH_SLACK, 1))

    def next_size(self, task_id: str) -> int:
        """Trajectories that the task's next group wants.

        With data.dynamic_number by the moving average of its success, or with data.reward = "value"
        of its reward, once it is that of a whole group at least: one early success does not make a
        task easy. The variance of rewards in [0, 1] of mean m is at most m (1 - m).
        """
        data = self._config.data
        task = self._progress.tasks[task_id]
        if not data.dynamic_number or task.counted < data.group_size:
            return data.group_size
        average = task.reward if data.reward == "value" else task.average
        return group_size(average.value, data.group_size)

    def note_success(self, task_id: str, steps: int) -> None:
        """Note that a trajectory of the task passed after so many steps."""
        self._longest[task_id] = max(steps, self._longest.get(task_id, 0))

    def open_group(self, new: NewGroup) -> Group:
        """Return a group of this task instance, as yet without an attempt."""
        number = self._group_table.opened + 1
        size = self.next_size(new.task.id)
        group = Group(
            group_id(number),
            number,
            new.suite,
            new.task.id,
            new.task_seed,
            size,
            self.step_limit(new.task.id),
            most_attempts(size),
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
        """Lease one more trajectory of the group to the slot that asked."""
        number = len(group.attempts)
        attempt = Attempt(
            trajectory_id(group.id, number),
            number,
            request.worker,
            request.slot,
            sampling_seed(self._config.run.seed, group.number, number),
            self._monotonic(),
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
        """Return the attempt as its slot is sent it."""
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


class Closing:
    """Every way in which a group leaves play."""

    def __init__(
        self,
        data: DataConfig,
        store: Store,
        group_table: GroupTable,
        pool: StoredPool,
        baselines: Baselines,
        *,
        wall: Callable[[], float],
    ) -> None:
        self.dropped_since_batch: Counter[str] = Counter()  # groups by reason
        self._data = data
        self._store = store
        self._group_table = group_table
        self._pool = pool
        self._baselines = baselines
        self._wall = wall

    def settle(self, group: Group) -> None:
        """Close the group if all of it is over: ready for a batch, or dropped."""
        if group.state != "open" or not group.over(self._data.early_stop):
            return
        finished = [(each.outcome, each.reward) for each in group.finished if each.outcome]
        reason = no_gradient(finished, alone=self._baselines.in_use)
        alone_failed = self._baselines.in_use and {each for each, _ in finished} == {"fail"}
        if (alone_failed or reason == "all_fail") and self._pool.draw_for(group):
            reason = None
        if reason is None:
            group.state = "ready"
            self._store.close_group(group.id, "ready", "", self._wall())
        else:
            self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> None:
        """None of the group is trained on; what is still in play is not waited for."""
        now = self._wall()
        decisions = drop_decisions(finished_group(group, self._data.reward), reason)
        decisions += [Decision(attempt.id, False, reason, 0.0) for attempt in group.live]
        for decision in decisions[1:]:
            self._store.drop_trajectory(decision.subject, reason, now)
        self._store.close_group(group.id, "dropped", reason, now)
        self._store.add_decisions(decisions, now)
        self.remove(group)
        self.dropped_since_batch[reason] += 1

    def remove(self, group: Group) -> None:
        """Remove a group that is in a batch or dropped; others may draw its successes from now on."""
        self._group_table.remove(group)
        self._pool.join(group)


def finished_group(
    group: Group, kind: RewardKind, behind: Callable[[int], int] = lambda _: 0
) -> FinishedGroup:
    """Return the group as curate sees it; `kind` is data.reward."""
    members = tuple(
        Member(
            attempt.id,
            attempt.outcome,
            attempt.steps,
            max(map(behind, attempt.versions), default=0),
            tuple(attempt.entropies[step] for step in range(attempt.steps)),
            attempt.reward,
        )
        for attempt in group.finished
        if attempt.outcome is not None
    )
    row = group.pool_member
    pool = None
    if row is not None:
        reward = training_reward("pass", row.reward, kind)
        pool = Member(row.trajectory_id, "pass", row.steps, 0, (), reward)
    return FinishedGroup(group.id, members, pool, group.task_id)
