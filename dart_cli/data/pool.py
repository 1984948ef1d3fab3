"""The experience pool: past successes by task, one of which joins a group that failed throughout.

    ExperiencePool   the members that may be drawn, in memory: `add`, `draw`
    StoredPool       the same with its table in the store: `join`, `draw_for` a group

Of a task and source the newest `per_task` members stay. A draw takes one of a task's members of the same
instance (its seed), or if there is none one of all its members, by a generator of its own: the same
members give the same draw, in whatever order they joined and whenever.
"""

from __future__ import annotations

import random
import time
from bisect import insort
from collections.abc import Callable
from itertools import chain

from dart_cli.config.schema import Config
from dart_cli.data.curate import may_join
from dart_cli.data.groups import Group
from dart_cli.data.store.rows import PoolRow, PoolSource
from dart_cli.data.store.writer import Store

PER_TASK = 32
"""Members of a task and source that the pool keeps: enough for variety, and screenshots stay bounded."""


class ExperiencePool:
    """Members that may be drawn."""

    def __init__(self, per_task: int) -> None:
        self._per_task = per_task
        self._members: dict[str, dict[PoolSource, list[PoolRow]]] = {}  # each list oldest first

    def __len__(self) -> int:
        return sum(len(rows) for by_source in self._members.values() for rows in by_source.values())

    def members(self, task_id: str) -> list[PoolRow]:
        """Those of one task, oldest first."""
        return sorted(chain.from_iterable(self._members.get(task_id, {}).values()), key=_age)

    def add(self, row: PoolRow) -> list[PoolRow]:
        """Add a success that is no member yet; return the members evicted for it, maybe itself."""
        rows = self._members.setdefault(row.task_id, {}).setdefault(row.source, [])
        insort(rows, row, key=_age)
        surplus = max(len(rows) - self._per_task, 0)
        evicted = rows[:surplus]
        del rows[:surplus]
        return evicted

    def draw(self, task_id: str, seed: str, task_seed: int | None = None) -> PoolRow | None:
        """One of the task's members at random; None if it has none. The same `seed`, the same one.

        Of those that played the instance `task_seed`, where there are any: what they did was right
        there, and not only on another starting state.
        """
        members = sorted(self.members(task_id), key=lambda row: row.trajectory_id)
        members = [row for row in members if row.task_seed == task_seed] or members
        return random.Random(seed).choice(members) if members else None  # noqa: S311 - no secret


class StoredPool:
    """The pool of one run: what joins, leaves or is drawn is written down, too."""

    def __init__(
        self, config: Config, store: Store, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._seed = config.run.seed
        self._data = config.data
        self._store = store
        self._wall = wall
        self._run_id = store.run().id
        self._pool = ExperiencePool(PER_TASK)
        for row in store.pool():
            self._add(row)

    def __len__(self) -> int:
        return len(self._pool)

    def members(self, task_id: str) -> list[PoolRow]:
        """Those of one task, oldest first."""
        return self._pool.members(task_id)

    def join(self, group: Group) -> None:
        """Add the successes of a group that is done with to the pool, where one is used."""
        if not self._data.pool_ratio:
            return
        for attempt in group.finished:
            if attempt.outcome == "pass" and attempt.steps:
                row = PoolRow(
                    trajectory_id=attempt.id,
                    suite=group.suite,
                    task_id=group.task_id,
                    task_seed=group.task_seed,
                    source="online",
                    steps=attempt.steps,
                    known=True,
                    origin=f"{self._run_id}/{attempt.id}",
                    added_at=self._wall(),
                    evicted_at=None,
                    used=0,
                    reward=attempt.verdict_reward,
                )
                self._store.join_pool(row)
                self._add(row)

    def draw_for(self, group: Group) -> bool:
        """Add a past success to a group that failed throughout, if its task has one.

        Returns whether the group has one then.
        """
        if may_join(len(group.finished), self._data.pool_ratio):
            seed = f"{self._seed}:pool:{group.number}"
            group.pool_member = self._pool.draw(group.task_id, seed, group.task_seed)
        if group.pool_member is None:
            return False
        self._store.draw_from_pool(group.id, group.pool_member.trajectory_id)
        return True

    def _add(self, row: PoolRow) -> None:
        """Take a member that is filed, and evict the oldest for it."""
        for evicted in self._pool.add(row):
            self._store.evict_from_pool(evicted.trajectory_id, self._wall())


def _age(row: PoolRow) -> tuple[float, str]:
    return row.added_at, row.trajectory_id
