"""The run's database: the only code that knows SQLite.

    Reader   typed queries on a run, beside a live writer or long after   open_reader(run_dir)
    Store    a Reader that also writes; one per run directory             open_store(run_dir)

The database is `run.db` in write-ahead mode. A Store collects writes in one open transaction until
`commit`, so that many hand-ins share it; with synchronous=NORMAL a commit survives the death of
any process (kill -9), and a loss of power costs at most the commits since the last checkpoint,
never the file. `data.lock` is held while a Store is open and names its process.

Every failure of SQLite is a StoreError that names the file and the cure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Self

from pydantic_core import from_json, to_json
from sqlite_utils import Database

from bus.endpoints import make_private_dir
from bus.errors import DartError, ProtocolError, RunDirectoryError, StoreError, UserError
from bus.messages import (
    BatchTrained,
    Heartbeat,
    Outcome,
    Sample,
    SampledTokens,
    StepRecord,
    SyncDone,
    TrajectoryEnd,
    VersionSpan,
    WeightsPublished,
)
from dart_cli.data.store.encoding import (
    in_range,
    pack_floats,
    pack_ids,
    pack_prompt,
    pack_spans,
    span_versions,
    unpack_floats,
    unpack_ids,
    unpack_prompt,
    unpack_spans,
)
from dart_cli.data.store.migrations import APPLICATION_ID, MIGRATIONS, unknown_steps
from dart_cli.data.store.rows import (
    BatchRow,
    CountersRow,
    CurvePoint,
    Decision,
    EpisodeTimes,
    GroupRow,
    GroupState,
    MetricPoint,
    OutcomeRow,
    PlannedSample,
    PoolRow,
    ProcessRow,
    RunRow,
    SampleRow,
    SizesRow,
    StepRow,
    StepTimes,
    SyncRow,
    TaskRow,
    TrajectoryRow,
    TrajectoryState,
    UsageRow,
    VersionRow,
)
from envs.base import Task, content_hash

__all__ = [
    "BatchRow",
    "CountersRow",
    "CurvePoint",
    "EpisodeTimes",
    "GroupRow",
    "MetricPoint",
    "OutcomeRow",
    "PoolRow",
    "ProcessRow",
    "Reader",
    "RunRow",
    "SampleRow",
    "SizesRow",
    "StepRow",
    "StepTimes",
    "Store",
    "SyncRow",
    "TaskRow",
    "TrajectoryRow",
    "UsageRow",
    "VersionRow",
    "open_reader",
    "open_store",
]

DATABASE = "run.db"
LOCK = "data.lock"

BUSY_TIMEOUT_S = 10.0
"""How long one connection waits for another's lock before it is a StoreError."""

CACHE_MIB = 32
_MAX_NUMBERS = 4096
_ALWAYS = 2**62
"""In place of the newest group that shows a screenshot: members of the pool do."""
_HASHES_PER_QUERY = 500  # SQLite binds at most 999 parameters in old builds

# --- opening --------------------------------------------------------------------------------


def open_store(run_dir: Path) -> Store:
    """Open the run's database for writing; create or migrate it first.

    Raises RunDirectoryError if another process writes to it or a newer dart made it, StoreError
    if it is damaged or cannot be written.
    """
    make_private_dir(run_dir)
    lock = _take_lock(run_dir)
    try:
        return Store(run_dir / DATABASE, lock)
    except BaseException:
        os.close(lock)
        raise


def open_reader(run_dir: Path) -> Reader:
    """Open the run's database for reading; a live `dart data` is not disturbed.

    Raises RunDirectoryError if there is no run or its schema is not this dart's, StoreError if it
    is damaged.
    """
    path = run_dir / DATABASE
    if not path.is_file():
        raise RunDirectoryError(f"no run in {run_dir}: {DATABASE} is missing; start `dart data`")
    return Reader(path)


def _take_lock(run_dir: Path) -> int:
    """File descriptor that holds the run directory for this process, until it is closed."""
    path = run_dir / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise RunDirectoryError(
            f"{run_dir} is in use by another `dart data`, process {holder}; "
            "stop it, or choose another run.dir"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
    return handle


def _explain(path: Path, error: Exception) -> StoreError:
    """The StoreError for a failure of SQLite: file, fault and cure in one line."""
    text = str(error).lower()
    if "disk is full" in text or "disk i/o" in text:
        cure = "free space on its disk and start again; nothing acknowledged is lost"
    elif "readonly" in text or "unable to open" in text:
        cure = "make the file and its directory writable for this user"
    elif "malformed" in text or "not a database" in text or "corrupt" in text:
        cure = (
            "the file is damaged: put a copy back, or save what is readable with "
            f"`sqlite3 {path} .recover | sqlite3 new.db`"
        )
    elif "locked" in text:
        cure = "another program holds it open for writing; close that program"
    elif "no such table" in text or "no such column" in text:
        cure = "its tables are not dart's; choose another run.dir"
    else:
        cure = "see the log of `dart data`"
    return StoreError(f"{path}: {error}; {cure}")


# --- reading --------------------------------------------------------------------------------


class Reader:
    """Typed queries on one run. Use as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = self._connect("ro")
        try:
            self._check_schema()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the file."""
        self._connection.close()

    def run(self) -> RunRow:
        """The run. Raises StoreError before `dart data` has started it."""
        rows = self._rows("SELECT * FROM runs ORDER BY created_at LIMIT 1")
        if not rows:
            raise StoreError(f"{self.path}: no run was started in it; start `dart data`")
        return RunRow(**rows[0])

    def groups(self, *states: GroupState) -> list[GroupRow]:
        """Groups in the order they were opened; all, or those in one of the states."""
        where = f"WHERE state IN ({_marks(states)})" if states else ""
        rows = self._rows(f"SELECT * FROM groups {where} ORDER BY number", states)  # noqa: S608
        return [GroupRow(**row) for row in rows]

    def trajectories(
        self,
        *,
        group_ids: Sequence[str] | None = None,
        state: TrajectoryState | None = None,
        task_id: str | None = None,
        outcome: Outcome | None = None,
        reason: str | None = None,
        version: int | None = None,
        limit: int = 1_000_000,
        offset: int = 0,
    ) -> list[TrajectoryRow]:
        """Trajectories that match, in order of lease; of very many the newest `limit`.

        `version` is one of the weights that sampled it. `offset` leaves out that many of the newest.
        """
        where, values = _where(
            {"t.state": state, "g.task_id": task_id, "t.outcome": outcome, "t.reason": reason},
            version=version,
            group_ids=group_ids,
        )
        rows = self._rows(
            f"SELECT t.* FROM trajectories t JOIN groups g ON g.id = t.group_id {where} "  # noqa: S608
            "ORDER BY t.rowid DESC LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        return [TrajectoryRow(**row) for row in reversed(rows)]

    def count_trajectories(
        self,
        *,
        state: TrajectoryState | None = None,
        task_id: str | None = None,
        outcome: Outcome | None = None,
        reason: str | None = None,
        version: int | None = None,
    ) -> int:
        """How many trajectories match; see `trajectories`."""
        where, values = _where(
            {"t.state": state, "g.task_id": task_id, "t.outcome": outcome, "t.reason": reason},
            version=version,
        )
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
        """Groups that match, the newest first, without the `offset` newest."""
        where, values = _where({"state": state, "task_id": task_id})
        rows = self._rows(
            f"SELECT * FROM groups {where} ORDER BY number DESC LIMIT ? OFFSET ?",  # noqa: S608
            [*values, limit, offset],
        )
        return [GroupRow(**row) for row in rows]

    def count_groups(self, *, state: GroupState | None = None, task_id: str | None = None) -> int:
        """How many groups match."""
        where, values = _where({"state": state, "task_id": task_id})
        [row] = self._rows(f"SELECT COUNT(*) AS number FROM groups {where}", values)  # noqa: S608
        return int(row["number"])

    def processes(self) -> list[ProcessRow]:
        """What each worker said last, as `dart data` noted it every few seconds."""
        rows = self._rows(
            "SELECT worker, role, host, started_at, heard_at, policy_version, state, waiting_for, "
            "waiting_s FROM processes ORDER BY role, worker"
        )
        return [ProcessRow(**row) for row in rows]

    def trajectory(self, trajectory_id: str) -> TrajectoryRow | None:
        """One trajectory, or None."""
        rows = self._rows("SELECT * FROM trajectories WHERE id = ?", (trajectory_id,))
        return TrajectoryRow(**rows[0]) if rows else None

    def groups_by_id(self, ids: Iterable[str]) -> dict[str, GroupRow]:
        """Those of the groups that exist, by id."""
        rows = self._rows(
            "SELECT * FROM groups WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(set(ids))),),
        )
        return {row["id"]: GroupRow(**row) for row in rows}

    def instructions(self) -> dict[tuple[str, str], str]:
        """What each task tells the policy, by (suite, task); {fields} as the suite wrote them."""
        rows = self._rows("SELECT suite, task_id, instruction FROM tasks")
        return {(row["suite"], row["task_id"]): row["instruction"] for row in rows}

    def instruction(self, suite: str, task_id: str, trajectory_ids: Iterable[str]) -> str:
        """What the policy was told in the first of these trajectories that knows.

        They are of one group, or one alone. Where none knows, having no step yet or being of an older
        dart, it is the task's, {fields} as the suite wrote them; empty where that is unknown, too.
        """
        rows = self._rows(
            "SELECT instruction FROM (SELECT s.instruction FROM json_each(?) AS wanted "
            "JOIN steps s ON s.trajectory_id = wanted.value AND s.step = 0 "
            "WHERE s.instruction != '' LIMIT 1) UNION ALL "
            "SELECT instruction FROM tasks WHERE suite = ? AND task_id = ?",
            (json.dumps(list(trajectory_ids)), suite, task_id),
        )
        return str(rows[0]["instruction"]) if rows else ""

    def tallies(self) -> list[CountersRow]:
        """How many trajectories of each task are in which state, why, and how they were judged."""
        rows = self._rows(
            "SELECT g.task_id, t.state, t.reason, t.outcome, COUNT(*) AS trajectories, "
            "COALESCE(SUM(t.steps), 0) AS steps "
            "FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
        )
        return [CountersRow(**row) for row in rows]

    def sizes(self) -> SizesRow:
        """How much the run holds; the blobs and images themselves are not read."""
        steps = self._rows(
            "SELECT COUNT(*) AS steps, COALESCE(SUM(LENGTH(token_ids)), 0) / 4 AS tokens, "
            "COALESCE(SUM(LENGTH(prompt_token_ids) + LENGTH(token_ids) + "
            "LENGTH(behaviour_logprobs) + LENGTH(entropies) + LENGTH(text)), 0) AS step_bytes "
            "FROM steps"
        )[0]
        images = self._rows(
            "SELECT COUNT(*) AS screenshots, COALESCE(SUM(LENGTH(bytes)), 0) AS screenshot_bytes "
            "FROM screenshots"
        )[0]
        return SizesRow(**steps, **images, disk_bytes=self.bytes_on_disk())

    def steps(self, trajectory_id: str) -> list[StepRow]:
        """The steps of one trajectory, in order."""
        rows = self._rows(
            "SELECT * FROM steps WHERE trajectory_id = ? ORDER BY step", (trajectory_id,)
        )
        return [_step_row(row) for row in rows]

    def screenshots(self, hashes: Iterable[str]) -> dict[str, bytes]:
        """Encoded images by content hash; unknown hashes are absent."""
        wanted = list(dict.fromkeys(hashes))
        found: dict[str, bytes] = {}
        for start in range(0, len(wanted), _HASHES_PER_QUERY):
            part = wanted[start : start + _HASHES_PER_QUERY]
            rows = self._rows(
                f"SELECT hash, bytes FROM screenshots WHERE hash IN ({_marks(part)})",  # noqa: S608
                part,
            )
            found.update((row["hash"], row["bytes"]) for row in rows)
        return found

    def batches(self, after: int = 0) -> list[BatchRow]:
        """Batches with an id above `after`, in order."""
        rows = self._rows("SELECT * FROM batches WHERE id > ? ORDER BY id", (after,))
        return [BatchRow(**row) for row in rows]

    def batch(self, batch_id: int) -> BatchRow:
        """One batch. Raises StoreError if there is none of that id."""
        rows = self._rows("SELECT * FROM batches WHERE id = ?", (batch_id,))
        if not rows:
            raise StoreError(f"{self.path}: no batch {batch_id}")
        return BatchRow(**rows[0])

    def batch_groups(self, batch_id: int) -> list[str]:
        """Ids of the groups in one batch."""
        rows = self._rows("SELECT id FROM groups WHERE batch_id = ? ORDER BY number", (batch_id,))
        return [row["id"] for row in rows]

    def batch_samples(self, batch_id: int) -> list[Sample]:
        """The samples of one batch that are trained on, exactly as they were first served."""
        rows = self._rows(
            "SELECT b.trajectory_id, b.step, b.advantage, b.weight, b.reason, s.image_hashes, "
            "s.prompt_token_ids, s.token_ids, s.behaviour_logprobs, s.version_spans "
            "FROM batch_samples b JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step "
            "WHERE b.batch_id = ? AND b.weight <> 0 ORDER BY b.position",
            (batch_id,),
        )
        # Each value was validated when it came in: building 500 samples again need not repeat it.
        return [
            Sample.model_construct(
                trajectory_id=row["trajectory_id"],
                step=row["step"],
                prompt_token_ids=unpack_prompt(row["prompt_token_ids"]),
                sampled=SampledTokens.model_construct(
                    token_ids=unpack_ids(row["token_ids"]),
                    behaviour_logprobs=unpack_floats(row["behaviour_logprobs"]),
                    entropies=[],
                    version_spans=[]  # as old as it is: no version of now to be behind
                    if row["reason"] == "pool"
                    else unpack_spans(row["version_spans"]),
                ),
                image_hashes=json.loads(row["image_hashes"]),
                advantage=row["advantage"],
                weight=row["weight"],
            )
            for row in rows
        ]

    def batch_rows(self, batch_id: int) -> list[SampleRow]:
        """Every step of the trajectories of one batch: trained on or left out, and why."""
        rows = self._rows(
            "SELECT * FROM batch_samples WHERE batch_id = ? ORDER BY position", (batch_id,)
        )
        return [SampleRow(**row) for row in rows]

    def sample_rows(self, trajectory_id: str) -> list[SampleRow]:
        """The steps of one trajectory in each batch it was part of, the oldest batch first."""
        rows = self._rows(
            "SELECT * FROM batch_samples WHERE trajectory_id = ? ORDER BY batch_id, position",
            (trajectory_id,),
        )
        return [SampleRow(**row) for row in rows]

    def share_left_out(self, batch_id: int) -> float:
        """Share of the batch's steps that have weight 0."""
        rows = self._rows(
            "SELECT AVG(weight = 0) AS share FROM batch_samples WHERE batch_id = ?", (batch_id,)
        )
        return rows[0]["share"] or 0.0

    def share_of_pool(self, batch_id: int) -> float:
        """Share of the tokens a batch trains on that are of members of the pool."""
        rows = self._rows(
            "SELECT SUM((b.reason = 'pool') * LENGTH(s.token_ids)) * 1.0 / SUM(LENGTH(s.token_ids)) "
            "AS share FROM batch_samples b JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step "
            "WHERE b.batch_id = ? AND b.weight <> 0",
            (batch_id,),
        )
        return rows[0]["share"] or 0.0

    def pool(self, task_id: str | None = None, evicted: bool = False) -> list[PoolRow]:
        """Members of the experience pool, oldest first; with `evicted` those it no longer has, too."""
        clauses = ["1"] if evicted else ["evicted_at IS NULL"]
        if task_id is not None:
            clauses.append("task_id = ?")
        rows = self._rows(
            f"SELECT * FROM pool WHERE {' AND '.join(clauses)} ORDER BY added_at, trajectory_id",  # noqa: S608
            () if task_id is None else (task_id,),
        )
        return [_pool_row(row) for row in rows]

    def pool_member(self, trajectory_id: str) -> PoolRow | None:
        """One member of the pool, or one it had; else None."""
        rows = self._rows("SELECT * FROM pool WHERE trajectory_id = ?", (trajectory_id,))
        return _pool_row(rows[0]) if rows else None

    def longest_successes(self) -> dict[str, int]:
        """Task id -> steps of its longest success, in the run or ever in the pool."""
        rows = self._rows(
            "SELECT task_id, MAX(steps) AS steps FROM ("
            "SELECT g.task_id, t.steps FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "WHERE t.outcome = 'pass' UNION ALL SELECT task_id, steps FROM pool) GROUP BY task_id"
        )
        return {row["task_id"]: row["steps"] for row in rows}

    def entropies(self, trajectory_id: str) -> dict[int, list[float]]:
        """Step -> its tokens' entropies, nats; empty where they are not known."""
        rows = self._rows(
            "SELECT step, entropies FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        return {row["step"]: unpack_floats(row["entropies"]) for row in rows}

    def decisions(self, subject: str | None = None) -> list[Decision]:
        """What was decided, oldest first: of one group or trajectory, or of all."""
        where, values = ("WHERE subject = ?", (subject,)) if subject else ("", ())
        rows = self._rows(
            f"SELECT subject, used, reason, weight, batch_id FROM decisions {where} ORDER BY id",  # noqa: S608
            values,
        )
        return [Decision(**{**row, "used": bool(row["used"])}) for row in rows]

    def newest_group(self) -> int:
        """Number of the group opened last; 0 before the first."""
        return int(self._rows("SELECT COALESCE(MAX(number), 0) AS newest FROM groups")[0]["newest"])

    def task_progress(self) -> list[TaskRow]:
        """How each task fares that has had an outcome; nothing in a run of an older dart."""
        return [TaskRow(**row) for row in self._rows("SELECT * FROM task_progress")]

    def outcomes(self) -> Iterator[OutcomeRow]:
        """Every judged trajectory in the order they ended; read as they are asked for."""
        rows = self._each(
            "SELECT g.suite, g.task_id, t.outcome, t.oldest_version, t.ended_at "
            "FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "WHERE t.outcome IS NOT NULL ORDER BY t.ended_at, t.id"
        )
        return (OutcomeRow(*row) for row in rows)

    def success_curve(self, *, bucket: int = 1) -> list[CurvePoint]:
        """Each task's success over policy versions in buckets of `bucket`, oldest first.

        A trajectory counts where its oldest token was sampled; invalid ones count nowhere.
        """
        rows = self._rows(
            "SELECT g.task_id, (t.oldest_version / ?) * ? AS policy_version, "
            "COUNT(*) AS trajectories, SUM(t.outcome = 'pass') AS passed, "
            "MAX(t.ended_at) AS ended_at "
            "FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "WHERE t.outcome IN ('pass', 'fail') AND t.oldest_version >= 0 "
            "GROUP BY 1, 2 ORDER BY 1, 2",
            (bucket, bucket),
        )
        return [CurvePoint(**row) for row in rows]

    def metrics(self, name: str | None = None, after: int = 0) -> list[MetricPoint]:
        """Train metrics of batches with an id above `after`, by name and batch."""
        clause = "AND name = ?" if name else ""
        rows = self._rows(
            f"SELECT name, step, at, value FROM metrics WHERE step > ? {clause} ORDER BY name, step",  # noqa: S608
            (after, name) if name else (after,),
        )
        return [MetricPoint(**row) for row in rows]

    def metric_curves(self, most: int) -> list[MetricPoint]:
        """Train metrics over the whole run: of each at most `most` points, means over its batches."""
        rows = self._rows(
            "WITH buckets AS (SELECT (MAX(step) - 1) / ? + 1 AS size FROM metrics) "
            "SELECT name, MAX(step) AS step, MAX(at) AS at, AVG(value) AS value "
            "FROM metrics, buckets GROUP BY name, (step - 1) / size ORDER BY name, 2",
            (most,),
        )
        return [MetricPoint(**row) for row in rows]

    def staleness(self, after: int = 0) -> dict[int, int]:
        """Trained tokens by how many versions behind the trainer they were sampled."""
        rows = self._rows(
            "SELECT versions_behind, SUM(tokens) AS tokens FROM staleness "
            "WHERE batch_id > ? GROUP BY 1 ORDER BY 1",
            (after,),
        )
        return {row["versions_behind"]: row["tokens"] for row in rows}

    def newest_version(self) -> VersionRow | None:
        """The weight set published last, or None."""
        rows = self._rows("SELECT * FROM versions ORDER BY published_at DESC LIMIT 1")
        return VersionRow(**rows[0]) if rows else None

    def episode_times(self, after: float = 0.0) -> list[EpisodeTimes]:
        """When each trajectory leased after that moment was played, in order of lease."""
        rows = self._each(
            "SELECT id, worker, slot, state, reason, outcome, steps, leased_at, ended_at, reset_s, "
            "wall_s FROM trajectories WHERE leased_at > ? ORDER BY rowid",
            (after,),
        )
        return [EpisodeTimes(*row) for row in rows]

    def step_times(self, after: float = 0.0) -> list[StepTimes]:
        """When each step filed after that moment was played, in order of filing."""
        rows = self._each(
            "SELECT trajectory_id, step, worker, at, model_s, env_s FROM steps WHERE at > ? "
            "ORDER BY rowid",
            (after,),
        )
        return [StepTimes(*row) for row in rows]

    def syncs(self, worker: str | None = None) -> list[SyncRow]:
        """How rollout workers took new weights, oldest first: one worker, or all."""
        where, values = ("WHERE worker = ?", (worker,)) if worker else ("", ())
        rows = self._rows(f"SELECT * FROM syncs {where} ORDER BY done_at, id", values)  # noqa: S608
        return [SyncRow(**row) for row in rows]

    def newest_syncs(self) -> list[tuple[SyncRow, int, int]]:
        """Each rollout worker's newest sync, how many it had, and how many it refused."""
        rows = self._rows(
            # The columns beside a single MAX are those of its row.
            "SELECT *, MAX(done_at) AS newest, COUNT(*) AS syncs, SUM(error <> '') AS refused "
            "FROM syncs GROUP BY worker ORDER BY worker"
        )
        found = []
        for row in rows:
            del row["newest"]
            syncs, refused = row.pop("syncs"), row.pop("refused")
            found.append((SyncRow(**row), syncs, refused))
        return found

    def usage(self) -> list[UsageRow]:
        """Where the processes' time went, by worker and phase."""
        return [UsageRow(**row) for row in self._rows("SELECT * FROM usage ORDER BY worker, phase")]

    def count(self, table: Literal["groups", "trajectories"]) -> dict[tuple[str, str], int]:
        """Rows by (state, reason)."""
        rows = self._rows(
            f"SELECT state, reason, COUNT(*) AS number FROM {table} GROUP BY state, reason"  # noqa: S608
        )
        return {(row["state"], row["reason"]): row["number"] for row in rows}

    def total(self, table: Literal["steps", "screenshots", "batches"]) -> int:
        """Number of rows of a table."""
        return int(self._rows(f"SELECT COUNT(*) AS number FROM {table}")[0]["number"])  # noqa: S608

    def first_group(self, after_batch: int) -> int | None:
        """Number of the oldest group in a batch with an id above `after_batch`; None without one."""
        rows = self._rows(
            "SELECT MIN(number) AS first FROM groups WHERE batch_id > ?", (after_batch,)
        )
        return rows[0]["first"]  # type: ignore[no-any-return]

    def unservable_batch(self, after: int) -> int | None:
        """The first batch with an id above `after` that lacks a screenshot; None if none does."""
        rows = self._rows(
            "SELECT MIN(b.batch_id) AS first FROM batch_samples b JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step WHERE b.batch_id > ? "
            "AND NOT EXISTS (SELECT 1 FROM screenshots WHERE hash = s.screenshot)",
            (after,),
        )
        return rows[0]["first"]  # type: ignore[no-any-return]

    def bytes_in_use(self) -> int:
        """Size of the database without its log and without the pages that are free again."""
        pages, free, size = (
            self._rows(f"PRAGMA {name}")[0][name]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def bytes_on_disk(self) -> int:
        """Size of the database with its write-ahead log."""
        names = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(name.stat().st_size for name in names if name.exists())

    def _connect(self, mode: Literal["ro", "rwc"], *, threads: bool = False) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,  # transactions are begun and ended here, never implicitly
                timeout=BUSY_TIMEOUT_S,
                check_same_thread=not threads,
            )
        except sqlite3.Error as error:
            raise _explain(self.path, error) from None

    def _check_schema(self) -> None:
        try:
            database = Database(self._connection, execute_plugins=False)
            newer = unknown_steps(database)
            pending = [step.name for step in MIGRATIONS.pending(database)]
        except sqlite3.Error as error:
            raise _explain(self.path, error) from None
        self._connection.row_factory = _as_dict
        if newer:
            raise RunDirectoryError(_made_by_newer(self.path, newer))
        if pending:
            raise RunDirectoryError(
                f"{self.path} is of an older schema (lacks {pending[0]}); "
                "start `dart data` on it once, which brings it up to date"
            )

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        except (OverflowError, UnicodeEncodeError) as error:  # of a word on the command line
            raise UserError(f"{self.path} holds no such value: {error}") from None

    def _each(self, sql: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows without their columns' names, one at a time: for tables of very many rows."""
        try:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            yield from cursor.execute(sql, values)
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def _where(
    equal: Mapping[str, object | None],
    *,
    version: int | None = None,
    group_ids: Sequence[str] | None = None,
) -> tuple[str, list[object]]:
    """The WHERE clause for columns that must equal what is not None, and its values."""
    clauses = [f"{column} = ?" for column, wanted in equal.items() if wanted is not None]
    values = [wanted for wanted in equal.values() if wanted is not None]
    if version is not None:
        clauses.append("? BETWEEN t.oldest_version AND t.newest_version")
        values.append(version)
    if group_ids is not None:
        clauses.append("t.group_id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(list(group_ids)))
    return ("WHERE " + " AND ".join(clauses) if clauses else ""), values


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _made_by_newer(path: Path, steps: Sequence[str]) -> str:
    return f"{path} was written by a newer dart (schema step {steps[-1]}); use that version"


def _step_row(row: dict[str, Any]) -> StepRow:
    sampled = SampledTokens.model_construct(
        token_ids=unpack_ids(row.pop("token_ids")),
        behaviour_logprobs=unpack_floats(row.pop("behaviour_logprobs")),
        entropies=unpack_floats(row.pop("entropies")),
        version_spans=unpack_spans(row.pop("version_spans")),
    )
    return StepRow(
        **{
            **row,
            "sampled": sampled,
            "image_hashes": json.loads(row["image_hashes"]),
            "prompt_token_ids": unpack_prompt(row["prompt_token_ids"]),
            "action": json.loads(row["action"]) if row["action"] else None,
        }
    )


def _pool_row(row: dict[str, Any]) -> PoolRow:
    return PoolRow(**{**row, "known": bool(row["known"])})


# --- writing --------------------------------------------------------------------------------


class Store(Reader):
    """The one writer of a run. Writes are durable, and visible to others, after `commit`."""

    def __init__(self, path: Path, lock: int) -> None:
        self._lock = lock
        self.path = path
        self._group_numbers: dict[str, int] = {}  # of trajectories in play, by id; a cache
        self._connection = self._connect("rwc")
        try:
            self._prepare()
            # Moves pages from the log into the database in another thread: see checkpoint.
            self._checkpointer = self._connect("rwc", threads=True)
            self._checkpointing = threading.Lock()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Commit what is written, fold the log into the database, and free the run directory."""
        try:
            if self._connection.in_transaction:
                self.commit()
        finally:
            with self._checkpointing:
                self._checkpointer.close()
            self._connection.close()
            os.close(self._lock)

    def commit(self) -> None:
        """Make everything written since the last commit durable, all or nothing."""
        if self._connection.in_transaction:
            self._write("COMMIT")

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Where the block raises, what it has written is taken back; what came before stays."""
        self._write("SAVEPOINT block")
        try:
            yield
        except BaseException:
            self._write("ROLLBACK TO block")
            raise
        finally:
            self._write("RELEASE block")

    def abandon(self) -> None:
        """Forget everything written since the last commit, and write nothing more."""
        if self._connection.in_transaction:
            self._connection.rollback()
        self._connection.execute("PRAGMA query_only = ON")

    def checkpoint(self) -> None:
        """Move committed pages from the log into the database, as far as readers allow.

        Meant for another thread: it waits for the disk, while the writer goes on.
        """
        with self._checkpointing:
            try:
                self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.ProgrammingError:
                return  # closed while this thread waited
            except sqlite3.Error as error:
                raise _explain(self.path, error) from error

    def begin_run(self, seed: int, config: str, tasks: Iterable[Task]) -> RunRow:
        """Start the run, or start it again with a changed configuration (JSON)."""
        self._write(
            "INSERT INTO runs (id, created_at, seed, config) "
            "SELECT ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM runs)",
            (uuid.uuid4().hex[:12], time.time(), seed, config),
        )
        self._write("UPDATE runs SET seed = ?, config = ?", (seed, config))
        self._write_many(
            "INSERT OR REPLACE INTO tasks (suite, task_id, instruction, tier, split, max_steps) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [(t.suite, t.id, t.instruction, t.tier, t.split, t.max_steps) for t in tasks],
        )
        self.commit()
        return self.run()

    def save_active_s(self, active_s: float) -> None:
        """Note how long the run has been served, over all starts."""
        self._write("UPDATE runs SET active_s = ?", (active_s,))

    def save_stop_reason(self, reason: str) -> None:
        """The run was asked to end; an empty reason once that is done."""
        self._write("UPDATE runs SET stop_reason = ?", (reason,))

    def add_group(self, group: GroupRow) -> None:
        """File a group that was just opened."""
        self._insert("groups", group)

    def add_lease(
        self,
        trajectory_id: str,
        *,
        group_id: str,
        attempt: int,
        worker: str,
        slot: int,
        sampling_seed: int,
        at: float,
        max_steps: int | None = None,
    ) -> None:
        """File a trajectory that was just leased, the group's `attempt` (from 0)."""
        self._write(
            "INSERT INTO trajectories (id, group_id, attempt, state, worker, slot, sampling_seed, "
            "leased_at, max_steps) VALUES (?, ?, ?, 'leased', ?, ?, ?, ?, ?)",
            (trajectory_id, group_id, attempt, worker, slot, sampling_seed, at, max_steps),
        )

    def add_step(self, record: StepRecord, at: float) -> bool:
        """File one step and its screenshot; False if that step was there already."""
        screenshot = record.image_hashes[-1]
        if not self._add_step(record, at, screenshot, record.sampled.version_spans):
            return False
        group = self._group_number(record.trajectory_id)
        self._add_screenshot(group, screenshot, record.media_type, record.screenshot)
        return True

    def _add_step(
        self, step: StepRecord | StepRow, at: float, screenshot: str, spans: Sequence[VersionSpan]
    ) -> bool:
        """File one step; False if it was there already."""
        added = self._write(
            "INSERT OR IGNORE INTO steps VALUES "
            "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                step.trajectory_id,
                step.step,
                at,
                screenshot,
                _json(step.image_hashes),
                pack_prompt(step.prompt_token_ids),
                pack_ids(step.sampled.token_ids),
                pack_floats(step.sampled.behaviour_logprobs),
                pack_floats(step.sampled.entropies),
                pack_spans(spans),
                step.text,
                None if step.action is None else _json(step.action),
                step.error,
                step.model_s,
                step.env_s,
                step.worker,
                step.instruction,
            ),
        )
        return added > 0

    def _add_screenshot(self, group: int, key: str, media_type: str, image: bytes) -> None:
        """Keep an encoded image under its content hash, once, and note the group that shows it."""
        self._write(
            "INSERT OR IGNORE INTO screenshots (hash, media_type, bytes) VALUES (?, ?, ?)",
            (key, media_type, image),
        )
        self._write(
            "INSERT INTO screenshot_uses VALUES (?, ?) "
            "ON CONFLICT (hash) DO UPDATE SET group_number = excluded.group_number "
            "WHERE group_number < excluded.group_number",
            (key, group),
        )

    def _group_number(self, trajectory_id: str) -> int:
        """Of the trajectory's group. Raises StoreError for a trajectory that was never leased."""
        number = self._group_numbers.get(trajectory_id)
        if number is None:
            rows = self._rows(
                "SELECT g.number FROM trajectories t JOIN groups g ON g.id = t.group_id "
                "WHERE t.id = ?",
                (trajectory_id,),
            )
            if not rows:
                raise StoreError(f"{self.path}: no trajectory {trajectory_id}")
            if len(self._group_numbers) >= _MAX_NUMBERS:
                self._group_numbers.clear()
            number = self._group_numbers[trajectory_id] = rows[0]["number"]
        return number

    def remove_screenshots(self, before_group: int, limit: int) -> int:
        """Remove up to `limit` screenshots that no group from `before_group` on shows; how many.

        The oldest go first. Their place in the file is used again.
        """
        gone = [
            (row["hash"],)
            for row in self._rows(
                "SELECT hash FROM screenshot_uses WHERE group_number < ? "
                "ORDER BY group_number LIMIT ?",
                (before_group, limit),
            )
        ]
        for table in ("screenshots", "screenshot_uses"):
            self._write_many(f"DELETE FROM {table} WHERE hash = ?", gone)  # noqa: S608
        return len(gone)

    def start_playing(self, trajectory_id: str) -> None:
        """The first step of a leased trajectory came in."""
        self._write("UPDATE trajectories SET state = 'playing' WHERE id = ?", (trajectory_id,))

    def finish(self, end: TrajectoryEnd, at: float, oldest: int | None, newest: int | None) -> None:
        """The trajectory is over; `oldest` and `newest` are the versions that sampled it."""
        final = None
        if end.screenshot is not None:
            final = content_hash(end.screenshot)
            group = self._group_number(end.trajectory_id)
            self._add_screenshot(group, final, _media_type(end.screenshot), end.screenshot)
        self._write(
            "UPDATE trajectories SET state = 'finished', ended_at = ?, outcome = ?, "
            "verdict_reason = ?, stop_reason = ?, steps = ?, oldest_version = ?, "
            "newest_version = ?, final_screenshot = ?, reset_s = ?, wall_s = ? WHERE id = ?",
            (
                at,
                end.outcome,
                end.reason,
                end.stop_reason,
                end.steps,
                oldest,
                newest,
                final,
                end.reset_s,
                end.wall_s,
                end.trajectory_id,
            ),
        )

    def drop_trajectory(self, trajectory_id: str, reason: str, at: float) -> None:
        """The trajectory will not be trained on; one still in play ends with the steps it has."""
        self._write(
            "UPDATE trajectories SET state = 'dropped', reason = ?, "
            "ended_at = COALESCE(ended_at, ?), steps = COALESCE(steps, "
            "(SELECT COUNT(*) FROM steps WHERE trajectory_id = trajectories.id)) WHERE id = ?",
            (reason, at, trajectory_id),
        )

    def close_group(self, group_id: str, state: GroupState, reason: str, at: float) -> None:
        """All members of the group are over: it is ready, or dropped for a reason."""
        self._write(
            "UPDATE groups SET state = ?, reason = ?, closed_at = ? WHERE id = ?",
            (state, reason, at, group_id),
        )

    def add_pool_member(
        self, row: PoolRow, steps: Sequence[StepRow], screenshots: Mapping[str, bytes]
    ) -> bool:
        """File a success from outside the run; False, and nothing changes, if it was there already.

        Its id is `x` and a hash of its content. `screenshots`: content hash -> encoded image, of
        those that are not in the database yet. Weights of another run mean nothing in this one, so
        version spans are left out, and log-probabilities where they are not `known`. How many
        members a task may have is the pool's to say (dart_cli.data.pool), at the next start.

        Raises ProtocolError if its parts do not fit together: what is filed is trained on.
        """
        _check_member(row, steps)
        for key, image in screenshots.items():
            if content_hash(image) != key:
                raise ProtocolError(f"{row.trajectory_id}: image {key} has other content")
        if self.pool_member(row.trajectory_id) is not None:
            return False
        shown = {name for step in steps for name in step.image_hashes} - screenshots.keys()
        if unknown := len(shown) - self._known_images(shown):
            raise ProtocolError(f"{row.trajectory_id}: {unknown} prompt images are unknown")
        for key, image in screenshots.items():
            self._add_screenshot(0, key, _media_type(image), image)
        for step in steps:
            self._add_step(
                step
                if row.known
                else replace(
                    step, sampled=step.sampled.model_copy(update={"behaviour_logprobs": []})
                ),
                step.at,
                step.screenshot,
                [],
            )
        return self.join_pool(row)

    def pool_folder(self, folder: str) -> str:
        """Fingerprint that the folder had when it was imported; empty if it was not."""
        rows = self._rows("SELECT fingerprint FROM pool_folders WHERE folder = ?", (folder,))
        return str(rows[0]["fingerprint"]) if rows else ""

    def save_pool_folder(self, folder: str, fingerprint: str) -> None:
        """Note that the folder was imported whole."""
        self._write("INSERT OR REPLACE INTO pool_folders VALUES (?, ?)", (folder, fingerprint))

    def join_pool(self, row: PoolRow) -> bool:
        """A success whose steps are filed joins the pool; False if it was there already.

        Its screenshots stay until it is evicted.
        """
        values = vars(row)
        added = self._write(
            f"INSERT OR IGNORE INTO pool ({','.join(values)}) VALUES ({_marks(list(values))})",  # noqa: S608
            list(values.values()),
        )
        if not added:
            return False
        self._write(
            "INSERT OR IGNORE INTO pool_images SELECT s.trajectory_id, images.value "
            "FROM steps s, json_each(s.image_hashes) AS images WHERE s.trajectory_id = ?",
            (row.trajectory_id,),
        )
        self._write(
            "UPDATE screenshot_uses SET group_number = ? "
            "WHERE hash IN (SELECT hash FROM pool_images WHERE trajectory_id = ?)",
            (_ALWAYS, row.trajectory_id),
        )
        return True

    def evict_from_pool(self, trajectory_id: str, at: float) -> None:
        """The member is drawn no more; groups that are open now may still need its screenshots."""
        self._write(
            "UPDATE pool SET evicted_at = ? WHERE trajectory_id = ?",
            (at, trajectory_id),
        )
        self._write(
            "UPDATE screenshot_uses SET group_number = ? WHERE hash IN ("
            "SELECT hash FROM pool_images WHERE trajectory_id = ?) AND NOT EXISTS ("
            "SELECT 1 FROM pool_images p WHERE p.hash = screenshot_uses.hash "
            "AND p.trajectory_id <> ?)",
            (self.newest_group(), trajectory_id, trajectory_id),
        )
        self._write("DELETE FROM pool_images WHERE trajectory_id = ?", (trajectory_id,))

    def draw_from_pool(self, group_id: str, trajectory_id: str) -> None:
        """The member of the pool joins the group."""
        self._write("UPDATE groups SET pool_member = ? WHERE id = ?", (trajectory_id, group_id))

    def add_batch(
        self,
        batch: BatchRow,
        group_ids: Sequence[str],
        samples: Sequence[PlannedSample],
        trajectory_ids: Iterable[str],
        pool_ids: Iterable[str] = (),
    ) -> None:
        """File a batch: its samples, groups, trajectories, and members of the pool."""
        self._insert("batches", batch)
        self._write_many(
            "INSERT INTO batch_samples (batch_id, position, trajectory_id, step, advantage, weight, "
            "reason, entropy) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    batch.id,
                    position,
                    sample.trajectory_id,
                    sample.step,
                    sample.advantage,
                    sample.weight,
                    sample.reason,
                    sample.entropy,
                )
                for position, sample in enumerate(samples)
            ],
        )
        self._write_many(
            "UPDATE groups SET state = 'batched', batch_id = ? WHERE id = ?",
            [(batch.id, group_id) for group_id in group_ids],
        )
        self._write_many(
            "UPDATE trajectories SET state = 'batched', batch_id = ? WHERE id = ?",
            [(batch.id, trajectory_id) for trajectory_id in trajectory_ids],
        )
        self._write_many(
            "UPDATE pool SET used = used + 1 WHERE trajectory_id = ?",
            [(trajectory_id,) for trajectory_id in pool_ids],
        )

    def add_staleness(self, batch_id: int, tokens: Mapping[int, int]) -> None:
        """Tokens of the batch by how many versions behind the trainer they were sampled."""
        self._write_many(
            "INSERT INTO staleness VALUES (?, ?, ?)",
            [(batch_id, behind, number) for behind, number in tokens.items()],
        )

    def batch_trained(self, trained: BatchTrained, metrics: Mapping[str, float], at: float) -> None:
        """The batch is in the weights; keep its finite metrics, and its steps' gaps."""
        self._set_batch_state(trained.batch_id, "trained", at, trained.policy_version)
        self._write_many(
            "INSERT OR REPLACE INTO metrics (name, step, at, value) VALUES (?, ?, ?, ?)",
            [(name, trained.batch_id, at, value) for name, value in metrics.items()],
        )
        self._write_many(
            "UPDATE batch_samples SET gap_mean = ?, gap_largest = ? "
            "WHERE batch_id = ? AND trajectory_id = ? AND step = ?",
            [
                (gap.mean, gap.largest, trained.batch_id, gap.trajectory_id, gap.step)
                for gap in trained.gaps
            ],
        )

    def batch_in_checkpoint(self, batch_id: int, at: float) -> None:
        """The trainer's checkpoint holds the batch, though its acknowledgement never came."""
        self._set_batch_state(batch_id, "trained", at, None)

    def batch_untrained(self, batch_id: int) -> None:
        """The trainer went back to before this batch: it is to be served again."""
        self._set_batch_state(batch_id, "batched", None, None)

    def add_version(self, weights: WeightsPublished, at: float) -> None:
        """A weight set may be taken; published again after a restart, the newer one counts."""
        self._write(
            "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?)",
            (weights.policy_version, weights.path, weights.digest, at),
        )

    def add_decisions(self, decisions: Iterable[Decision], at: float) -> None:
        """Write down what was decided."""
        self._write_many(
            "INSERT INTO decisions (at, subject, used, reason, weight, batch_id) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [(at, d.subject, int(d.used), d.reason, d.weight, d.batch_id) for d in decisions],
        )

    def add_sync(self, done: SyncDone, granted_at: float, at: float) -> None:
        """A rollout worker has taken new weights, or refused them; told twice, it counts once."""
        values = (
            done.worker,
            done.policy_version,
            done.error,
            granted_at,
            at,
            done.waited_s,
            done.transfer_s,
            done.pause_s,
            done.finish_s,
            done.resume_s,
            done.in_flight,
        )
        self._write(
            "INSERT INTO syncs (worker, policy_version, error, granted_at, done_at, waited_s, "
            "transfer_s, pause_s, finish_s, resume_s, in_flight) "
            "SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM syncs "
            "WHERE worker = ? AND policy_version = ? AND transfer_s = ? AND waited_s = ?)",
            (*values, done.worker, done.policy_version, done.transfer_s, done.waited_s),
        )

    def save_usage(self, rows: Iterable[UsageRow]) -> None:
        """Keep where the processes' time went; a row replaces that of its worker and phase."""
        self._write_many(
            "INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?, ?)",
            [
                (row.worker, row.phase, row.role, row.started_at, row.seconds, row.before_s)
                for row in rows
            ],
        )

    def save_task(self, row: TaskRow) -> None:
        """Keep how a task fares, after one more outcome."""
        self._write(
            "INSERT OR REPLACE INTO task_progress VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                row.task_id,
                row.passed,
                row.failed,
                row.invalid,
                row.average_total,
                row.average_weight,
                row.curve,
            ),
        )

    def save_processes(
        self, heartbeats: Mapping[str, Heartbeat], heard_at: Mapping[str, float]
    ) -> None:
        """Keep each worker's newest heartbeat and when it was heard (unix seconds)."""
        self._write_many(
            "INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    worker,
                    beat.role,
                    beat.host,
                    beat.pid,
                    beat.started_at,
                    heard_at[worker],
                    beat.policy_version,
                    beat.state,
                    beat.waiting_for,
                    beat.waiting_s,
                    json.dumps(beat.gauges),
                )
                for worker, beat in heartbeats.items()
            ],
        )

    def versions_sampled(self, trajectory_id: str) -> tuple[int, int] | None:
        """Oldest and newest weights that sampled the trajectory's tokens; None without a token."""
        rows = self._rows(
            "SELECT version_spans FROM steps WHERE trajectory_id = ?", (trajectory_id,)
        )
        versions = [version for row in rows for version in span_versions(row["version_spans"])]
        return (min(versions), max(versions)) if versions else None

    def missing_parts(self, trajectory_id: str, steps: int) -> str:
        """What the trajectory lacks of `steps` steps and their images; empty if nothing."""
        rows = self._rows(
            "SELECT step, image_hashes FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        if len(rows) != steps or (rows and (rows[0]["step"], rows[-1]["step"]) != (0, steps - 1)):
            return f"{len(rows)} of {steps} steps were handed in"
        hashes = {name for row in rows for name in from_json(row["image_hashes"])}
        unknown = len(hashes) - self._known_images(hashes)
        return f"{unknown} prompt images are unknown" if unknown else ""

    def _known_images(self, hashes: Iterable[str]) -> int:
        """How many of the images are in the database."""
        rows = self._rows(
            "SELECT COUNT(*) AS number FROM screenshots "
            "WHERE hash IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(hashes)),),
        )
        return int(rows[0]["number"])

    def _prepare(self) -> None:
        """Check that the file is ours and whole, set the modes, bring the schema up to date."""
        try:
            [[mark]] = self._connection.execute("PRAGMA application_id")
            rows = self._connection.execute("SELECT tbl_name FROM sqlite_master")
            # A first start that was cut off leaves the list of steps, made before the first one.
            tables = {name for (name,) in rows} - {MIGRATIONS.migrations_table}
            if tables and mark != APPLICATION_ID:
                raise StoreError(f"{self.path} is not dart's database; choose another run.dir")
            if not tables:
                self._connection.execute("PRAGMA page_size = 8192")
            database = Database(self._connection, execute_plugins=False)
            if newer := unknown_steps(database):
                raise RunDirectoryError(_made_by_newer(self.path, newer))
            database.enable_wal()
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA cache_size = -{CACHE_MIB * 1024}")
            # The service moves the log in another thread; this bounds it where that does not run.
            self._connection.execute("PRAGMA wal_autocheckpoint = 8000")
            MIGRATIONS.apply(database)
        except DartError:
            raise
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        self._connection.row_factory = _as_dict

    def _set_batch_state(
        self,
        batch_id: int,
        state: Literal["batched", "trained"],
        at: float | None,
        version: int | None,
    ) -> None:
        self._write(
            "UPDATE batches SET state = ?, trained_at = ?, trained_version = ? WHERE id = ?",
            (state, at, version, batch_id),
        )
        for table in ("groups", "trajectories"):
            self._write(
                f"UPDATE {table} SET state = ? WHERE batch_id = ?",  # noqa: S608
                (state, batch_id),
            )

    def _insert(self, table: str, row: GroupRow | BatchRow) -> None:
        values = vars(row)
        self._write(
            f"INSERT INTO {table} ({','.join(values)}) VALUES ({_marks(list(values))})",  # noqa: S608
            list(values.values()),
        )

    def _write(self, sql: str, values: Sequence[object] = ()) -> int:
        """Execute within the open transaction; the number of rows it changed."""
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            return self._connection.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error

    def _write_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(sql, rows)
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error


def _check_member(row: PoolRow, steps: Sequence[StepRow]) -> None:
    """Raise ProtocolError if a member from outside the run cannot be trained on."""
    name = row.trajectory_id
    if not name.startswith("x"):
        raise ProtocolError(f"{name}: the id of a trajectory from outside begins with x")
    if not steps or [step.step for step in steps] != list(range(row.steps)):
        raise ProtocolError(f"{name}: {len(steps)} steps, must be {row.steps}, numbered from 0")
    for step in steps:
        where = f"step {step.step} of {name}"
        if step.trajectory_id != name:
            raise ProtocolError(f"{where}: belongs to {step.trajectory_id}")
        if not step.sampled.token_ids or not step.prompt_token_ids:
            raise ProtocolError(f"{where}: prompt_token_ids and token_ids must not be empty")
        if not in_range(step.sampled.token_ids) or not in_range(step.prompt_token_ids):
            raise ProtocolError(f"{where}: token ids must be in [0, 2 ** 31)")
        logprobs = step.sampled.behaviour_logprobs
        if row.known and (
            len(logprobs) != len(step.sampled.token_ids) or not all(map(isfinite, logprobs))
        ):
            raise ProtocolError(f"{where}: behaviour_logprobs must be finite, one for each token")
        if step.sampled.entropies and not all(map(isfinite, step.sampled.entropies)):
            raise ProtocolError(f"{where}: entropies must be finite")
        if not step.image_hashes or step.image_hashes[-1] != step.screenshot:
            raise ProtocolError(f"{where}: the last of image_hashes must be the screenshot's")


def _json(value: object) -> str:
    """As json.dumps, at a quarter of its time."""
    return to_json(value).decode()


def _media_type(image: bytes) -> str:
    return "image/png" if image.startswith(b"\x89PNG") else "image/jpeg"
