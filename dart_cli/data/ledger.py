r"""The run's ledger: every transition of a trajectory, in memory and in the store, in one place.

    leased -> playing -> finished -> batched -> trained
       \________\__________\______ dropped(reason)

Synchronous, without sockets or waits. What a method changes becomes durable with the store's next
commit; the caller acknowledges after that. A message that was handled before changes nothing, so
it may come again after any crash. What happens in memory follows from what is in the store: a
ledger made on the same database has the state of the old one.

How groups begin and end stands in leasing.py, how the trainer's next batch is formed in batches.py. A trajectory's drop reasons beside curate's: `lease_expired` (no sign of life), `worker_lost` (its
process died or was restarted), `incomplete` (steps or images are missing), `cancelled` (the
environment gave it up). A group's: `task_removed` (the run was started again without its task),
`surplus` (in play when the batch was full, with data.scheduling = "oversample").

When a group is opened, its size and its members' step limit are decided (leasing); when all of it
failed, whether a success from the pool joins it. A success of the run joins the pool when its own group is
done with, so that it is never a fresh trajectory and a member of the pool at once.

Where data.scheduling is not "rollout", trainer and rollouts take turns. The trainer's lasts from the moment a batch is
formed until it, and the replays before the next one, are trained on and every living rollout worker
serves the newest weights.
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
from dart_cli.data.batches import Batches, BatchPlan, Standing
from dart_cli.data.checks import check_end, check_step
from dart_cli.data.groups import Attempt, Group, restored_groups
from dart_cli.data.leasing import Closing, Leasing
from dart_cli.data.pool import StoredPool
from dart_cli.data.progress import RunProgress
from dart_cli.data.scheduler import NewGroup, NotYet, Scheduler, Situation
from dart_cli.data.store.rows import Decision
from dart_cli.data.store.writer import Store
from dart_cli.data.versions import Lineage, Versions
from dart_cli.language.pointer_tokens import drop_forced
from envs.contract.base import Task

log = logging.getLogger(__name__)

Clock = Callable[[], float]

LEASE_S = 60.0
"""Seconds without a step, or a heartbeat that names it, after which a lease is taken back. A process that
is silent altogether loses its leases before (bus.heartbeat.DEAD_AFTER_S)."""


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
        self.versions = Versions()  # what the rollout workers serve
        self._config = config
        self._tasks = {task.id: task for task in tasks}
        self._scheduler = scheduler
        self._wall = wall
        self._monotonic = monotonic
        self.pool = StoredPool(config, store, wall=wall)
        self.group_table = restored_groups(store, self._tasks, config.data, monotonic())
        self.baselines = Baselines(config.data, store)
        self._closing = Closing(
            config.data, store, self.group_table, self.pool, self.baselines, wall=wall
        )
        self._batches = Batches(
            *(config, store, self.group_table, self.baselines, self._closing),
            behind=self._behind,
            wall=wall,
        )
        self.lineage = Lineage(store.versions(), config.weights.publish_every)
        self.trainer_version = self._batches.trained_version  # by the trainer's newest message
        self._trainer = self.lineage.updates(self.trainer_version)  # updates in its weights
        self._reconcile()
        self.progress = RunProgress(self._tasks, monotonic())
        self.progress.restore(store, self._batches.formed, config.data.reward)
        self._estimates = self.progress.estimates(config.data.reward)
        self.weights = _newest_weights(store)
        self.leasing = Leasing(
            *(config, store, self._tasks, self.group_table, self.progress),
            wall=wall,
            monotonic=monotonic,
        )

    @property
    def updates(self) -> int:
        """Batches in the weights."""
        return self._batches.updates

    @property
    def trajectories(self) -> int:
        """Trajectories of the run that are over, whatever came of them; never falls."""
        return self.leasing.leased - sum(1 for _ in self.group_table.live())

    @property
    def turn(self) -> str:
        """What the rollouts wait for; empty while it is their turn, or where no turns are taken."""
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
        """Batches that were not trained on again after all, since this process started."""
        return self._batches.refused_replays

    @property
    def dropped_since_batch(self) -> Mapping[str, int]:
        """Groups that were dropped since the last batch, by reason."""
        return self._closing.dropped_since_batch

    @property
    def has_batch(self) -> bool:
        """Whether the trainer has a batch to train on, or enough groups are ready for one."""
        is_enough = len(self.group_table.ready) >= self._config.data.groups_per_batch
        return is_enough or bool(self._batches.untrained or self._batches.owed_replays)

    @property
    def suspended(self) -> bool:
        """Whether no completion may be begun or continued: it is not the rollouts' turn."""
        return self.turn != ""

    @property
    def group_limit(self) -> int:
        """How many groups may play or wait for a batch at once, as of now."""
        return self._scheduler.limit(self._situation())

    # --- playing ------------------------------------------------------------------------

    def lease(self, request: LeaseRequest) -> Lease | NotYet:
        """Return the next trajectory for a free slot.

        A slot that asks again before its first step gets the same lease again: the answer was
        lost. One that has begun to play has given up what it played, and so has another process of
        its name: a reset that ends its process counts as an attempt.
        """
        self.give_up(request.worker, request.slot)
        for group, attempt in list(self.group_table.played_by(request.worker, request.slot)):
            if attempt.state != "leased":
                continue
            if request.started_at and attempt.started_at not in (None, request.started_at):
                # The process that had it has ended, perhaps in this very reset.
                self._drop_attempt(group, attempt, "worker_lost")
                continue
            if request.task not in ("", group.task_id):
                self._drop_attempt(group, attempt, "cancelled")  # the slot wants another task now
                continue
            attempt.started_at = request.started_at or attempt.started_at
            attempt.renewed_at = self._monotonic()
            return self.leasing.as_lease(group, attempt)
        if 0 < (most := self._config.train.max_trajectories) <= self.leasing.leased:
            return NotYet(f"the last of train.max_trajectories = {most} are in play")
        choice = self._scheduler.next(self._situation(), request)
        if isinstance(choice, NotYet):
            return choice
        group = self.leasing.open_group(choice) if isinstance(choice, NewGroup) else choice
        return self.leasing.as_lease(group, self.leasing.add_attempt(group, request))

    def give_up(self, worker: str, slot: int) -> bool:
        """Give up what a free slot had begun to play, which is lost; return whether it had begun."""
        lost = [
            found
            for found in self.group_table.played_by(worker, slot)
            if found[1].state == "playing"
        ]
        for group, attempt in lost:
            self._drop_attempt(group, attempt, "worker_lost")
        return bool(lost)

    def step(self, record: StepRecord) -> Ack:
        """File one step. Raises ProtocolError if its parts do not fit together."""
        check_step(record, self._config)
        found = self.group_table.find(record.trajectory_id)
        if found is None or not found[1].live:
            return self._late(record.trajectory_id)
        attempt = found[1]
        attempt.renewed_at = self._monotonic()
        if not self.store.add_step(record, self._wall()):
            return Ack()
        if attempt.state == "leased":
            attempt.state = "playing"
            self.store.start_playing(attempt.id)
        attempt.steps += 1
        attempt.entropies[record.step] = mean_entropy(
            drop_forced(record.sampled.entropies, record.sampled.patches)
        )
        attempt.versions |= {span.version for span in record.sampled.version_spans}
        now = self._monotonic()
        self.progress.steps.add(now)
        if record.action is not None:
            self.progress.actions.add(now)
        self.progress.own.completion(record.action is None and record.error != "")
        return Ack()

    def end(self, end: TrajectoryEnd) -> Ack:
        """End an episode; its group may be over, too.

        Raises ProtocolError for impossible values.
        """
        check_end(end)
        found = self.group_table.find(end.trajectory_id)
        if found is None or not found[1].live:
            return self._late(end.trajectory_id)
        group, attempt = found
        now = self._wall()
        missing = self.store.missing_parts(attempt.id, end.steps)
        attempt.versions = self.store.versions_sampled(attempt.id)
        is_incomplete = bool(missing) and end.outcome != "invalid"
        if is_incomplete:  # a verdict on steps that are missing is none
            log.warning("%s is incomplete and will not be trained on: %s", attempt.id, missing)
            end = end.model_copy(update={"outcome": "invalid", "reason": missing})
        oldest, newest = min(attempt.versions, default=None), max(attempt.versions, default=None)
        self.store.finish(end, now, oldest, newest)
        attempt.steps = end.steps
        if end.stop_reason != "cancelled":  # the run's end tells nothing about the environment
            self.progress.outcome(group.task_id, end.outcome, end.steps)
        if end.outcome == "invalid":
            reason = "cancelled" if end.stop_reason == "cancelled" else "invalid"
            self._drop_attempt(group, attempt, "incomplete" if is_incomplete else reason)
            return Ack(note=f"dropped: {missing}" if is_incomplete else "")
        if end.outcome == "pass":
            self.leasing.note_success(group.task_id, end.steps)
        self.progress.trajectories.add(self._monotonic())
        attempt.state = "finished"
        attempt.judged(end.outcome, end.reward, self._config.data.reward)
        self.progress.own.judged(end.outcome == "pass", attempt.reward, self.updates)
        self._count(group)
        self._closing.settle(group)
        return Ack()

    def renew(self, trajectory_ids: Iterable[str]) -> None:
        """Renew the leases of trajectories that a heartbeat lists as still played."""
        for name in trajectory_ids:
            if found := self.group_table.find(name):
                found[1].renewed_at = self._monotonic()

    def discount_pause(self, seconds: float) -> None:
        """Make leases expire `seconds` later: this process received nothing for so long."""
        for _, attempt in self.group_table.live():
            attempt.renewed_at += seconds

    def take_back_expired(self) -> int:
        """Drop every lease without a sign of life for LEASE_S, and return how many there were."""
        limit = self._monotonic() - LEASE_S
        return self._take_back(lambda attempt: attempt.renewed_at < limit, "lease_expired")

    def take_back_from(self, worker: str, *, has_ended: bool = False) -> int:
        """Drop the leases of a worker that is gone, and return how many there were.

        One that `has_ended` by its own word is no reason for a warning.
        """
        level = logging.INFO if has_ended else logging.WARNING
        return self._take_back(lambda attempt: attempt.worker == worker, "worker_lost", level)

    # --- training -----------------------------------------------------------------------

    def plan_batch(self, trainer_version: int, run_s: float = 0.0) -> BatchPlan | NotYet:
        """Which steps are in the trainer's next batch; nothing is filed.

        `run_s` is how long the run has been served; a new batch keeps it. What the steps hold can be
        read by others after the store's next commit.
        """
        self._trainer_is_at(trainer_version, self.lineage.updates(trainer_version))
        return self._batches.plan(Standing(run_s, self.trajectories))

    def served(self, plan: BatchPlan) -> Batch | None:
        """Return the batch of a plan, if it was the last one taken: it need not be loaded again."""
        return self._batches.served(plan)

    def take_batch(self, plan: BatchPlan, batch: Batch) -> Batch | None:
        """Return the loaded batch of a plan, filed if it is new; None if that is not to be done any more.

        Then groups in it were dropped, or a trainer began elsewhere, while it was loaded.
        """
        taken = self._batches.take(plan, batch, self.trainer_version)
        if taken is None:
            return None
        reward, success = self.store.batch(taken.batch_id).reward, self.progress.mean_success()
        return taken.model_copy(update={"reward": reward, "success": success})

    def batch_trained(self, trained: BatchTrained) -> Ack:
        """Note that a batch is in the weights; a second report of it changes nothing."""
        if not 1 <= trained.batch_id <= self._batches.formed:
            return Ack(accepted=False, note=f"no batch {trained.batch_id} in this run")
        metrics = self._batches.trained(trained)
        if metrics is not None:
            self.progress.train_metrics(trained.batch_id, metrics)
            self.progress.train_steps.add(self._monotonic())
        self._trainer_is_at(trained.policy_version, self.lineage.updates(trained.policy_version))
        return Ack()

    def hello(self, hello: TrainerHello) -> HelloReply:
        """Note that the trainer starts from its checkpoint: batches after it are served again, in order.

        Raises CheckpointError if the checkpoint is not of this run, or too old.
        """
        self._batches.resume_after(hello.last_batch_id)
        self.progress.forget_metrics(hello.last_batch_id)
        self._trainer_is_at(hello.policy_version, hello.updates)
        known = self.store.versions()
        if not known:
            return HelloReply(policy_version=-1, digest="")
        return HelloReply(policy_version=known[-1].policy_version, digest=known[-1].digest)

    def weights_published(self, weights: WeightsPublished) -> Ack:
        """Let the rollout workers take a weight set.

        Raises WeightsError if the version was published before with other weights.
        """
        if weights == self.weights:
            return Ack()
        version = weights.policy_version
        known = self.store.version(version)
        if known is not None and known.digest != weights.digest:
            raise WeightsError(
                f"v{version} was published before with other weights (digest {known.digest[:12]}, "
                f"now {weights.digest[:12]}); start dart train again, it takes the next number"
            )
        self.store.add_version(weights, self._wall())
        self.lineage.add(version, weights.updates)
        self.weights = weights
        return Ack()

    def settle_end(self) -> None:
        """Count the updates that are in the newest announced weights, and no others.

        For a trainer that has ended: one that was killed may have acknowledged an update whose weights it did not
        announce, or announced weights whose update it did not acknowledge.
        """
        if self.weights is None:
            return
        last = self._last_batch_of(self.weights.updates)
        if last == self.updates:
            return
        log.warning(
            "the trainer ended without a report: v%d holds %d updates, which count; the run counted %d",
            *(self.weights.policy_version, last, self.updates),
        )
        self._batches.count_until(last)
        self.progress.forget_metrics(last)

    def _last_batch_of(self, applied: int) -> int:
        """Return the newest batch in weights that `applied` updates have changed: a skipped batch changes nothing."""
        skipped = self.store.skipped_batches()
        left = applied
        for batch_id in range(1, self._batches.formed + 1):
            left -= batch_id not in skipped
            if left < 0:
                return batch_id - 1
        return self._batches.formed

    def make_room(self, most: int) -> int:
        """Remove up to `most` screenshots that no batch can need again; how many were removed.

        Needed are those of live groups and of batches that may be served again.
        """
        kept = self._batches.oldest_group_needed()
        live = [group.number for group in self.group_table.groups.values()]
        needed = live + ([] if kept is None else [kept])
        return self.store.remove_screenshots(min(needed, default=self.group_table.opened + 1), most)

    # --- inside -------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Drop groups of tasks that are gone and close others: the configuration may have changed."""
        for group in list(self.group_table.groups.values()):
            if group.task_id in self._tasks:
                self._closing.settle(group)
            else:
                self._closing.drop(group, "task_removed")
        self.store.commit()

    def _situation(self) -> Situation:
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
        """Update the success of the group's task after an attempt, by the members that count for it."""
        for member in group.uncounted(self._config.data.early_stop):
            member.counted = True
            self.store.count_trajectory(member.id)
            self.progress.count(
                group.task_id,
                member.outcome == "pass",
                min(member.versions, default=None),
                member.verdict_reward,
            )
        task = self.progress.tasks[group.task_id]
        self._estimates[group.task_id] = task.estimate(self._config.data.reward)
        self.store.save_task(group.task_id, task.written())

    def _late(self, name: str) -> Ack:
        """Answer to a step or an end of a trajectory that is not in play."""
        row = self.store.trajectory(name)
        if row is None:
            return Ack(accepted=False, note=f"no trajectory {name} in this run")
        if row.outcome is not None:
            return Ack(note="submitted before")
        return Ack(accepted=False, note=f"{name} was dropped: {row.reason}")

    def _take_back(
        self, gone: Callable[[Attempt], bool], reason: str, level: int = logging.WARNING
    ) -> int:
        lost = [(group, attempt) for group, attempt in self.group_table.live() if gone(attempt)]
        for group, attempt in lost:
            self._drop_attempt(group, attempt, reason)
        if lost:
            names = ", ".join(f"{attempt.id} of {attempt.worker}" for _, attempt in lost)
            log.log(level, "leases taken back (%s): %s", reason, names)
        return len(lost)

    def _drop_attempt(self, group: Group, attempt: Attempt, reason: str) -> None:
        """One attempt yields nothing; its group asks for another, or is over."""
        attempt.state = "dropped"
        now = self._wall()
        self.store.drop_trajectory(attempt.id, reason, now)
        self.store.add_decisions([Decision(attempt.id, False, reason, 0.0)], now)
        self._count(group)
        self._closing.settle(group)

    def _trainer_is_at(self, version: int, updates: int) -> None:
        """Drop what the trainer has left behind, so that no more work goes into it."""
        self.trainer_version, self._trainer = version, updates
        limit = self._config.data.max_staleness
        for group in list(self.group_table.groups.values()):
            if max(map(self._behind, group.versions), default=0) > limit:
                self._closing.drop(group, "stale")

    def _lag(self, newest: int) -> int:
        """Versions that the oldest rollout worker is behind; negative while batches come again.

        Behind the trainer, if the version that it is at is still on its way.
        """
        at = self._trainer if self.trainer_version > newest else self.lineage.updates(newest)
        limit = self._config.data.max_staleness
        lag = self.versions.lag(lambda version: self.lineage.distance(version, at), limit)
        return max(lag, -(len(self._batches.untrained) // self._config.weights.publish_every))

    def _behind(self, version: int) -> int:
        """Versions that the weights `version` are behind the trainer."""
        return self.lineage.behind(version, self._trainer)


def _newest_weights(store: Store) -> WeightsPublished | None:
    """Return the weight set that was published last; None before the first."""
    newest = store.newest_version()
    if newest is None:
        return None
    return WeightsPublished(
        policy_version=newest.policy_version,
        path=newest.path,
        digest=newest.digest,
        updates=newest.updates,
    )
