"""The run's database as `dart data` writes it.

Store   groups, trajectories, steps, screenshots, batches, weights, decisions; one per run directory
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic_core import from_json

from bus.errors import StoreError
from bus.messages import BatchTrained, Judgement, StepRecord, TrajectoryEnd, VersionSpan
from bus.weights import SyncDone, WeightsPublished
from dart_cli.data.store.connection import Transactions
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import (
    BatchRow,
    Decision,
    GroupRow,
    GroupState,
    PlannedSample,
    PoolRow,
    ProcessRow,
    RunRow,
    TrackerRow,
    UsageRow,
)
from dart_cli.data.store.steps import StepRow, columns_of, span_versions
from envs.contract.base import Task, reward_of
from envs.contract.blobs import content_hash, image_type

_MAX_NUMBERS = 4096
_ALWAYS = 2**62
"""In place of the newest group that shows a screenshot: members of the pool do."""


class Store(Reader, Transactions):
    """The one writer of a run. Writes are durable, and visible to others, after `commit`."""

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._group_numbers: dict[str, int] = {}  # of trajectories in play, by id; a cache

    # --- the run --------------------------------------------------------------------------------

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

    def save_config(self, config: str) -> None:
        """Note the configuration (JSON) that the run is used with, since a process joined with another."""
        self._write("UPDATE runs SET config = ?", (config,))

    def save_active_s(self, active_s: float) -> None:
        """Note how long the run has been served, over all starts."""
        self._write("UPDATE runs SET active_s = ?", (active_s,))

    def save_stop_reason(self, reason: str) -> None:
        """Record why the run was asked to end; an empty reason once that is done."""
        self._write("UPDATE runs SET stop_reason = ?", (reason,))

    def save_learned(self, success: float) -> None:
        """Record that the run has ended because its tasks' success is at least this."""
        self._write("UPDATE runs SET learned = ?", (success,))

    # --- groups and trajectories ----------------------------------------------------------------

    def add_group(self, group: GroupRow) -> None:
        """File a group that was just opened."""
        self._insert("groups", vars(group))

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
        max_steps: int,
    ) -> None:
        """File a trajectory that was just leased, the group's `attempt` (from 0)."""
        self._insert(
            "trajectories",
            {
                "id": trajectory_id,
                "group_id": group_id,
                "attempt": attempt,
                "state": "leased",
                "worker": worker,
                "slot": slot,
                "sampling_seed": sampling_seed,
                "leased_at": at,
                "max_steps": max_steps,
            },
        )

    def start_playing(self, trajectory_id: str) -> None:
        """Record that the first step of a leased trajectory came in."""
        self._write("UPDATE trajectories SET state = 'playing' WHERE id = ?", (trajectory_id,))

    def finish(self, end: TrajectoryEnd, at: float, oldest: int | None, newest: int | None) -> None:
        """Record that a trajectory is over; `oldest` and `newest` are the versions that sampled it."""
        final = None
        if end.screenshot is not None:
            final = content_hash(end.screenshot)
            group = self._group_number(end.trajectory_id)
            self._add_screenshot(group, final, media_type(end.screenshot), end.screenshot)
        told = {
            "ended_at": at,
            "outcome": end.outcome,
            "verdict_reason": end.reason,
            "stop_reason": end.stop_reason,
            "steps": end.steps,
            "oldest_version": oldest,
            "newest_version": newest,
            "final_screenshot": final,
            "reset_s": end.reset_s,
            "wall_s": end.wall_s,
            "reward": reward_of(end.outcome, end.reward),
        }
        columns = ", ".join(f"{name} = ?" for name in told)
        self._write(
            f"UPDATE trajectories SET state = 'finished', {columns} WHERE id = ?",  # noqa: S608
            [*told.values(), end.trajectory_id],
        )
        if end.judgement is not None:
            self.add_judgement(end.trajectory_id, end.judgement, at)

    def add_judgement(self, trajectory_id: str, judgement: Judgement, at: float) -> None:
        """File what a judge said of a trajectory; replaces what the same judge said before."""
        row = {"trajectory_id": trajectory_id, **vars(judgement), "at": at}
        self._insert("judgements", row, conflict="OR REPLACE")

    def count_trajectory(self, trajectory_id: str) -> None:
        """Record that the trajectory's outcome is part of its task's success."""
        self._write("UPDATE trajectories SET counted = 1 WHERE id = ?", (trajectory_id,))

    def drop_trajectory(self, trajectory_id: str, reason: str, at: float) -> None:
        """Drop a trajectory from training; one that is still in play ends with the steps it has."""
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

    def add_decisions(self, decisions: Iterable[Decision], at: float) -> None:
        """Write down what was decided."""
        self._insert("decisions", *({**vars(each), "at": at} for each in decisions))

    # --- steps and screenshots ------------------------------------------------------------------

    def add_step(self, record: StepRecord, at: float) -> bool:
        """File one step and its images; False if that step is filed already."""
        screenshot = record.image_hashes[-1]
        if not self._add_step(record, at, screenshot, record.sampled.version_spans):
            return False
        group = self._group_number(record.trajectory_id)
        self._add_screenshot(group, screenshot, record.media_type, record.screenshot)
        for image in record.images:
            self._add_screenshot(group, content_hash(image), media_type(image), image)
        return True

    def _add_step(
        self, step: StepRecord | StepRow, at: float, screenshot: str, spans: Sequence[VersionSpan]
    ) -> bool:
        columns = columns_of(step, at, screenshot, spans)
        return self._insert("steps", columns, conflict="OR IGNORE") > 0

    def _add_screenshot(self, group: int, key: str, media_type: str, image: bytes) -> None:
        """Keep an encoded image under its content hash, once, and note the group that shows it."""
        row = {"hash": key, "media_type": media_type, "bytes": image}
        self._insert("screenshots", row, conflict="OR IGNORE")
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
        rows = self._rows(
            "SELECT hash FROM screenshot_uses WHERE group_number < ? ORDER BY group_number LIMIT ?",
            (before_group, limit),
        )
        gone = [(row["hash"],) for row in rows]
        for table in ("screenshots", "screenshot_uses"):
            self._write_many(f"DELETE FROM {table} WHERE hash = ?", gone)  # noqa: S608
        return len(gone)

    def versions_sampled(self, trajectory_id: str) -> set[int]:
        """Return the weights that sampled the trajectory's tokens."""
        rows = self._rows(
            "SELECT version_spans FROM steps WHERE trajectory_id = ?", (trajectory_id,)
        )
        return {version for row in rows for version in span_versions(row["version_spans"])}

    def missing_parts(self, trajectory_id: str, steps: int) -> str:
        """Return what the trajectory lacks of `steps` steps and their images; empty if nothing."""
        rows = self._rows(
            "SELECT step, image_hashes FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        if [row["step"] for row in rows] != list(range(steps)):
            return f"{len(rows)} of {steps} steps were submitted"
        hashes = {name for row in rows for name in from_json(row["image_hashes"])}
        [[known]] = self._each(
            "SELECT COUNT(*) FROM screenshots WHERE hash IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(hashes)),),
        )
        return f"{len(hashes) - known} prompt images are unknown" if known < len(hashes) else ""

    # --- the experience pool --------------------------------------------------------------------

    def add_pool_member(
        self, row: PoolRow, steps: Sequence[StepRow], screenshots: Mapping[str, bytes]
    ) -> bool:
        """File a success from outside the run; False, and nothing changes, if it is filed already.

        Its id is `x` and a hash of its content; exchange/ has checked it. `screenshots`: content hash
        -> encoded image. Weights of another run mean nothing in this one, so version spans are left
        out, and log-probabilities where they are not `known`. How many members a task may have is
        decided by dart_cli/data/pool.py, at the next start.
        """
        if self.pool_member(row.trajectory_id) is not None:
            return False
        for key, image in screenshots.items():
            self._add_screenshot(0, key, media_type(image), image)
        for step in steps:
            sampled = step.sampled
            if not row.known:
                sampled = sampled.model_copy(update={"behaviour_logprobs": []})
            self._add_step(replace(step, sampled=sampled), step.at, step.screenshot, [])
        return self.join_pool(row)

    def join_pool(self, row: PoolRow) -> bool:
        """Add a success whose steps are filed to the pool; return False if it is there already.

        Its screenshots stay until it is evicted.
        """
        if not self._insert("pool", vars(row), conflict="OR IGNORE"):
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
        """Evict a member, which is drawn no more; groups open now may still need its screenshots."""
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
        """Record that the member of the pool joins the group."""
        self._write("UPDATE groups SET pool_member = ? WHERE id = ?", (trajectory_id, group_id))

    def pool_folder(self, folder: str) -> str:
        """Fingerprint that the folder had when it was imported; empty if it was not."""
        rows = self._rows("SELECT fingerprint FROM pool_folders WHERE folder = ?", (folder,))
        return str(rows[0]["fingerprint"]) if rows else ""

    def save_pool_folder(self, folder: str, fingerprint: str) -> None:
        """Note that the folder was imported whole."""
        self._write("INSERT OR REPLACE INTO pool_folders VALUES (?, ?)", (folder, fingerprint))

    # --- batches and weights --------------------------------------------------------------------

    def add_batch(
        self,
        batch: BatchRow,
        group_ids: Iterable[str] = (),
        samples: Sequence[PlannedSample] = (),
        trajectory_ids: Iterable[str] = (),
        pool_ids: Iterable[str] = (),
    ) -> None:
        """File a batch: its samples, groups, trajectories, and members of the pool."""
        self._insert("batches", vars(batch))
        self._insert(
            "batch_samples",
            *(
                {"batch_id": batch.id, "position": position, **vars(sample)}
                for position, sample in enumerate(samples)
            ),
        )
        for table, ids in (("groups", group_ids), ("trajectories", trajectory_ids)):
            self._write_many(
                f"UPDATE {table} SET state = 'batched', batch_id = ? WHERE id = ?",  # noqa: S608
                [(batch.id, each) for each in ids],
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
        """Record that the batch is in the weights; keep its finite metrics, and its steps' gaps.

        A replay's gaps are not kept: it has no rows of samples, and its first use keeps its own.
        """
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
                for gap in trained.mismatches
            ],
        )
        self._write_many(
            "UPDATE batch_samples SET value = ?, valued = ? "
            "WHERE batch_id = ? AND group_id = ? AND trajectory_id = ? AND step = ?",
            [
                (
                    *(each.value, each.advantage, trained.batch_id),
                    *(each.group_id, each.trajectory_id, each.step),
                )
                for each in trained.values
            ],
        )

    def batch_in_checkpoint(self, batch_id: int, at: float) -> None:
        """Record that the trainer's checkpoint holds a batch whose acknowledgement never came."""
        self._set_batch_state(batch_id, "trained", at, None)

    def batch_untrained(self, batch_id: int) -> None:
        """Record that the trainer went back to before this batch, which is to be served again."""
        self._set_batch_state(batch_id, "batched", None, None)

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

    def add_version(self, weights: WeightsPublished, at: float) -> None:
        """Add a weight set that may be taken; of one published again after a restart the newer counts."""
        self._insert("versions", {**vars(weights), "published_at": at}, conflict="OR REPLACE")

    def add_sync(self, done: SyncDone, granted_at: float, at: float) -> None:
        """Record that a rollout worker has taken new weights, or refused them.

        A second report of it is not counted.
        """
        told = self._rows(
            "SELECT 1 FROM syncs WHERE worker = ? AND policy_version = ? AND transfer_s = ? "
            "AND waited_s = ?",
            (done.worker, done.policy_version, done.transfer_s, done.waited_s),
        )
        if not told:
            self._insert("syncs", {**vars(done), "granted_at": granted_at, "done_at": at})

    # --- what a start goes on with --------------------------------------------------------------

    def save_usage(self, rows: Iterable[UsageRow]) -> None:
        """Keep where the processes' time went; a row replaces that of its worker and phase."""
        self._insert("usage", *map(vars, rows), conflict="OR REPLACE")

    def save_task(self, task_id: str, progress: str) -> None:
        """Keep how a task fares (JSON), after one more outcome."""
        row = {"task_id": task_id, "progress": progress}
        self._insert("task_progress", row, conflict="OR REPLACE")

    def save_trackers(self, rows: Iterable[TrackerRow]) -> None:
        """Keep the expected rewards of tasks; a row replaces that of its task and step."""
        self._insert("trackers", *map(vars, rows), conflict="OR REPLACE")

    def save_processes(self, rows: Iterable[ProcessRow]) -> None:
        """Keep each worker's newest heartbeat."""
        self._insert("processes", *map(vars, rows), conflict="OR REPLACE")


def media_type(image: bytes) -> str:
    """Of an encoded screenshot, by its first bytes."""
    return image_type(image) or "application/octet-stream"
