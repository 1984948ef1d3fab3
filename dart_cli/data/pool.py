"""The experience pool: past successes by task, one of which joins a group that failed throughout.

    add    a success joins; of its task and source the newest `per_task` stay
    draw   one of a task's members, all alike, by a generator of its own for each draw

An index in memory over the table `pool`; what `add` and `draw` say, the ledger writes down. The
same members give the same draw, whatever order they came in and whenever.
"""

from __future__ import annotations

import random
from bisect import insort
from itertools import chain

from dart_cli.data.store.rows import PoolRow, PoolSource


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
        """A success joins; returns those it drives out, maybe itself. Not for one that is there."""
        rows = self._members.setdefault(row.task_id, {}).setdefault(row.source, [])
        insort(rows, row, key=_age)
        surplus = max(len(rows) - self._per_task, 0)
        evicted = rows[:surplus]
        del rows[:surplus]
        return evicted

    def draw(self, task_id: str, seed: str) -> PoolRow | None:
        """One of the task's members at random; None if it has none. The same seed, the same one."""
        members = sorted(self.members(task_id), key=lambda row: row.trajectory_id)
        return random.Random(seed).choice(members) if members else None  # noqa: S311 - no secret


def _age(row: PoolRow) -> tuple[float, str]:
    return row.added_at, row.trajectory_id
