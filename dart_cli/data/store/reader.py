"""Typed queries on a run's database; a writer may be live.

Reader   returns rows of a run by id, state or order; it also has the aggregates of Analytics
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

from bus.errors import StoreError
from bus.messages import Outcome
from dart_cli.data.store.analytics import Analytics
from dart_cli.data.store.connection import marks, where_clause
from dart_cli.data.store.rows import (
    BaselineRow,
    BatchRow,
    Decision,
    GroupRow,
    GroupState,
    PlannedSample,
    PoolRow,
    ProcessRow,
    RunRow,
    SampleRow,
    SyncRow,
    TrajectoryRow,
    TrajectoryState,
    VersionRow,
)
from dart_cli.data.store.steps import (
    BATCH_COLUMNS,
    BatchStep,
    StepRow,
    batch_step_of,
    step_of,
    unpack_floats,
    unpack_ids,
)
from dart_cli.language.pointer_tokens import drop_forced

_FIRST_USE = "(SELECT COALESCE(replay_of, id) FROM batches WHERE id = ?)"
"""Id of the fresh use of a batch. A replay has no rows of groups and samples, so the rows of its first use
are read."""
_HASHES_PER_QUERY = 500  # SQLite binds at most 999 parameters in old builds


class Matching(TypedDict, total=False):
    """The values that trajectories must have; None, like an absent key, stands for any."""

    state: TrajectoryState | None
    task_id: str | None
    outcome: Outcome | None
    reason: str | None
    but_reason: str | None  # leaves out trajectories that were dropped for it
    version: int | None  # between the oldest and the newest that sampled it


class Reader(Analytics):
    """Typed queries on one run. Use it as a context manager, or call `close`."""

    def run(self) -> RunRow:
        """Return the run. Raises StoreError if `dart data` has not started it yet."""
        rows = self._rows("SELECT * FROM runs ORDER BY created_at LIMIT 1")
        if not rows:
            raise StoreError(f"{self.path}: no run was started in it; start `dart data`")
        return RunRow(**rows[0])

    def groups(self, *states: GroupState) -> list[GroupRow]:
        """Return all groups, or those in one of the states, in the order they were opened."""
        where = f"WHERE state IN ({marks(states)})" if states else ""
        rows = self._rows(f"SELECT * FROM groups {where} ORDER BY number", states)  # noqa: S608
        return [GroupRow(**row) for row in rows]

    def trajectories(
        self,
        *,
        group_ids: Sequence[str] | None = None,
        limit: int = 1_000_000,
        offset: int = 0,
        **match: Unpack[Matching],
    ) -> list[TrajectoryRow]:
        """Return the newest `limit` trajectories that match, in order of lease.

        `offset` leaves out that many of the newest.
        """
        where, values = _where(match, group_ids)
        rows = self._rows(
            f"SELECT t.* FROM trajectories t JOIN groups g ON g.id = t.group_id {where} "  # noqa: S608
            "ORDER BY t.rowid DESC LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        return [TrajectoryRow(**row) for row in reversed(rows)]

    def count_trajectories(self, **match: Unpack[Matching]) -> int:
        """Return how many trajectories match."""
        where, values = _where(match)
        [row] = self._rows(
            "SELECT COUNT(*) AS number "  # noqa: S608
            f"FROM trajectories t JOIN groups g ON g.id = t.group_id {where}",
            values,
        )
        return int(row["number"])

    def newest_groups(
        self,
        *,
        state: GroupState | None = None,
        task_id: str | None = None,
        limit: int,
        offset: int = 0,
    ) -> list[GroupRow]:
        """Return at most `limit` groups that match, the newest first, without the `offset` newest."""
        where, values = where_clause({"state": state, "task_id": task_id})
        rows = self._rows(
            f"SELECT * FROM groups {where} ORDER BY number DESC LIMIT ? OFFSET ?",  # noqa: S608
            [*values, limit, offset],
        )
        return [GroupRow(**row) for row in rows]

    def count_groups(self, *, state: GroupState | None = None, task_id: str | None = None) -> int:
        """Return how many groups match."""
        where, values = where_clause({"state": state, "task_id": task_id})
        [row] = self._rows(f"SELECT COUNT(*) AS number FROM groups {where}", values)  # noqa: S608
        return int(row["number"])

    def processes(self) -> list[ProcessRow]:
        """Return each worker's newest heartbeat, which `dart data` saves every few seconds."""
        rows = self._rows("SELECT * FROM processes ORDER BY role, worker")
        return [ProcessRow(**row) for row in rows]

    def trajectory(self, trajectory_id: str) -> TrajectoryRow | None:
        """Return one trajectory, or None if there is none of that id."""
        rows = self._rows("SELECT * FROM trajectories WHERE id = ?", (trajectory_id,))
        return TrajectoryRow(**rows[0]) if rows else None

    def groups_by_id(self, ids: Iterable[str]) -> dict[str, GroupRow]:
        """Return id -> group, for the ids that exist."""
        rows = self._rows(
            "SELECT * FROM groups WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(set(ids))),),
        )
        return {row["id"]: GroupRow(**row) for row in rows}

    def instructions(self) -> dict[tuple[str, str], str]:
        """Return (suite, task id) -> the task's instruction, with its {fields} not filled in."""
        rows = self._rows("SELECT suite, task_id, instruction FROM tasks")
        return {(row["suite"], row["task_id"]): row["instruction"] for row in rows}

    def instruction(self, suite: str, task_id: str, trajectory_ids: Iterable[str]) -> str:
        """Return the instruction that the policy read in the first of these trajectories that has one.

        The trajectories are of one group. If none has a step yet, the task's instruction is returned, with
        its {fields} not filled in; if the task is unknown, an empty text.
        """
        rows = self._rows(
            "SELECT instruction FROM (SELECT s.instruction FROM json_each(?) AS ids "
            "JOIN steps s ON s.trajectory_id = ids.value AND s.step = 0 "
            "WHERE s.instruction != '' LIMIT 1) UNION ALL "
            "SELECT instruction FROM tasks WHERE suite = ? AND task_id = ?",
            (json.dumps(list(trajectory_ids)), suite, task_id),
        )
        return str(rows[0]["instruction"]) if rows else ""

    def steps(self, trajectory_id: str) -> list[StepRow]:
        """Return the steps of one trajectory, in order."""
        rows = self._rows(
            "SELECT * FROM steps WHERE trajectory_id = ? ORDER BY step", (trajectory_id,)
        )
        return [step_of(row) for row in rows]

    def screenshots(self, hashes: Iterable[str]) -> dict[str, bytes]:
        """Return content hash -> encoded image; hashes that are not stored are left out."""
        keys = list(dict.fromkeys(hashes))
        images: dict[str, bytes] = {}
        for start in range(0, len(keys), _HASHES_PER_QUERY):
            part = keys[start : start + _HASHES_PER_QUERY]
            rows = self._rows(
                f"SELECT hash, bytes FROM screenshots WHERE hash IN ({marks(part)})",  # noqa: S608
                part,
            )
            images.update((row["hash"], row["bytes"]) for row in rows)
        return images

    def batches(self, after: int = 0) -> list[BatchRow]:
        """Return the batches with an id above `after`, in order."""
        rows = self._rows("SELECT * FROM batches WHERE id > ? ORDER BY id", (after,))
        return [BatchRow(**row) for row in rows]

    def batch(self, batch_id: int) -> BatchRow:
        """Return one batch. Raises StoreError if there is none of that id."""
        rows = self._rows("SELECT * FROM batches WHERE id = ?", (batch_id,))
        if not rows:
            raise StoreError(f"{self.path}: no batch {batch_id}")
        return BatchRow(**rows[0])

    def replays(self, batch_id: int) -> list[BatchRow]:
        """Return the replays of a fresh batch, in order."""
        rows = self._rows("SELECT * FROM batches WHERE replay_of = ? ORDER BY id", (batch_id,))
        return [BatchRow(**row) for row in rows]

    def refused_replays(self, after_batch: int = 0) -> dict[int, str]:
        """Return id of a batch above `after_batch` -> why it is not trained on again, for refused batches."""
        rows = self._rows(
            "SELECT CAST(SUBSTR(subject, 7) AS INTEGER) AS batch, reason FROM decisions "
            "WHERE subject >= 'batch ' AND subject < 'batch!' AND NOT used AND batch > ? ORDER BY id",
            (after_batch,),
        )
        return {row["batch"]: row["reason"] for row in rows}

    def versions_of_batch(self, batch_id: int) -> list[int]:
        """Return the oldest and the newest version that sampled a token of a fresh batch; [] if unknown."""
        rows = self._rows(
            "SELECT MIN(oldest_version) AS oldest, MAX(newest_version) AS newest "
            "FROM trajectories WHERE batch_id = ?",
            (batch_id,),
        )
        return [version for version in rows[0].values() if version is not None]

    def batch_groups(self, batch_id: int) -> list[str]:
        """Return the ids of the groups in a batch, or in the first use of a replay."""
        rows = self._rows(
            f"SELECT id FROM groups WHERE batch_id = {_FIRST_USE} ORDER BY number",  # noqa: S608
            (batch_id,),
        )
        return [row["id"] for row in rows]

    def planned_samples(self, batch_id: int, *, again: bool = False) -> list[PlannedSample]:
        """Return the steps of a batch that are trained on, in order, without their tokens.

        With `again` they have the advantages by the trainer's critic, if there was one.
        """
        advantage = "COALESCE(valued, advantage) AS advantage" if again else "advantage"
        rows = self._rows(
            f"SELECT group_id, trajectory_id, step, {advantage}, weight, reason, entropy, "  # noqa: S608
            "baseline, reward FROM batch_samples "
            f"WHERE batch_id = {_FIRST_USE} AND weight <> 0 ORDER BY position",
            (batch_id,),
        )
        return [PlannedSample(**row) for row in rows]

    def batch_steps(self, batch_id: int) -> list[BatchStep]:
        """Return the steps of a batch that are trained on, exactly as they were first served."""
        return list(self.planned_steps(self.planned_samples(batch_id)))

    def planned_steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]:
        """Yield the planned steps with their tokens, in the same order; each is read when it is needed."""
        columns = ", ".join(f"s.{name}" for name in BATCH_COLUMNS)
        rows = self._stream(
            f"SELECT {columns} FROM json_each(?) AS keys "  # noqa: S608
            "JOIN steps s ON s.trajectory_id = json_extract(keys.value, '$[0]') "
            "AND s.step = json_extract(keys.value, '$[1]') ORDER BY keys.key",
            (json.dumps([(sample.trajectory_id, sample.step) for sample in planned]),),
        )
        for sample, row in zip(planned, rows, strict=True):
            yield batch_step_of(sample, row, self.screenshots)

    def batch_rows(self, batch_id: int) -> list[SampleRow]:
        """Return every step of the trajectories of a batch, trained on or left out, with the reason.

        For a replay they are the rows of its first use, with that batch's id.
        """
        rows = self._rows(
            f"SELECT * FROM batch_samples WHERE batch_id = {_FIRST_USE} ORDER BY position",  # noqa: S608
            (batch_id,),
        )
        return [SampleRow(**row) for row in rows]

    def sample_rows(self, trajectory_id: str) -> list[SampleRow]:
        """Return the steps of a trajectory in each fresh batch that had it, the oldest batch first."""
        rows = self._rows(
            "SELECT * FROM batch_samples WHERE trajectory_id = ? ORDER BY batch_id, position",
            (trajectory_id,),
        )
        return [SampleRow(**row) for row in rows]

    def pool(self, task_id: str | None = None, evicted: bool = False) -> list[PoolRow]:
        """Return the members of the experience pool, the oldest first; with `evicted` former ones, too."""
        clauses = ["1"] if evicted else ["evicted_at IS NULL"]
        if task_id is not None:
            clauses.append("task_id = ?")
        rows = self._rows(
            f"SELECT * FROM pool WHERE {' AND '.join(clauses)} ORDER BY added_at, trajectory_id",  # noqa: S608
            () if task_id is None else (task_id,),
        )
        return [_pool_row(row) for row in rows]

    def pool_member(self, trajectory_id: str) -> PoolRow | None:
        """Return a present or evicted member of the pool; None if there is none of that id."""
        rows = self._rows("SELECT * FROM pool WHERE trajectory_id = ?", (trajectory_id,))
        return _pool_row(rows[0]) if rows else None

    def entropies(self, trajectory_id: str) -> dict[int, list[float]]:
        """Return step -> the entropies of its tokens that were drawn, in nats; empty if they are unknown."""
        rows = self._rows(
            "SELECT step, entropies, patches FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        return {
            row["step"]: drop_forced(values, unpack_ids(row["patches"])) if values else []
            for row in rows
            for values in (unpack_floats(row["entropies"]),)
        }

    def decisions(self, subject: str | None = None) -> list[Decision]:
        """Return the decisions on one subject, or all of them, the oldest first."""
        where, values = ("WHERE subject = ?", (subject,)) if subject else ("", ())
        rows = self._rows(
            f"SELECT subject, used, reason, weight, batch_id FROM decisions {where} ORDER BY id",  # noqa: S608
            values,
        )
        return [Decision(**{**row, "used": bool(row["used"])}) for row in rows]

    def skipped_batches(self) -> set[int]:
        """Return the ids of the batches that changed no weights when it was their turn to be trained on."""
        rows = self._rows(
            "SELECT b.id FROM batches b JOIN metrics m ON m.step = b.id WHERE b.state = 'trained' "
            "AND m.name IN ('skipped', 'replay_skipped') AND m.value <> 0"
        )
        return {row["id"] for row in rows}

    def newest_group(self) -> int:
        """Return the number of the group opened last; 0 before the first."""
        return int(self._rows("SELECT COALESCE(MAX(number), 0) AS newest FROM groups")[0]["newest"])

    def newest_version(self) -> VersionRow | None:
        """Return the weight set published last, or None."""
        rows = self._rows("SELECT * FROM versions ORDER BY published_at DESC LIMIT 1")
        return VersionRow(**rows[0]) if rows else None

    def versions(self) -> list[VersionRow]:
        """Return every published weight set, in order of number."""
        rows = self._rows("SELECT * FROM versions ORDER BY policy_version")
        return [VersionRow(**row) for row in rows]

    def version(self, policy_version: int) -> VersionRow | None:
        """Return one published weight set, or None if there is none of that version."""
        rows = self._rows("SELECT * FROM versions WHERE policy_version = ?", (policy_version,))
        return VersionRow(**rows[0]) if rows else None

    def syncs(self, worker: str | None = None) -> list[SyncRow]:
        """Return the weight syncs of one rollout worker, or of all, the oldest first."""
        where, values = ("WHERE worker = ?", (worker,)) if worker else ("", ())
        rows = self._rows(f"SELECT * FROM syncs {where} ORDER BY done_at, id", values)  # noqa: S608
        return [SyncRow(**row) for row in rows]

    def baselines(self) -> list[BaselineRow]:
        """Return the expected rewards of tasks by step, as they were saved last."""
        rows = self._rows("SELECT * FROM baselines ORDER BY task_id, step")
        return [BaselineRow(**row) for row in rows]

    def first_group(self, after_batch: int, fresh_batch: int | None = None) -> int | None:
        """Return the number of the oldest group in the batches above `after_batch`; None if there is none.

        A replay has the groups of its first use. The groups of `fresh_batch`, and of later fresh batches,
        count, too.
        """
        rows = self._rows(
            "SELECT MIN(number) AS first FROM groups WHERE batch_id >= (SELECT MIN(batch) FROM ("
            "SELECT COALESCE(replay_of, id) AS batch FROM batches WHERE id > ? UNION ALL SELECT ?))",
            (after_batch, fresh_batch),
        )
        return rows[0]["first"]  # type: ignore[no-any-return]

    def unservable_batch(self, after: int) -> int | None:
        """Return the first batch with an id above `after` that lacks a screenshot; None if none does."""
        rows = self._rows(
            "SELECT MIN(own.id) AS first FROM batches own JOIN batch_samples b "
            "ON b.batch_id = COALESCE(own.replay_of, own.id) JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step WHERE own.id > ? "
            "AND NOT EXISTS (SELECT 1 FROM screenshots WHERE hash = s.screenshot)",
            (after,),
        )
        return rows[0]["first"]  # type: ignore[no-any-return]

    def has_screenshots(self, batch_id: int) -> bool:
        """Return True if a fresh batch has all of its screenshots."""
        rows = self._rows(
            "SELECT 1 FROM batch_samples b JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step WHERE b.batch_id = ? "
            "AND NOT EXISTS (SELECT 1 FROM screenshots WHERE hash = s.screenshot) LIMIT 1",
            (batch_id,),
        )
        return not rows


def _pool_row(row: dict[str, Any]) -> PoolRow:
    return PoolRow(**{**row, "has_logprobs": bool(row["has_logprobs"])})


def _where(match: Matching, group_ids: Sequence[str] | None = None) -> tuple[str, list[object]]:
    """Return the WHERE clause for trajectories that match, and its parameters."""
    equal = {
        "t.state": match.get("state"),
        "g.task_id": match.get("task_id"),
        "t.outcome": match.get("outcome"),
        "t.reason": match.get("reason"),
    }
    return where_clause(
        equal,
        version=match.get("version"),
        group_ids=group_ids,
        but_reason=match.get("but_reason"),
    )
