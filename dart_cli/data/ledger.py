r"""The run's ledger: every transition of a trajectory, in memory and in the store, in one place.

    leased -> playing -> finished -> batched -> trained
       \________\__________\______ dropped(reason)

The ledger is synchronous: it has no sockets and never waits. What a method changes becomes durable with the
store's next commit, and the caller acknowledges after that. A message that was handled before changes
nothing, so it may come again after any crash. The state in memory follows from the store: a new ledger on
the same database has the state of the old one.

leasing.py opens groups, closing.py ends them, and batches.py forms the trainer's next batch. DROP_REASONS of
store/rows.py lists why trajectories and groups are dropped.

Where data.scheduling is not "rollout", the trainer and the rollout workers take turns. The trainer's turn
begins when a batch is formed. It ends when that batch and the replays before the next one are trained on,
and every living rollout worker serves the newest weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from bus.errors import WeightsError
from bus.messages import (
    Ack,
    Batch,
    BatchTrained,
    HelloReply,
    Lease,
    LeaseRequest,
    StepRecord,
    TrainerHello,
    TrajectoryEnd,
)
from bus.weights import WeightsPublished
from dart_cli.algo.advantage import mean_entropy
from dart_cli.config.schema import Config
from dart_cli.data.baselines import Baselines
from dart_cli.data.batches import Batches, BatchPlan, RunTotals
from dart_cli.data.checks import check_end, check_step
from dart_cli.data.closing import GroupCloser
from dart_cli.data.groups import Attempt, Group, restored_groups
from dart_cli.data.leasing import Leasing
from dart_cli.data.pool import StoredPool
from dart_cli.data.progress import RunProgress
from dart_cli.data.scheduler import NewGroup, NotYet, Scheduler, Situation
from dart_cli.data.store.rows import Decision
from dart_cli.data.store.writer import Store
from dart_cli.data.versions import Lineage, Versions, newest_weights
from dart_cli.language.pointer_tokens import drop_forced
from envs.contract.base import Task

log = logging.getLogger(__name__)

Clock = Callable[[], float]

LEASE_S = 60.0
"""A lease is taken back after so many seconds without a step of its trajectory or a heartbeat that lists
it. A process without any heartbeat loses its leases earlier, after bus.heartbeat.DEAD_AFTER_S."""


class Ledger:
    """The live state of one run. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        config: Config,
        store: Store,
        tasks: Iterable[Task],
        scheduler: Scheduler,
        *,
        wall: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self.store = store
        self.versions = Versions()  # the versions that the rollout workers serve
        self._config = config
        self._tasks = {task.id: task for task in tasks}
        self._scheduler = scheduler
        self._wall = wall
        self._monotonic = monotonic
        self.pool = StoredPool(config, store, wall=wall)
        self.group_table = restored_groups(store, self._tasks, config.data, monotonic())
        self.baselines = Baselines(config.data, store)
        self.has_teacher = config.train.teacher_weight > 0
        self._closer = GroupCloser(
            config.data,
            store,
            self.group_table,
            self.pool,
            self.baselines,
            has_teacher=self.has_teacher,
            wall=wall,
        )
        self._batches = Batches(
            config=config,
            store=store,
            group_table=self.group_table,
            baselines=self.baselines,
            closer=self._closer,
            behind=self._behind,
            wall=wall,
        )
        self.lineage = Lineage(store.versions(), config.weights.publish_every)
        self.trainer_version = self._batches.trained_version  # by the trainer's newest message
        self._trainer_updates = self.lineage.updates(self.trainer_version)  # in its weights
        self._reconcile()
        self.progress = RunProgress(self._tasks, monotonic())
        self.progress.restore(store, self._batches.formed, config.data.reward)
        self._estimates = self.progress.estimates(config.data.reward)
        self.weights = newest_weights(store)
        self.leasing = Leasing(
            config=config,
            store=store,
            tasks=self._tasks,
            group_table=self.group_table,
            progress=self.progress,
            wall=wall,
            monotonic=monotonic,
        )

    @property
    def updates(self) -> int:
        """Number of batches in the weights."""
        return self._batches.updates

    @property
    def trajectories(self) -> int:
        """Number of trajectories of the run that are over, whatever their outcome; it never falls."""
        return self.leasing.leased - sum(1 for _ in self.group_table.live_attempts())

    @property
    def turn(self) -> str:
        """What the rollout workers wait for; empty while it is their turn, or if no turns are taken."""
        if not self._config.data.takes_turns:
            return ""
        if untrained := self._batches.untrained:
            return f"the trainer's turn: batch {min(untrained)} is not trained on yet"
        if owed := self._batches.owed_replays:
            batches = "1 earlier batch is" if owed == 1 else f"{owed} earlier batches are"
            return f"the trainer's turn: {batches} trained on again first"
        if self.weights is None:
            return ""
        newest = self.weights.policy_version
        if self.trainer_version > newest:  # it acknowledges while it still publishes
            return f"weights v{self.trainer_version} are on their way"
        awaited = self.versions.awaited(newest, self.lineage.is_ahead)
        if awaited is None:
            return f"no rollout worker serves weights v{newest} yet"
        return f"{' and '.join(awaited)} must take weights v{newest} first" if awaited else ""

    @property
    def refused_replays(self) -> int:
        """Number of replays that were refused since this process started."""
        return self._batches.refused_replays

    @property
    def dropped_since_batch(self) -> Mapping[str, int]:
        """Reason -> groups that were dropped for it since the last batch."""
        return self._closer.dropped_since_batch

    @property
    def has_batch(self) -> bool:
        """True if the trainer has a batch to train on, or enough groups are ready for one."""
        is_enough = len(self.group_table.ready) >= self._config.data.groups_per_batch
        return is_enough or bool(self._batches.untrained or self._batches.owed_replays)

    @property
    def suspended(self) -> bool:
        """True while it is the trainer's turn: rollout workers must not begin or continue a completion."""
        return self.turn != ""

    @property
    def group_limit(self) -> int:
        """Number of groups that may play or wait for a batch at once, as of now."""
        return self._scheduler.limit(self._situation())

    # --- playing ------------------------------------------------------------------------

    def lease(self, request: LeaseRequest) -> Lease | NotYet:
        """Return the next trajectory for a free slot, or what has to happen first.

        A slot that asks again before its first step gets the same lease again: the reply was lost. If the
        slot has begun to play, its trajectory is dropped. It is also dropped if another process of the
        same name asks, so that a reset which kills its process counts as an attempt.
        """
        # 1. Give up what the slot has begun to play.
        self.give_up(request.worker, request.slot)
        # 2. Return a lease again whose reply was lost.
        for group, attempt in list(self.group_table.played_by(request.worker, request.slot)):
            if attempt.state != "leased":
                continue
            if request.started_at and attempt.started_at not in (None, request.started_at):
                # The process that had the lease has ended, perhaps in this very reset.
                self._drop_attempt(group, attempt, "worker_lost")
                continue
            if request.task not in ("", group.task_id):
                # The slot asks for another task now.
                self._drop_attempt(group, attempt, "cancelled")
                continue
            attempt.started_at = request.started_at or attempt.started_at
            attempt.renewed_at = self._monotonic()
            return self.leasing.as_lease(group, attempt)
        # 3. Lease a new trajectory, of an open group or of a new one.
        if 0 < (most := self._config.train.max_trajectories) <= self.leasing.leased:
            return NotYet(f"the last of train.max_trajectories = {most} are in play")
        assignment = self._scheduler.next(self._situation(), request)
        if isinstance(assignment, NotYet):
            return assignment
        if isinstance(assignment, NewGroup):
            group = self.leasing.open_group(assignment)
        else:
            group = assignment
        return self.leasing.as_lease(group, self.leasing.add_attempt(group, request))

    def give_up(self, worker: str, slot: int) -> bool:
        """Drop the trajectories that a free slot had begun to play; return True if there were any."""
        lost = [
            (group, attempt)
            for group, attempt in self.group_table.played_by(worker, slot)
            if attempt.state == "playing"
        ]
        for group, attempt in lost:
            self._drop_attempt(group, attempt, "worker_lost")
        return bool(lost)

    def step(self, record: StepRecord) -> Ack:
        """File one step, and return the acknowledgement, which says if the step came too late.

        Raises ProtocolError if the parts of the step do not fit together.
        """
        check_step(record, self._config)
        # 1. Find the attempt that it belongs to.
        entry = self.group_table.find(record.trajectory_id)
        if entry is None or not entry[1].is_live:
            return self._late_ack(record.trajectory_id)
        _, attempt = entry
        attempt.renewed_at = self._monotonic()
        # 2. Store it, unless it was stored before.
        if not self.store.add_step(record, self._wall()):
            return Ack()
        if attempt.state == "leased":
            attempt.state = "playing"
            self.store.start_playing(attempt.id)
        # 3. Update the attempt and the progress of the run.
        attempt.steps += 1
        attempt.entropies[record.step] = mean_entropy(
            drop_forced(record.sampled.entropies, record.sampled.patches)
        )
        attempt.versions |= {span.version for span in record.sampled.version_spans}
        now = self._monotonic()
        self.progress.steps.add(now)
        if record.action is not None:
            self.progress.actions.add(now, 1 + len(record.more_actions))
        self.progress.own.completion(record.action is None and record.error != "")
        return Ack()

    def end(self, end: TrajectoryEnd) -> Ack:
        """File the end of an episode, and close its group if the group is over, too.

        The returned acknowledgement says if the end came too late, or why the trajectory was dropped. Raises
        ProtocolError for values that no episode can have.
        """
        check_end(end)
        # 1. Find the attempt that it belongs to.
        entry = self.group_table.find(end.trajectory_id)
        if entry is None or not entry[1].is_live:
            return self._late_ack(end.trajectory_id)
        group, attempt = entry
        now = self._wall()
        # 2. A verdict does not count if steps are missing.
        missing = self.store.missing_parts(attempt.id, end.steps)
        attempt.versions = self.store.versions_sampled(attempt.id)
        is_incomplete = bool(missing) and end.outcome != "invalid"
        if is_incomplete:
            log.warning("%s is incomplete and will not be trained on: %s", attempt.id, missing)
            end = end.model_copy(update={"outcome": "invalid", "reason": missing})
        # 3. Store it.
        oldest, newest = min(attempt.versions, default=None), max(attempt.versions, default=None)
        self.store.finish(end, now, oldest, newest)
        attempt.steps = end.steps
        # A trajectory that the run's end cancelled shows nothing about the environment.
        if end.stop_reason != "cancelled":
            self.progress.outcome(group.task_id, end.outcome, end.steps)
        # 4. Drop the attempt, or count it and close its group if all of it is over.
        if end.outcome == "invalid":
            reason = "cancelled" if end.stop_reason == "cancelled" else "invalid"
            self._drop_attempt(group, attempt, "incomplete" if is_incomplete else reason)
            return Ack(note=f"dropped: {missing}" if is_incomplete else "")
        if end.outcome == "pass":
            self.leasing.note_success(group.task_id, end.steps)
        self.progress.trajectories.add(self._monotonic())
        attempt.state = "finished"
        attempt.note_verdict(end.outcome, end.reward, self._config.data.reward)
        self.progress.own.trajectory(end.outcome == "pass", attempt.reward, self.updates)
        self._count(group)
        self._closer.close_if_over(group)
        return Ack()

    def renew(self, trajectory_ids: Iterable[str]) -> None:
        """Renew the leases of trajectories that a heartbeat lists as still played."""
        for trajectory_id in trajectory_ids:
            if entry := self.group_table.find(trajectory_id):
                _, attempt = entry
                attempt.renewed_at = self._monotonic()

    def discount_pause(self, seconds: float) -> None:
        """Let leases expire `seconds` later, because this process received nothing for so long."""
        for _, attempt in self.group_table.live_attempts():
            attempt.renewed_at += seconds

    def take_back_expired(self) -> int:
        """Drop every attempt without a sign of life for LEASE_S; return how many were dropped."""
        limit = self._monotonic() - LEASE_S
        return self._take_back(lambda attempt: attempt.renewed_at < limit, "lease_expired")

    def take_back_from(self, worker: str, *, has_ended: bool = False) -> int:
        """Drop the attempts of a worker that is gone; return how many were dropped.

        This is logged as a warning unless the worker `has_ended` after announcing it.
        """
        level = logging.INFO if has_ended else logging.WARNING
        return self._take_back(lambda attempt: attempt.worker == worker, "worker_lost", level)

    # --- training -----------------------------------------------------------------------

    def plan_batch(self, trainer_version: int, run_s: float = 0.0) -> BatchPlan | NotYet:
        """Return the plan of the next batch for a trainer at this version, or why there is none yet.

        `run_s` is how long the run has been served. Other connections to the database can read the planned
        steps after the store's next commit.
        """
        self._move_trainer(trainer_version, self.lineage.updates(trainer_version))
        return self._batches.plan(RunTotals(run_s, self.trajectories))

    def file_batch(self, plan: BatchPlan, batch: Batch) -> Batch | None:
        """File the loaded batch of a plan if it is new, and return it as the trainer gets it.

        The returned batch also has its ages, its mean reward and the run's success. Return None if the
        plan is outdated: groups in it were dropped, or a trainer has started from another checkpoint, while
        the batch was loaded.
        """
        if not self._batches.file(plan, batch, self.trainer_version):
            return None
        return batch.model_copy(
            update={
                "ages": self._batches.ages(batch),
                "reward": self.store.batch(batch.batch_id).reward,
                "success": self.progress.mean_success(),
            }
        )

    def batch_trained(self, trained: BatchTrained) -> Ack:
        """Note that a batch is in the weights; a second report of it changes nothing.

        The returned acknowledgement says if the run has no such batch.
        """
        if not 1 <= trained.batch_id <= self._batches.formed:
            return Ack(accepted=False, note=f"no batch {trained.batch_id} in this run")
        metrics = self._batches.note_trained(trained)
        if metrics is not None:
            self.progress.train_metrics(trained.batch_id, metrics)
            self.progress.updates.add(self._monotonic())
        self._move_trainer(trained.policy_version, self.lineage.updates(trained.policy_version))
        return Ack()

    def hello(self, hello: TrainerHello) -> HelloReply:
        """Note that a trainer starts from its checkpoint, and return the newest published version.

        The batches after the checkpoint are then served again, in order. Raises CheckpointError if the
        checkpoint is not of this run, or too old.
        """
        self._batches.resume_after(hello.last_batch_id)
        self.progress.forget_metrics(hello.last_batch_id)
        self._move_trainer(hello.policy_version, hello.updates)
        versions = self.store.versions()
        if not versions:
            return HelloReply(policy_version=-1, digest="")
        return HelloReply(policy_version=versions[-1].policy_version, digest=versions[-1].digest)

    def weights_published(self, weights: WeightsPublished) -> Ack:
        """Add a published weight set, which rollout workers may take from now on.

        Raises WeightsError if the version was published before with other weights.
        """
        if weights == self.weights:
            return Ack()
        version = weights.policy_version
        earlier = self.store.version(version)
        if earlier is not None and earlier.digest != weights.digest:
            raise WeightsError(
                f"v{version} was published before with other weights (digest {earlier.digest[:12]}, "
                f"now {weights.digest[:12]}); start dart train again, it takes the next number"
            )
        self.store.add_version(weights, self._wall())
        self.lineage.add(version, weights.updates)
        self.weights = weights
        return Ack()

    def settle_end(self) -> None:
        """Count the updates that are in the newest published weights, and no others.

        This is called once the trainer has ended. A trainer that was killed may have acknowledged an update
        without publishing its weights, or published weights without acknowledging their update.
        """
        if self.weights is None:
            return
        last = self._batches.last_within(self.weights.updates)
        if last == self.updates:
            return
        log.warning(
            "the trainer ended without a report: v%d holds %d updates, which count; the run counted %d",
            self.weights.policy_version,
            last,
            self.updates,
        )
        self._batches.count_until(last)
        self.progress.forget_metrics(last)

    def make_room(self, most: int) -> int:
        """Remove up to `most` screenshots that are not needed any more; return how many were removed.

        Screenshots of live groups and of batches that may be served again are needed.
        """
        oldest_served = self._batches.oldest_group_needed()
        numbers = [group.number for group in self.group_table.groups.values()]
        if oldest_served is not None:
            numbers.append(oldest_served)
        before_group = min(numbers, default=self.group_table.opened + 1)
        return self.store.remove_screenshots(before_group, most)

    # --- inside -------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Drop groups whose task was removed, and close groups that are over by the present configuration."""
        for group in list(self.group_table.groups.values()):
            if group.task_id in self._tasks:
                self._closer.close_if_over(group)
            else:
                self._closer.drop(group, "task_removed")
        self.store.commit()

    def _situation(self) -> Situation:
        """Return the state of the run by which the scheduler decides."""
        newest = -1 if self.weights is None else self.weights.policy_version
        return Situation(
            group_table=self.group_table,
            estimates=self._estimates,
            untrained=len(self._batches.untrained),
            owed=self._batches.owed_replays,
            unpublished=self.updates % self._config.weights.publish_every,
            lag=self._lag(newest),
            turn=self.turn,
        )

    def _count(self, group: Group) -> None:
        """Add the members of a group that count from now on to its task's success, and store that."""
        for member in group.uncounted(self._config.data.early_stop):
            member.is_counted = True
            self.store.count_trajectory(member.id)
            self.progress.count(
                group.task_id,
                member.outcome == "pass",
                min(member.versions, default=None),
                member.verdict_reward,
            )
        task = self.progress.tasks[group.task_id]
        self._estimates[group.task_id] = task.estimate(self._config.data.reward)
        self.store.save_task(group.task_id, task.to_json())

    def _late_ack(self, trajectory_id: str) -> Ack:
        """Return the reply to a step or an end of a trajectory that is not in play."""
        row = self.store.trajectory(trajectory_id)
        if row is None:
            return Ack(accepted=False, note=f"no trajectory {trajectory_id} in this run")
        if row.outcome is not None:
            return Ack(note="submitted before")
        return Ack(accepted=False, note=f"{trajectory_id} was dropped: {row.reason}")

    def _take_back(
        self, is_lost: Callable[[Attempt], bool], reason: str, level: int = logging.WARNING
    ) -> int:
        """Drop the attempts in play for which `is_lost` is True, and log them; return how many."""
        lost = [
            (group, attempt)
            for group, attempt in self.group_table.live_attempts()
            if is_lost(attempt)
        ]
        for group, attempt in lost:
            self._drop_attempt(group, attempt, reason)
        if lost:
            names = ", ".join(f"{attempt.id} of {attempt.worker}" for _, attempt in lost)
            log.log(level, "leases taken back (%s): %s", reason, names)
        return len(lost)

    def _drop_attempt(self, group: Group, attempt: Attempt, reason: str) -> None:
        """Drop one attempt; its group then asks for another one, or is closed."""
        attempt.state = "dropped"
        now = self._wall()
        self.store.drop_trajectory(attempt.id, reason, now)
        self.store.add_decisions([Decision(attempt.id, False, reason, 0.0)], now)
        self._count(group)
        self._closer.close_if_over(group)

    def _move_trainer(self, version: int, updates: int) -> None:
        """Note the version that the trainer is at, and drop the groups that are too stale for it."""
        self.trainer_version, self._trainer_updates = version, updates
        limit = self._config.data.max_staleness
        for group in list(self.group_table.groups.values()):
            if max(map(self._behind, group.versions), default=0) > limit:
                self._closer.drop(group, "stale")

    def _lag(self, newest: int) -> int:
        """Return how many versions the oldest rollout worker is behind; negative while batches come again.

        It is measured from the `newest` published version, or from the trainer's if that is still on its way.
        """
        is_publishing = self.trainer_version > newest
        updates = self._trainer_updates if is_publishing else self.lineage.updates(newest)
        limit = self._config.data.max_staleness
        lag = self.versions.lag(lambda version: self.lineage.distance(version, updates), limit)
        return max(lag, -(len(self._batches.untrained) // self._config.weights.publish_every))

    def _behind(self, version: int) -> int:
        """Return how many versions the weights `version` are behind the trainer."""
        return self.lineage.behind(version, self._trainer_updates)
