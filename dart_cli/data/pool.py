"""The experience pool: past successes by task, one of which joins a group that failed throughout.

    ExperiencePool   the members that may be drawn, in memory
    StoredPool       the pool of a run: what joins, leaves or is drawn is also written to the store

The newest `per_task` members of each task and source stay. A draw picks a member that played the same
instance (the same seed), or any member of the task if there is none. Each draw has its own random
generator, so the same members give the same draw, in whatever order they joined.
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
"""Members of each task and source that the pool keeps: enough for variety, with a bounded size of
screenshots."""


class ExperiencePool:
    """The members of a pool that may be drawn, in memory."""

    def __init__(self, per_task: int) -> None:
        self._per_task = per_task
        self._members: dict[str, dict[PoolSource, list[PoolRow]]] = {}  # each list oldest first

    def __len__(self) -> int:
        return sum(len(rows) for by_source in self._members.values() for rows in by_source.values())

    def members(self, task_id: str) -> list[PoolRow]:
        """Return the members of one task, the oldest first."""
        return sorted(chain.from_iterable(self._members.get(task_id, {}).values()), key=_age)

    def add(self, row: PoolRow) -> list[PoolRow]:
        """Add a success that is no member yet; return the members evicted for it, which may include `row`."""
        rows = self._members.setdefault(row.task_id, {}).setdefault(row.source, [])
        insort(rows, row, key=_age)
        surplus = max(len(rows) - self._per_task, 0)
        evicted = rows[:surplus]
        del rows[:surplus]
        return evicted

    def draw(self, task_id: str, seed: str, task_seed: int | None = None) -> PoolRow | None:
        """Return one of the task's members at random, or None if it has none; `seed` decides which.

        Members that played the instance `task_seed` are preferred, since their actions solve this instance
        and not only another one.
        """
        members = sorted(self.members(task_id), key=lambda row: row.trajectory_id)
        members = [row for row in members if row.task_seed == task_seed] or members
        return random.Random(seed).choice(members) if members else None  # noqa: S311 - no secret


class StoredPool:
    """The pool of one run, in memory and in the store."""

    def __init__(
        self, config: Config, store: Store, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._seed = config.run.seed
        self._data_config = config.data
        self._store = store
        self._wall = wall
        self._run_id = store.run().id
        self._pool = ExperiencePool(PER_TASK)
        for row in store.pool():
            self._add(row)

    def __len__(self) -> int:
        return len(self._pool)

    def members(self, task_id: str) -> list[PoolRow]:
        """Return the members of one task, the oldest first."""
        return self._pool.members(task_id)

    def join(self, group: Group) -> None:
        """Add the successes of a closed group to the pool, if the run uses one."""
        if not self._data_config.pool_ratio:
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
                    has_logprobs=True,
                    origin=f"{self._run_id}/{attempt.id}",
                    added_at=self._wall(),
                    evicted_at=None,
                    used=0,
                    reward=attempt.verdict_reward,
                )
                self._store.join_pool(row)
                self._add(row)

    def draw_for(self, group: Group) -> bool:
        """Add a past success to a group that failed throughout; return False if there is none for it."""
        if may_join(len(group.finished), self._data_config.pool_ratio):
            seed = f"{self._seed}:pool:{group.number}"
            group.pool_member = self._pool.draw(group.task_id, seed, group.task_seed)
        if group.pool_member is None:
            return False
        self._store.draw_from_pool(group.id, group.pool_member.trajectory_id)
        return True

    def _add(self, row: PoolRow) -> None:
        """Add a stored member, and evict the oldest members for it."""
        for evicted in self._pool.add(row):
            self._store.evict_from_pool(evicted.trajectory_id, self._wall())


def _age(row: PoolRow) -> tuple[float, str]:
    return row.added_at, row.trajectory_id
