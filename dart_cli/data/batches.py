"""The batches of a run: formed once, served until they are trained on, also after any restart.

    Batches          plans the trainer's next batch: one that is not trained on yet, a replay, or groups
                     that are ready; files it once it is loaded, and notes that it is trained on
    BatchPlan        a batch as it is decided: which steps, not yet what they hold (loading.py)
    Standing         where the run stands when a batch is formed
    Replays          which batch is trained on again next (pure)

Loading takes seconds and is not done here, so a plan may be outdated when its batch is there: then
`take` files nothing, and the trainer's next request plans again.

A replay is a batch of its own, with an id of its own, on the samples of its first use. After each
fresh batch come at most `train.reuse` replays, the oldest batch first, and none of a batch whose last
use is less than GAP updates ago. With one reuse:

    batch    1      2      3         4      5         6      7
             fresh  fresh  1 again   fresh  2 again   fresh  4 again

So the order follows from the batches' ids alone: a restart, or a trainer that goes back to a checkpoint,
changes nothing. A batch that is refused once, for whatever reason, is not trained on again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Literal

from bus.errors import CheckpointError
from bus.messages import REPLAY_METRIC, Batch, BatchTrained, VersionAge
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config
from dart_cli.data.baselines import Baselines
from dart_cli.data.curate import Curation, curate, use_decisions
from dart_cli.data.groups import GroupTable
from dart_cli.data.leasing import Closing, finished_group
from dart_cli.data.scheduler import NotYet
from dart_cli.data.stalls import NO_GRADIENT, TELLING_DROPS
from dart_cli.data.store.rows import BatchRow, Decision, PlannedSample
from dart_cli.data.store.writer import Store

Behind = Callable[[int], int]
"""A version that sampled tokens -> versions that it is behind the trainer."""

GAP = 2
"""Updates between two uses of a batch, at least: the next one is then on other samples."""

ReplayRefusal = Literal["incomplete", "stale", "low_ess", "skipped"]
WHY_REFUSED: dict[str, str] = {
    "incomplete": "a screenshot of it was removed to keep data.max_gb",
    "stale": "its oldest token would be too many versions behind",
    "low_ess": "the trainer skipped it: its effective sample size was too low",
    "skipped": "the trainer skipped it",
}
"""A ReplayRefusal in words."""


@dataclass(frozen=True)
class Standing:
    """Where the run stands when a batch is formed; each as in Batch."""

    run_s: float = 0.0
    trajectories: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """A batch as it is decided."""

    batch_id: int
    group_ids: tuple[str, ...]
    temperature: float
    standing: Standing  # when it was formed
    samples: tuple[PlannedSample, ...]  # the steps that are trained on
    is_filed: bool  # False for one that becomes a batch only if it can be sent
    replay_of: int | None = None  # as in BatchRow
    reuse: int = 0  # likewise


class Batches:
    """Batches of one run, numbered from 1, as the store holds them."""

    def __init__(
        self,
        config: Config,
        store: Store,
        group_table: GroupTable,
        baselines: Baselines,
        closing: Closing,
        *,
        behind: Behind,
        wall: Callable[[], float],
    ) -> None:
        """`behind` is asked when a batch is formed."""
        self.formed = 0  # batches; their ids are 1 .. formed
        self.untrained: set[int] = set()  # of these, batches that are not in the weights
        self.trained_version = 0  # of the newest trained one, as read at the start
        self.refused_replays = 0  # since this process started
        self._config = config
        self._store = store
        self._group_table = group_table
        self._baselines = baselines
        self._closing = closing
        self._behind = behind
        self._wall = wall
        self._standing = Standing()  # of the newest one
        self._served: Batch | None = None  # the batch read last
        self._planned: tuple[BatchPlan, Curation | None] | None = None  # None: a replay
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
        """Batches in the weights."""
        return self.formed - len(self.untrained)

    @property
    def owed_replays(self) -> int:
        """Replays that come before the next fresh batch, if none is refused."""
        return self._replays.owed

    # --- forming ------------------------------------------------------------------------

    def plan(self, standing: Standing) -> BatchPlan | NotYet:
        """Which steps are in the trainer's next batch; nothing is filed.

        Writes down which batches are not trained on again although it is their turn, and why.
        """
        if self.untrained:
            return self._filed_plan(min(self.untrained))
        before = self._standing
        # A data process that was killed forgets its last seconds; a batch is no earlier than the last.
        standing = Standing(
            max(standing.run_s, before.run_s), max(standing.trajectories, before.trajectories)
        )
        while use := self._replays.due():
            if (reason := self._refusal(use)) is None:
                plan = self._replay_plan(use, standing)
                self._planned = plan, None
                return plan
            self._replays.end(use.first)
            self._refuse(use.first, reason)
        return self._plan_fresh(standing)

    def _filed_plan(self, batch_id: int, *, again: bool = False) -> BatchPlan:
        row = self._store.batch(batch_id)
        again = again or row.replay_of is not None
        return BatchPlan(
            batch_id,
            tuple(self._store.batch_groups(batch_id)),
            row.temperature,
            Standing(row.run_s, row.trajectories),
            tuple(self._store.planned_samples(batch_id, again=again)),
            is_filed=True,
            replay_of=row.replay_of,
            reuse=row.reuse,
        )

    def _replay_plan(self, use: Uses, standing: Standing) -> BatchPlan:
        return replace(
            self._filed_plan(use.first, again=True),
            batch_id=self.formed + 1,
            standing=standing,
            is_filed=False,
            replay_of=use.first,
            reuse=use.reused + 1,
        )

    def _plan_fresh(self, standing: Standing) -> BatchPlan | NotYet:
        data = self._config.data
        curation = curate(
            [finished_group(group, data.reward, self._behind) for group in self._group_table.ready],
            groups_per_batch=data.groups_per_batch,
            max_staleness=data.max_staleness,
            advantage=data.advantage,
            high_entropy_share=data.high_entropy,
            tracking=self._baselines.tracking,
        )
        for group, reason in curation.dropped:
            self._closing.drop(self._group_table.groups[group.id], reason)
        if not curation.chosen:
            described = "of one" if self._baselines.in_use else "with a gradient"
            return NotYet(
                f"{len(curation.waiting)} of {data.groups_per_batch} groups {described} are ready, "
                f"{len(self._group_table.open)} more play"
                f"{drops_hint(self._closing.dropped_since_batch)}"
            )
        plan = BatchPlan(
            self.formed + 1,
            tuple(group.id for group in curation.chosen),
            self._config.rollout.temperature,
            standing,
            tuple(sample for sample in curation.samples if sample.weight),
            is_filed=False,
        )
        self._planned = plan, curation
        return plan

    def served(self, plan: BatchPlan) -> Batch | None:
        """Return the batch that was served last, if it is this one: it need not be loaded again."""
        served = self._served
        return served if served is not None and served.batch_id == plan.batch_id else None

    def take(self, plan: BatchPlan, batch: Batch, trainer_version: int) -> Batch | None:
        """Return the loaded batch of a plan, filed if it is new; None if that is not to be done any more.

        Then groups in it were dropped, or a trainer began elsewhere, while it was loaded.
        """
        if plan.is_filed:
            is_next = plan.batch_id == min(self.untrained, default=0)
            return self._serve(batch) if is_next else None
        if self._planned is None or self._planned[0] != plan:
            return None
        curation = self._planned[1]
        self._planned = None
        if self.untrained or plan.batch_id != self.formed + 1:
            return None
        ready = {group.id for group in self._group_table.ready}
        if curation is not None and not ready.issuperset(plan.group_ids):
            return None
        self._file(plan, batch, curation, trainer_version)
        return self._serve(batch)

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
            **vars(plan.standing),
        )
        if curation is None:
            self._store.add_batch(row)
            used = Decision(replay_subject(first or 0), True, "replay", 1.0, row.id)
            self._store.add_decisions([used], at)
        else:
            self._store.add_batch(
                row,
                plan.group_ids,
                curation.samples,
                [member.trajectory_id for group in curation.chosen for member in group.valid],
                [group.pool.trajectory_id for group in curation.chosen if group.pool],
            )
            self._close(curation, row.id, at)
        self._note_filed(row)
        self.untrained.add(row.id)
        self._store.add_staleness(row.id, _staleness(batch, self._behind))

    def _close(self, curation: Curation, batch_id: int, at: float) -> None:
        """Close the groups of a batch that is filed."""
        data, weights, own = self._config.data, curation.weights, self._baselines.reason
        self._baselines.learn(curation.chosen)
        for group in curation.chosen:
            self._store.add_decisions(use_decisions(group, batch_id, weights, own), at)
            self._closing.remove(self._group_table.groups[group.id])
        if data.scheduling == "oversample":
            for unfinished in self._group_table.open:
                self._closing.drop(unfinished, "surplus")
        self._closing.dropped_since_batch.clear()

    def _serve(self, batch: Batch) -> Batch:
        """Return the loaded batch as the trainer gets it: with the age of what sampled it, as of now."""
        if self._served is None or self._served.batch_id != batch.batch_id:
            sampled_by = sorted(
                {span.version for each in batch.samples for span in each.version_spans}
            )
            ages = [VersionAge(version=each, behind=self._behind(each)) for each in sampled_by]
            self._served = batch.model_copy(update={"ages": ages})
        return self._served

    # --- trained ------------------------------------------------------------------------

    def trained(self, trained: BatchTrained) -> dict[str, float] | None:
        """Note that a batch is in the weights; return its finite metrics, None if that was reported before.

        Its mean reward joins the trainer's metrics: a sample carries its advantage only.
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
        if (reason := _skip_reason(metrics)) is not None:
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
        """Count the batches up to that one as trained on, and those after it as batches to serve again."""
        after = set(range(last_batch_id + 1, self.formed + 1))
        for batch_id in sorted(self.untrained - after):
            self._store.batch_in_checkpoint(batch_id, self._wall())
        for batch_id in sorted(after - self.untrained):
            self._store.batch_untrained(batch_id)
        self.untrained = after

    def oldest_group_needed(self) -> int | None:
        """Return the number of the first group of the batches that may be served again, or None.

        Those are all batches after the oldest checkpoint that a trainer may go back to, with one
        checkpoint to spare, and those that may be trained on again. The newest checkpoint may still be
        being written, and counts only when it is complete.
        """
        train = self._config.train
        newest = min(self.untrained, default=self.formed + 1) - 1
        return self._store.first_group(
            newest - train.checkpoint_every * (KEEP_CHECKPOINTS + 2), self._replays.oldest
        )

    def _note_filed(self, row: BatchRow) -> None:
        self.formed = row.id
        self._standing = Standing(row.run_s, row.trajectories)
        self._replays.filed(row.id, row.replay_of, row.reuse)

    def _refusal(self, use: Uses) -> ReplayRefusal | None:
        """Why a batch whose turn it is is not trained on again; None if it is."""
        if not self._store.has_screenshots(use.first):
            return "incomplete"
        config = self._config
        most = most_behind(
            *(config.data.max_staleness, use.reused + 1),
            *(config.train.reuse, config.weights.publish_every),
        )
        behind = max(map(self._behind, self._store.versions_of_batch(use.first)), default=0)
        return "stale" if behind > most else None

    def _note_skipped(self, row: BatchRow, reason: ReplayRefusal) -> None:
        """Note that the trainer skipped a batch, which is not trained on again.

        For a replay this is told once.
        """
        first = row.replay_of or row.id
        told = self._store.decisions(replay_subject(first))
        is_new = row.replay_of is not None and all(each.used for each in told)
        if self._replays.end(first) or is_new:
            self._refuse(first, reason, row.id)

    def _refuse(self, first: int, reason: ReplayRefusal, batch_id: int | None = None) -> None:
        """Write down that a batch is not trained on again; `batch_id` is the use that decided."""
        refused = Decision(replay_subject(first), False, reason, 0.0, batch_id)
        self._store.add_decisions([refused], self._wall())
        self.refused_replays += 1


# --- replays ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uses:
    """One batch that may be trained on again."""

    first: int  # id of the fresh batch
    last: int  # id of its last use
    reused: int  # how often it was trained on again


class Replays:
    """The batches that have uses left. Told of every batch in order of id."""

    def __init__(self, reuse: int) -> None:
        """`reuse` is train.reuse."""
        self._reuse = reuse
        self._uses: dict[int, Uses] = {}  # by id of the first use, the oldest first
        self._newest = 0  # batch
        self._since_fresh = 0  # replays after the newest fresh batch

    def filed(self, batch_id: int, replay_of: int | None, reused: int) -> None:
        """Note that a batch was formed: fresh, or trained on for the `reused`-th time more."""
        self._newest = batch_id
        first = batch_id if replay_of is None else replay_of
        self._since_fresh = 0 if replay_of is None else self._since_fresh + 1
        if reused >= self._reuse:
            self.end(first)
        elif replay_of is None or first in self._uses:
            self._uses[first] = Uses(first, batch_id, reused)
        # No batch waits for so long, but for those of a run that had fewer reuses: they would be
        # before all others for ever, each of which would then be as much older at its turn.
        pace = GAP * (self._reuse + 1)
        for use in list(self._uses.values()):
            if batch_id + 1 - use.first > (use.reused + 1) * pace:
                self.end(use.first)

    def end(self, first: int) -> bool:
        """Forget a batch that is not trained on again; return whether it would have been."""
        return self._uses.pop(first, None) is not None

    def due(self) -> Uses | None:
        """Return the batch to train on again before the next fresh one; None if there is none."""
        return self._due(self._newest + 1, self._since_fresh, self._uses)

    @property
    def owed(self) -> int:
        """Replays that come before the next fresh batch, if none is refused."""
        uses, next_id, since_fresh = dict(self._uses), self._newest + 1, self._since_fresh
        while found := self._due(next_id, since_fresh, uses):
            uses[found.first] = replace(found, last=next_id, reused=found.reused + 1)
            if uses[found.first].reused >= self._reuse:
                del uses[found.first]
            next_id, since_fresh = next_id + 1, since_fresh + 1
        return since_fresh - self._since_fresh

    @property
    def oldest(self) -> int | None:
        """Id of the oldest batch that may be trained on again; None if there is none."""
        return next(iter(self._uses), None)

    def _due(self, next_id: int, since_fresh: int, uses: Mapping[int, Uses]) -> Uses | None:
        if since_fresh >= self._reuse:
            return None
        return next((use for use in uses.values() if next_id - use.last >= GAP), None)


def most_behind(max_staleness: int, reused: int, reuse: int, publish_every: int) -> int:
    """Versions that the tokens of a batch may be behind when it is trained on for that time more.

    Those of its first use, and for each time more those in which GAP fresh batches and the replays after
    them are trained on.
    """
    return max_staleness + ceil(reused * GAP * (reuse + 1) / publish_every)


def replay_subject(batch_id: int) -> str:
    """Return what a decision on training on a batch again is about."""
    return f"batch {batch_id}"


def _skip_reason(metrics: Mapping[str, float]) -> ReplayRefusal | None:
    """Why the trainer skipped a batch, fresh or not, by its metrics; None if it did not."""
    told = {name.removeprefix(REPLAY_METRIC) for name, value in metrics.items() if value}
    if "skipped" not in told:
        return None
    return "low_ess" if "low_ess" in told else "skipped"


def drops_hint(dropped: Counter[str]) -> str:
    """Return the groups dropped since the last batch, by reason; empty if there are none."""
    if not dropped:
        return ""
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    [(most, number)] = dropped.most_common(1)
    hint = f"; {NO_GRADIENT[most]}" if most in NO_GRADIENT and number >= TELLING_DROPS else ""
    return f"; dropped since the last batch: {counts}{hint}"


def _staleness(batch: Batch, behind: Behind) -> dict[int, int]:
    """Tokens of the batch by how many versions behind the trainer they were sampled.

    Those of the pool have no spans and do not count.
    """
    tokens: Counter[int] = Counter()
    for sample in batch.samples:
        for span in sample.version_spans:
            tokens[behind(span.version)] += span.end - span.start
    return tokens
