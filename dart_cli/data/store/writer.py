"""The run's database as `dart data` writes it.

Store   writes groups, trajectories, steps, screenshots, batches, weights and decisions
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
    BaselineRow,
    BatchRow,
    Decision,
    GroupRow,
    GroupState,
    PlannedSample,
    PoolRow,
    ProcessRow,
    RunRow,
    UsageRow,
)
from dart_cli.data.store.steps import ROUTING, StepRow, columns_of, routing_parts, span_versions
from envs.contract.base import Task, reward_of
from envs.contract.blobs import content_hash, image_type

_MAX_NUMBERS = 4096
"""Most group numbers in the cache."""
_ALWAYS = 2**62
"""Stands for the newest group that shows a screenshot if a member of the pool shows it: it is never
removed."""


class Store(Reader, Transactions):
    """The one writer of a run's database. Writes are durable, and visible to others, after `commit`."""

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._group_numbers: dict[str, int] = {}  # trajectory id -> its group's number; a cache

    # --- the run --------------------------------------------------------------------------------

    def begin_run(self, seed: int, config: str, tasks: Iterable[Task]) -> RunRow:
        """Write the run, its configuration (JSON) and its tasks, and return the run.

        A run that was started before keeps its id and continues.
        """
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
        """Write the configuration (JSON) that the run uses, after a process joined with other settings."""
        self._write("UPDATE runs SET config = ?", (config,))

    def save_active_s(self, active_s: float) -> None:
        """Write for how long the run has been served, over all starts."""
        self._write("UPDATE runs SET active_s = ?", (active_s,))

    def save_stop_reason(self, reason: str) -> None:
        """Write why a stop was requested, or an empty reason once the stop is carried out."""
        self._write("UPDATE runs SET stop_reason = ?", (reason,))

    def save_learned(self, success: float) -> None:
        """Write that train.stop_at has ended the run, as its tasks' success is at least `success`."""
        self._write("UPDATE runs SET learned = ?", (success,))

    # --- groups and trajectories ----------------------------------------------------------------

    def add_group(self, group: GroupRow) -> None:
        """Add a group that was just opened."""
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
        """Add a trajectory that was just leased; it is the group's attempt number `attempt`, from 0."""
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
        """Write that the first step of a leased trajectory has come."""
        self._write("UPDATE trajectories SET state = 'playing' WHERE id = ?", (trajectory_id,))

    def finish(self, end: TrajectoryEnd, at: float, oldest: int | None, newest: int | None) -> None:
        """Write that a trajectory has ended; `oldest` and `newest` are the versions that sampled it."""
        final = None
        if end.screenshot is not None:
            final = content_hash(end.screenshot)
            group = self._group_number(end.trajectory_id)
            self._add_screenshot(group, final, media_type(end.screenshot), end.screenshot)
        row = {
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
            "app_log": "\n".join(end.app_log),
        }
        columns = ", ".join(f"{name} = ?" for name in row)
        self._write(
            f"UPDATE trajectories SET state = 'finished', {columns} WHERE id = ?",  # noqa: S608
            [*row.values(), end.trajectory_id],
        )
        if end.judgement is not None:
            self.add_judgement(end.trajectory_id, end.judgement, at)

    def add_judgement(self, trajectory_id: str, judgement: Judgement, at: float) -> None:
        """Add a judgement of a trajectory; it replaces an earlier one by the same judge."""
        row = {"trajectory_id": trajectory_id, **vars(judgement), "at": at}
        self._insert("judgements", row, conflict="OR REPLACE")

    def count_trajectory(self, trajectory_id: str) -> None:
        """Write that the trajectory's outcome counts for its task's success."""
        self._write("UPDATE trajectories SET counted = 1 WHERE id = ?", (trajectory_id,))

    def drop_trajectory(self, trajectory_id: str, reason: str, at: float) -> None:
        """Write that a trajectory is dropped; one that is still in play ends with the steps that it has."""
        self._write(
            "UPDATE trajectories SET state = 'dropped', reason = ?, "
            "ended_at = COALESCE(ended_at, ?), steps = COALESCE(steps, "
            "(SELECT COUNT(*) FROM steps WHERE trajectory_id = trajectories.id)) WHERE id = ?",
            (reason, at, trajectory_id),
        )

    def close_group(self, group_id: str, state: GroupState, reason: str, at: float) -> None:
        """Write that a group is ready, or dropped for a reason."""
        self._write(
            "UPDATE groups SET state = ?, reason = ?, closed_at = ? WHERE id = ?",
            (state, reason, at, group_id),
        )

    def add_decisions(self, decisions: Iterable[Decision], at: float) -> None:
        """Add decisions, made at `at` (unix seconds)."""
        self._insert("decisions", *({**vars(decision), "at": at} for decision in decisions))

    # --- steps and screenshots ------------------------------------------------------------------

    def add_step(self, record: StepRecord, at: float) -> bool:
        """Add one step and its images; return False if the step was added before."""
        screenshot = record.image_hashes[-1]
        if not self._add_step(record, at, screenshot, record.sampled.version_spans):
            return False
        group = self._group_number(record.trajectory_id)
        self._add_screenshot(group, screenshot, record.media_type, record.screenshot)
        for image in record.images:
            self._add_screenshot(group, content_hash(image), media_type(image), image)
        for part in routing_parts(record):
            self._add_screenshot(group, content_hash(part), ROUTING, part)
        return True

    def _add_step(
        self, step: StepRecord | StepRow, at: float, screenshot: str, spans: Sequence[VersionSpan]
    ) -> bool:
        columns = columns_of(step, at, screenshot, spans)
        return self._insert("steps", columns, conflict="OR IGNORE") > 0

    def _add_screenshot(self, group: int, key: str, media_type: str, image: bytes) -> None:
        """Add an encoded image by its content hash, if it is new, and the newest group that shows it."""
        row = {"hash": key, "media_type": media_type, "bytes": image}
        self._insert("screenshots", row, conflict="OR IGNORE")
        self._write(
            "INSERT INTO screenshot_uses VALUES (?, ?) "
            "ON CONFLICT (hash) DO UPDATE SET group_number = excluded.group_number "
            "WHERE group_number < excluded.group_number",
            (key, group),
        )

    def _group_number(self, trajectory_id: str) -> int:
        """Return the number of the trajectory's group. Raises StoreError if it was never leased."""
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
        """Remove up to `limit` screenshots that only groups before `before_group` show; return how many.

        The oldest are removed first. Their space in the file is used again.
        """
        rows = self._rows(
            "SELECT hash FROM screenshot_uses WHERE group_number < ? ORDER BY group_number LIMIT ?",
            (before_group, limit),
        )
        hashes = [(row["hash"],) for row in rows]
        for table in ("screenshots", "screenshot_uses"):
            self._write_many(f"DELETE FROM {table} WHERE hash = ?", hashes)  # noqa: S608
        return len(hashes)

    def versions_sampled(self, trajectory_id: str) -> set[int]:
        """Return the versions that sampled the trajectory's tokens."""
        rows = self._rows(
            "SELECT version_spans FROM steps WHERE trajectory_id = ?", (trajectory_id,)
        )
        return {version for row in rows for version in span_versions(row["version_spans"])}

    def missing_parts(self, trajectory_id: str, steps: int) -> str:
        """Return which of `steps` steps and their images are missing, in words; empty if none."""
        rows = self._rows(
            "SELECT step, image_hashes FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        if [row["step"] for row in rows] != list(range(steps)):
            return f"{len(rows)} of {steps} steps were submitted"
        hashes = {key for row in rows for key in from_json(row["image_hashes"])}
        [[stored]] = self._stream(
            "SELECT COUNT(*) FROM screenshots WHERE hash IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(hashes)),),
        )
        missing = len(hashes) - stored
        return f"{missing} prompt images are unknown" if missing else ""

    # --- the experience pool --------------------------------------------------------------------

    def add_pool_member(
        self, row: PoolRow, steps: Sequence[StepRow], screenshots: Mapping[str, bytes]
    ) -> bool:
        """Add a success from outside the run to the pool; return False and change nothing if it is a member.

        Its id is `x` and a hash of its content; exchange/ has checked it. `screenshots` is content hash ->
        encoded image. Version spans are left out, since another run's versions mean nothing in this one,
        and so are log-probabilities without `has_logprobs`. dart_cli/data/pool.py limits the members of a
        task at the next start.
        """
        if self.pool_member(row.trajectory_id) is not None:
            return False
        for key, image in screenshots.items():
            self._add_screenshot(0, key, media_type(image), image)
        for step in steps:
            sampled = step.sampled
            if not row.has_logprobs:
                sampled = sampled.model_copy(update={"behaviour_logprobs": []})
            self._add_step(replace(step, sampled=sampled), step.at, step.screenshot, [])
        return self.join_pool(row)

    def join_pool(self, row: PoolRow) -> bool:
        """Add a success whose steps are stored to the pool; return False if it is there already.

        Its screenshots are not removed before it is evicted.
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
        """Evict a member of the pool. Its screenshots stay while groups that are open now may need them."""
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
        """Write that a member of the pool joins the group."""
        self._write("UPDATE groups SET pool_member = ? WHERE id = ?", (trajectory_id, group_id))

    def pool_folder(self, folder: str) -> str:
        """Return the fingerprint that a folder had when it was imported; empty if it was not imported."""
        rows = self._rows("SELECT fingerprint FROM pool_folders WHERE folder = ?", (folder,))
        return str(rows[0]["fingerprint"]) if rows else ""

    def save_pool_folder(self, folder: str, fingerprint: str) -> None:
        """Write that a folder was imported completely."""
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
        """Add a batch with its samples, and write which groups, trajectories and pool members are in it."""
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
                [(batch.id, row_id) for row_id in ids],
            )
        self._write_many(
            "UPDATE pool SET used = used + 1 WHERE trajectory_id = ?",
            [(trajectory_id,) for trajectory_id in pool_ids],
        )

    def add_staleness(self, batch_id: int, tokens: Mapping[int, int]) -> None:
        """Add the staleness of a batch: versions behind the trainer -> tokens that are so old."""
        self._write_many(
            "INSERT INTO staleness VALUES (?, ?, ?)",
            [(batch_id, behind, number) for behind, number in tokens.items()],
        )

    def batch_trained(self, trained: BatchTrained, metrics: Mapping[str, float], at: float) -> None:
        """Write that a batch is in the weights, with its metrics and its steps' log-probability gaps.

        The gaps of a replay are not stored, since only its first use has rows of samples.
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
                    sample.value,
                    sample.advantage,
                    trained.batch_id,
                    sample.group_id,
                    sample.trajectory_id,
                    sample.step,
                )
                for sample in trained.values
            ],
        )

    def batch_in_checkpoint(self, batch_id: int, at: float) -> None:
        """Write that a batch is in the trainer's checkpoint although its acknowledgement never came."""
        self._set_batch_state(batch_id, "trained", at, None)

    def batch_untrained(self, batch_id: int) -> None:
        """Write that a batch is served again, as the trainer went back to a checkpoint before it."""
        self._set_batch_state(batch_id, "batched", None, None)

    def _set_batch_state(
        self,
        batch_id: int,
        state: Literal["batched", "trained"],
        at: float | None,
        version: int | None,
    ) -> None:
        """Write the state of a batch, and the same state of its groups and trajectories."""
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
        """Add a published weight set; one that is published again after a restart replaces the earlier row."""
        self._insert("versions", {**vars(weights), "published_at": at}, conflict="OR REPLACE")

    def add_sync(self, sync: SyncDone, granted_at: float, at: float) -> None:
        """Add the report that a rollout worker took or refused new weights; a second report is ignored."""
        earlier = self._rows(
            "SELECT 1 FROM syncs WHERE worker = ? AND policy_version = ? AND transfer_s = ? "
            "AND waited_s = ?",
            (sync.worker, sync.policy_version, sync.transfer_s, sync.waited_s),
        )
        if not earlier:
            self._insert("syncs", {**vars(sync), "granted_at": granted_at, "done_at": at})

    # --- what the next start reads --------------------------------------------------------------

    def save_usage(self, rows: Iterable[UsageRow]) -> None:
        """Write the processes' time; a row replaces the row of the same worker and phase."""
        self._insert("usage", *map(vars, rows), conflict="OR REPLACE")

    def save_task(self, task_id: str, progress: str) -> None:
        """Write a task's progress (JSON)."""
        row = {"task_id": task_id, "progress": progress}
        self._insert("task_progress", row, conflict="OR REPLACE")

    def save_baselines(self, rows: Iterable[BaselineRow]) -> None:
        """Write running baselines; a row replaces the row of the same task and step."""
        self._insert("baselines", *map(vars, rows), conflict="OR REPLACE")

    def save_processes(self, rows: Iterable[ProcessRow]) -> None:
        """Write each worker's newest heartbeat."""
        self._insert("processes", *map(vars, rows), conflict="OR REPLACE")


def media_type(image: bytes) -> str:
    """Return the media type of an encoded screenshot, by its first bytes."""
    return image_type(image) or "application/octet-stream"
