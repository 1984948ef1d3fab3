"""The run's database as `dart data` writes it.

Store   groups, trajectories, batches, weights, decisions; one per run directory
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bus.messages import BatchTrained, Heartbeat, Judgement, TrajectoryEnd
from bus.weights import SyncDone, WeightsPublished
from dart_cli.data.store.connection import marks
from dart_cli.data.store.rows import (
    BatchRow,
    Decision,
    GroupRow,
    GroupState,
    LineageRow,
    PlannedSample,
    RunRow,
    TaskRow,
    TrackerRow,
    UsageRow,
)
from dart_cli.data.store.step_writer import StepWriter, media_type
from envs.base import Task, content_hash, reward_of


class Store(StepWriter):
    """The one writer of a run. Writes are durable, and visible to others, after `commit`."""

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

    def save_learned(self, success: float) -> None:
        """The run has ended since its tasks' success is at least this."""
        self._write("UPDATE runs SET learned = ?", (success,))

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

    def start_playing(self, trajectory_id: str) -> None:
        """The first step of a leased trajectory came in."""
        self._write("UPDATE trajectories SET state = 'playing' WHERE id = ?", (trajectory_id,))

    def finish(self, end: TrajectoryEnd, at: float, oldest: int | None, newest: int | None) -> None:
        """The trajectory is over; `oldest` and `newest` are the versions that sampled it."""
        final = None
        if end.screenshot is not None:
            final = content_hash(end.screenshot)
            group = self._group_number(end.trajectory_id)
            self._add_screenshot(group, final, media_type(end.screenshot), end.screenshot)
        self._write(
            "UPDATE trajectories SET state = 'finished', ended_at = ?, outcome = ?, "
            "verdict_reason = ?, stop_reason = ?, steps = ?, oldest_version = ?, "
            "newest_version = ?, final_screenshot = ?, reset_s = ?, wall_s = ?, reward = ? "
            "WHERE id = ?",
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
                reward_of(end.outcome, end.reward),
                end.trajectory_id,
            ),
        )

        if end.judgement is not None:
            self.add_judgement(end.trajectory_id, end.judgement, at)

    def add_judgement(self, trajectory_id: str, judgement: Judgement, at: float) -> None:
        """File what a judge said of a trajectory; replaces what the same judge said before."""
        self._write(
            "INSERT OR REPLACE INTO judgements (trajectory_id, judge, use, outcome, score, reason, calls, "
            "prompt_tokens, completion_tokens, seconds, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                trajectory_id,
                judgement.judge,
                judgement.use,
                judgement.outcome,
                judgement.score,
                judgement.reason,
                judgement.calls,
                judgement.prompt_tokens,
                judgement.completion_tokens,
                judgement.seconds,
                at,
            ),
        )

    def count_trajectory(self, trajectory_id: str) -> None:
        """The trajectory's outcome is part of its task's success."""
        self._write("UPDATE trajectories SET counted = 1 WHERE id = ?", (trajectory_id,))

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
            "INSERT INTO batch_samples (batch_id, position, group_id, trajectory_id, step, advantage, "
            "weight, reason, entropy, screen_advantage, fork_trajectory_id, fork_step, baseline) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    batch.id,
                    position,
                    sample.group_id,
                    sample.trajectory_id,
                    sample.step,
                    sample.advantage,
                    sample.weight,
                    sample.reason,
                    sample.entropy,
                    sample.screen_advantage,
                    sample.fork_trajectory_id,
                    sample.fork_step,
                    sample.baseline,
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
        """The batch is in the weights; keep its finite metrics, and its steps' gaps.

        A replay's gaps are not kept: it has no rows of samples, and its first use keeps its own.
        """
        self._set_batch_state(trained.batch_id, "trained", at, trained.policy_version)
        self._write_many(
            "INSERT OR REPLACE INTO metrics (name, step, at, value) VALUES (?, ?, ?, ?)",
            [(name, trained.batch_id, at, value) for name, value in metrics.items()],
        )
        self._write_many(
            "UPDATE batch_samples SET gap_mean = ?, gap_largest = ? "
            "WHERE batch_id = ? AND trajectory_id = ? AND step = ? AND reason <> 'fork'",
            [
                (gap.mean, gap.largest, trained.batch_id, gap.trajectory_id, gap.step)
                for gap in trained.mismatches
            ],
        )

    def batch_in_checkpoint(self, batch_id: int, at: float) -> None:
        """The trainer's checkpoint holds the batch, though its acknowledgement never came."""
        self._set_batch_state(batch_id, "trained", at, None)

    def batch_untrained(self, batch_id: int) -> None:
        """The trainer went back to before this batch: it is to be served again."""
        self._set_batch_state(batch_id, "batched", None, None)

    def add_version(self, weights: WeightsPublished, at: float, lineage: int = 0) -> None:
        """A weight set may be taken; published again after a restart, the newer one counts."""
        self._write(
            "INSERT OR REPLACE INTO versions (policy_version, path, digest, published_at, updates, "
            "lineage) VALUES (?, ?, ?, ?, ?, ?)",
            (weights.policy_version, weights.path, weights.digest, at, weights.updates, lineage),
        )

    def add_lineage(self, row: LineageRow) -> None:
        """The trainer goes on from a checkpoint with another recipe."""
        self._write("INSERT INTO lineages VALUES (?, ?, ?)", (row.id, row.forked_at, row.recipe))

    def add_decisions(self, decisions: Iterable[Decision], at: float) -> None:
        """Write down what was decided."""
        self._write_many(
            "INSERT INTO decisions (at, subject, used, reason, weight, batch_id) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            [(at, d.subject, int(d.used), d.reason, d.weight, d.batch_id) for d in decisions],
        )

    def add_sync(self, done: SyncDone, granted_at: float, at: float) -> None:
        """A rollout worker has taken new weights, or refused them; a second report counts nothing."""
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
        """Keep the outcomes of a task, after one more."""
        self._write(
            f"INSERT OR REPLACE INTO task_progress ({','.join(vars(row))}) "  # noqa: S608
            f"VALUES ({marks(list(vars(row)))})",
            list(vars(row).values()),
        )

    def save_trackers(self, rows: Iterable[TrackerRow]) -> None:
        """Keep the expected rewards of tasks; a row replaces that of its task and step."""
        self._write_many(
            "INSERT OR REPLACE INTO trackers VALUES (?, ?, ?, ?, ?)",
            [(row.task_id, row.step, row.passed, row.failed, row.moved) for row in rows],
        )

    def save_processes(
        self, heartbeats: Mapping[str, Heartbeat], heard_at: Mapping[str, float]
    ) -> None:
        """Keep each worker's newest heartbeat and when it came (unix seconds)."""
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
