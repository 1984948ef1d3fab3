"""How groups end: ready for a batch, or dropped for a reason.

GroupCloser      closes groups in memory and in the store, and counts those that were dropped
finished_group   a live group -> the group as curate.py sees it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dart_cli.algo.advantage import RewardKind, training_reward
from dart_cli.config.schema import DataConfig
from dart_cli.data.baselines import Baselines
from dart_cli.data.curate import FinishedGroup, Member, drop_decisions, no_gradient
from dart_cli.data.groups import Group, GroupTable
from dart_cli.data.pool import StoredPool
from dart_cli.data.store.rows import Decision
from dart_cli.data.store.writer import Store


class GroupCloser:
    """The part of the data service that closes groups, in memory and in the store."""

    def __init__(
        self,
        config: DataConfig,
        store: Store,
        group_table: GroupTable,
        pool: StoredPool,
        baselines: Baselines,
        *,
        has_teacher: bool,
        wall: Callable[[], float],
    ) -> None:
        """`has_teacher` says whether a teacher scores tokens; `wall` returns unix seconds."""
        self.dropped_since_batch: Counter[str] = Counter()  # reason -> groups
        self._config = config
        self._store = store
        self._group_table = group_table
        self._pool = pool
        self._baselines = baselines
        self._has_teacher = has_teacher
        self._wall = wall

    def close_if_over(self, group: Group) -> None:
        """Make the group ready for a batch, or drop it, if none of its trajectories is played any more.

        A group that failed throughout is first offered a success from the experience pool.
        """
        if group.state != "open" or not group.is_over(self._config.early_stop):
            return
        verdicts = [
            (attempt.outcome, attempt.reward) for attempt in group.finished if attempt.outcome
        ]
        alone = self._baselines.in_use or self._has_teacher
        reason = no_gradient(verdicts, alone=alone)
        has_only_failed = alone and {o for o, _ in verdicts} == {"fail"}
        if (has_only_failed or reason == "all_fail") and self._pool.draw_for(group):
            reason = None
        if reason is None:
            group.state = "ready"
            why = "" if self._baselines.in_use or group.pool_member else no_gradient(verdicts) or ""
            self._store.close_group(group.id, "ready", why, self._wall())
        else:
            self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> None:
        """Drop the group with all of its trajectories, including those that are still played."""
        now = self._wall()
        decisions = drop_decisions(finished_group(group, self._config.reward), reason)
        decisions += [Decision(attempt.id, False, reason, 0.0) for attempt in group.live]
        for decision in decisions[1:]:
            self._store.drop_trajectory(decision.subject, reason, now)
        self._store.close_group(group.id, "dropped", reason, now)
        self._store.add_decisions(decisions, now)
        self.remove(group)
        self.dropped_since_batch[reason] += 1

    def remove(self, group: Group) -> None:
        """Remove a group that is in a batch or dropped; its successes join the experience pool."""
        self._group_table.remove(group)
        self._pool.join(group)


def _no_lag(_version: int) -> int:
    return 0


def finished_group(
    group: Group, kind: RewardKind, behind: Callable[[int], int] = _no_lag
) -> FinishedGroup:
    """Return a live group as curate.py sees it.

    `kind` is data.reward. `behind` returns how many versions a version is behind the trainer.
    """
    members = tuple(
        Member(
            trajectory_id=attempt.id,
            outcome=attempt.outcome,
            steps=attempt.steps,
            behind=max(map(behind, attempt.versions), default=0),
            entropies=tuple(attempt.entropies[step] for step in range(attempt.steps)),
            reward=attempt.reward,
        )
        for attempt in group.finished
        if attempt.outcome is not None
    )
    row = group.pool_member
    pool = None
    if row is not None:
        reward = training_reward("pass", row.reward, kind)
        pool = Member(
            trajectory_id=row.trajectory_id, outcome="pass", steps=row.steps, reward=reward
        )
    return FinishedGroup(id=group.id, members=members, pool=pool, task_id=group.task_id)
