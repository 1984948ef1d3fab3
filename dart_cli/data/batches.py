"""The batches of a run: formed once, and served until they are trained on, also after a restart.

    Batches      plans the next batch, files it once it is loaded, and notes that it is trained on
    BatchPlan    which steps are in a batch; loading.py loads their content
    RunTotals    how long the run had been served, and what it had played, when a batch was formed

The next batch is one that is not trained on yet, a replay (replays.py), or one of new groups. A batch is
loaded elsewhere (next_batch.py), and that takes seconds; so a plan may be outdated when its batch is
loaded. Then `file` refuses it, and the batch is planned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from bus.errors import CheckpointError
from bus.messages import Batch, BatchTrained, VersionAge
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config
from dart_cli.data.baselines import Baselines
from dart_cli.data.closing import GroupCloser, finished_group
from dart_cli.data.curate import Curation, curate, use_decisions
from dart_cli.data.groups import GroupTable
from dart_cli.data.replays import (
    ReplayRefusal,
    Replays,
    Uses,
    most_behind,
    replay_subject,
    skip_reason,
)
from dart_cli.data.scheduler import NotYet
from dart_cli.data.stalls import NO_GRADIENT, TELLING_DROPS
from dart_cli.data.store.rows import BatchRow, Decision, PlannedSample
from dart_cli.data.store.writer import Store

Behind = Callable[[int], int]
"""A policy version that sampled tokens -> how many versions it is behind the trainer."""


@dataclass(frozen=True)
class RunTotals:
    """How long the run had been served, and what it had played, when a batch was formed.

    Both fields are as in bus.messages.Batch.
    """

    run_s: float = 0.0
    trajectories: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """The plan of a batch: which steps are in it, without their content."""

    batch_id: int
    group_ids: tuple[str, ...]
    temperature: float
    totals: RunTotals
    samples: tuple[PlannedSample, ...]  # the steps that are trained on
    is_filed: bool  # False for a new batch, which is filed only once it is loaded
    replay_of: int | None = None  # as in BatchRow
    reuse: int = 0  # likewise


@dataclass(frozen=True)
class _OpenPlan:
    """The newest plan of a batch that is not filed yet."""

    plan: BatchPlan
    curation: Curation | None  # None for a replay


class Batches:
    """The batches of one run, numbered from 1, as the store holds them."""

    def __init__(
        self,
        config: Config,
        store: Store,
        group_table: GroupTable,
        baselines: Baselines,
        closer: GroupCloser,
        *,
        behind: Behind,
        wall: Callable[[], float],
    ) -> None:
        """`behind` is called when a batch is planned or served; `wall` returns unix seconds."""
        self.formed = 0  # batches; their ids are 1 .. formed
        self.untrained: set[int] = set()  # of these, batches that are not in the weights
        self.trained_version = 0  # of the newest trained one, as read at the start
        self.refused_replays = 0  # since this process started
        self._config = config
        self._store = store
        self._group_table = group_table
        self._baselines = baselines
        self._closer = closer
        self._behind = behind
        self._wall = wall
        self._totals = RunTotals()  # of the newest batch
        self._open_plan: _OpenPlan | None = None
        self._replays = Replays(config.train.reuse)
        for row in store.batches():
            self._note_filed(row)
            if row.state == "batched":
                self.untrained.add(row.id)
            self.trained_version = row.trained_version or self.trained_version
        for first in store.refused_replays((self._replays.oldest or 1) - 1):
            self._replays.end(first)

    @property
    def updates(self) -> int:
        """Number of batches in the weights."""
        return self.formed - len(self.untrained)

    @property
    def owed_replays(self) -> int:
        """Number of replays before the next fresh batch, if none of them is refused."""
        return self._replays.owed

    # --- planning -----------------------------------------------------------------------

    def plan(self, totals: RunTotals) -> BatchPlan | NotYet:
        """Return the plan of the trainer's next batch, or why there is none yet; no batch is filed.

        Replays whose turn has come but which are refused are written down with their reason, and groups
        that cannot be trained on are dropped.
        """
        # 1. A batch that is filed and not trained on yet.
        if self.untrained:
            return self._plan_filed(min(self.untrained))
        # A data service that was killed forgets its last seconds; a batch is no earlier than the one before.
        newest = self._totals
        totals = RunTotals(
            run_s=max(totals.run_s, newest.run_s),
            trajectories=max(totals.trajectories, newest.trajectories),
        )
        # 2. A batch to train on again.
        while use := self._replays.due():
            if (reason := self._refusal(use)) is None:
                plan = self._plan_replay(use, totals)
                self._open_plan = _OpenPlan(plan, curation=None)
                return plan
            self._replays.end(use.first)
            self._refuse(use.first, reason)
        # 3. A batch of groups that are ready.
        return self._plan_fresh(totals)

    def _plan_filed(self, batch_id: int, *, again: bool = False) -> BatchPlan:
        """Return the plan of a filed batch; with `again` its advantages are as they were trained on."""
        row = self._store.batch(batch_id)
        again = again or row.replay_of is not None
        return BatchPlan(
            batch_id=batch_id,
            group_ids=tuple(self._store.batch_groups(batch_id)),
            temperature=row.temperature,
            totals=RunTotals(row.run_s, row.trajectories),
            samples=tuple(self._store.planned_samples(batch_id, again=again)),
            is_filed=True,
            replay_of=row.replay_of,
            reuse=row.reuse,
        )

    def _plan_replay(self, use: Uses, totals: RunTotals) -> BatchPlan:
        """Return the plan of the next replay of the batch of `use`."""
        return replace(
            self._plan_filed(use.first, again=True),
            batch_id=self.formed + 1,
            totals=totals,
            is_filed=False,
            replay_of=use.first,
            reuse=use.reused + 1,
        )

    def _plan_fresh(self, totals: RunTotals) -> BatchPlan | NotYet:
        """Return the plan of a batch of new groups, or why there is none; drop groups that do not fit."""
        config = self._config.data
        curation = curate(
            [
                finished_group(group, config.reward, self._behind)
                for group in self._group_table.ready
            ],
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            advantage=config.advantage,
            high_entropy_share=config.high_entropy,
            comparison=self._baselines.comparison,
            has_teacher=self._config.train.teacher_weight > 0,
        )
        for group, reason in curation.dropped:
            self._closer.drop(self._group_table.groups[group.id], reason)
        if not curation.batch:
            condition = "of one" if self._baselines.in_use else "with a gradient"
            return NotYet(
                f"{len(curation.waiting)} of {config.groups_per_batch} groups {condition} are ready, "
                f"{len(self._group_table.open)} more play"
                f"{drops_hint(self._closer.dropped_since_batch)}"
            )
        plan = BatchPlan(
            batch_id=self.formed + 1,
            group_ids=tuple(group.id for group in curation.batch),
            temperature=self._config.rollout.temperature,
            totals=totals,
            samples=tuple(sample for sample in curation.samples if sample.weight),
            is_filed=False,
        )
        self._open_plan = _OpenPlan(plan, curation)
        return plan

    # --- filing -------------------------------------------------------------------------

    def file(self, plan: BatchPlan, batch: Batch, trainer_version: int) -> bool:
        """File a loaded batch if it is new; return False if its plan is outdated.

        A plan is outdated if groups in it were dropped, or a trainer has started from another checkpoint,
        while the batch was loaded.
        """
        if plan.is_filed:
            return plan.batch_id == min(self.untrained, default=0)
        if self._open_plan is None or self._open_plan.plan != plan:
            return False
        curation = self._open_plan.curation
        self._open_plan = None
        if self.untrained or plan.batch_id != self.formed + 1:
            return False
        ready = {group.id for group in self._group_table.ready}
        if curation is not None and not ready.issuperset(plan.group_ids):
            return False
        self._file(plan, batch, curation, trainer_version)
        return True

    def _file(
        self, plan: BatchPlan, batch: Batch, curation: Curation | None, trainer_version: int
    ) -> None:
        """File a loaded batch for a trainer at `trainer_version`; a replay has no `curation`."""
        at, first = self._wall(), plan.replay_of
        row = BatchRow(
            id=plan.batch_id,
            state="batched",
            formed_at=at,
            formed_version=trainer_version,
            temperature=plan.temperature,
            reward=self._store.batch(first or 0).reward if curation is None else curation.reward,
            replay_of=first,
            reuse=plan.reuse,
            run_s=plan.totals.run_s,
            trajectories=plan.totals.trajectories,
        )
        if curation is None:
            self._store.add_batch(row)
            replay = Decision(replay_subject(first or 0), True, "replay", 1.0, row.id)
            self._store.add_decisions([replay], at)
        else:
            self._store.add_batch(
                row,
                plan.group_ids,
                curation.samples,
                [member.trajectory_id for group in curation.batch for member in group.valid],
                [group.pool.trajectory_id for group in curation.batch if group.pool],
            )
            self._close_groups(curation, row.id, at)
        self._note_filed(row)
        self.untrained.add(row.id)
        self._store.add_staleness(row.id, _staleness(batch, self._behind))

    def _close_groups(self, curation: Curation, batch_id: int, at: float) -> None:
        """Close the groups of a batch that is filed."""
        self._baselines.learn(curation.batch)
        for group in curation.batch:
            decisions = use_decisions(group, batch_id, curation.weights, self._baselines.reason)
            self._store.add_decisions(decisions, at)
            self._closer.remove(self._group_table.groups[group.id])
        if self._config.data.scheduling == "oversample":
            for unfinished in self._group_table.open:
                self._closer.drop(unfinished, "surplus")
        self._closer.dropped_since_batch.clear()

    def ages(self, batch: Batch) -> list[VersionAge]:
        """Return how far each version that sampled tokens of the batch is behind the trainer now."""
        versions = {span.version for sample in batch.samples for span in sample.version_spans}
        return [
            VersionAge(version=version, behind=self._behind(version))
            for version in sorted(versions)
        ]

    # --- trained ------------------------------------------------------------------------

    def note_trained(self, trained: BatchTrained) -> dict[str, float] | None:
        """Note that a batch is in the weights. Return its finite metrics, or None if it was noted before.

        The metrics get the batch's mean reward: the trainer sees only its samples' advantages.
        """
        if trained.batch_id not in self.untrained:
            return None
        metrics = {name: value for name, value in trained.metrics.items() if isfinite(value)}
        row = self._store.batch(trained.batch_id)
        if row.replay_of is None:
            metrics["reward"] = row.reward
            if self._config.data.high_entropy < 1:
                metrics["steps_left_out"] = self._store.share_left_out(row.id)
            if self._config.data.pool_ratio:
                metrics["pool_tokens"] = self._store.share_of_pool(row.id)
        self._store.batch_trained(trained, metrics, self._wall())
        self.untrained.remove(trained.batch_id)
        if (reason := skip_reason(metrics)) is not None:
            self._note_skipped(row, reason)
        return metrics

    def resume_after(self, last_batch_id: int) -> None:
        """Serve the batches after the last one of the trainer's checkpoint again, in order.

        Raises CheckpointError if the checkpoint is not of this run, or too old.
        """
        if last_batch_id > self.formed:
            raise CheckpointError(
                f"the trainer's checkpoint holds batch {last_batch_id}, {self._store.path} "
                f"ends at {self.formed}: they are of different runs; choose another run.dir"
            )
        if (lost := self._store.unservable_batch(last_batch_id)) is not None:
            raise CheckpointError(
                f"the trainer's checkpoint ends at batch {last_batch_id}; batch {lost} cannot be "
                "served again, its screenshots were removed to keep data.max_gb; "
                "use a newer checkpoint, or another run.dir"
            )
        self.count_until(last_batch_id)

    def count_until(self, last_batch_id: int) -> None:
        """Count the batches up to this one as trained on, and serve those after it again."""
        later = set(range(last_batch_id + 1, self.formed + 1))
        for batch_id in sorted(self.untrained - later):
            self._store.batch_in_checkpoint(batch_id, self._wall())
        for batch_id in sorted(later - self.untrained):
            self._store.batch_untrained(batch_id)
        self.untrained = later

    def last_within(self, updates: int) -> int:
        """Return the id of the newest batch in weights that had `updates` updates; 0 if they had no batch.

        A batch that was skipped is no update.
        """
        skipped = self._store.skipped_batches()
        remaining = updates
        for batch_id in range(1, self.formed + 1):
            remaining -= batch_id not in skipped
            if remaining < 0:
                return batch_id - 1
        return self.formed

    def oldest_group_needed(self) -> int | None:
        """Return the number of the oldest group whose batch may be served again; None if there is none.

        Two kinds of batches may be served again: those after the oldest checkpoint that a trainer may go back
        to, and those that may be trained on again. One checkpoint more than are kept counts, since the newest
        may still be being written.
        """
        train = self._config.train
        newest_trained = min(self.untrained, default=self.formed + 1) - 1
        return self._store.first_group(
            newest_trained - train.checkpoint_every * (KEEP_CHECKPOINTS + 2), self._replays.oldest
        )

    def _note_filed(self, row: BatchRow) -> None:
        self.formed = row.id
        self._totals = RunTotals(row.run_s, row.trajectories)
        self._replays.note_filed(row.id, row.replay_of, row.reuse)

    # --- refused replays ----------------------------------------------------------------

    def _refusal(self, use: Uses) -> ReplayRefusal | None:
        """Return why the batch of `use`, whose turn it is, cannot be trained on again; None if it can."""
        if not self._store.has_screenshots(use.first):
            return "incomplete"
        limit = most_behind(
            max_staleness=self._config.data.max_staleness,
            reused=use.reused + 1,
            reuse=self._config.train.reuse,
            publish_every=self._config.weights.publish_every,
        )
        behind = max(map(self._behind, self._store.versions_of_batch(use.first)), default=0)
        return "stale" if behind > limit else None

    def _note_skipped(self, row: BatchRow, reason: ReplayRefusal) -> None:
        """Note that the trainer skipped a batch, which is then not trained on again.

        The refusal of a batch is written down once, whether its fresh use or a replay was skipped.
        """
        first = row.replay_of or row.id
        decisions = self._store.decisions(replay_subject(first))
        is_new = row.replay_of is not None and all(decision.used for decision in decisions)
        if self._replays.end(first) or is_new:
            self._refuse(first, reason, row.id)

    def _refuse(self, first: int, reason: ReplayRefusal, batch_id: int | None = None) -> None:
        """Write down that a batch is not trained on again; `batch_id` is the use that decided it."""
        refusal = Decision(replay_subject(first), False, reason, 0.0, batch_id)
        self._store.add_decisions([refusal], self._wall())
        self.refused_replays += 1


def drops_hint(dropped: Counter[str]) -> str:
    """Return the end of a sentence about the groups dropped since the last batch; empty if there are none."""
    if not dropped:
        return ""
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    [(most, number)] = dropped.most_common(1)
    hint = f"; {NO_GRADIENT[most]}" if most in NO_GRADIENT and number >= TELLING_DROPS else ""
    return f"; dropped since the last batch: {counts}{hint}"


def _staleness(batch: Batch, behind: Behind) -> dict[int, int]:
    """Return a count: versions behind the trainer -> how many tokens of the batch are so far behind.

    Steps of the experience pool have no version spans and do not count.
    """
    tokens: Counter[int] = Counter()
    for sample in batch.samples:
        for span in sample.version_spans:
            tokens[behind(span.version)] += span.end - span.start
    return tokens
