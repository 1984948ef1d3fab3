"""The trainer's next batch: planned, loaded elsewhere, then filed.

    Forming   decides what comes next: a batch that is not trained on yet, a replay, or ready groups

Loading takes seconds and is not done here, so a plan may be outdated when its batch is there: then
`take` files nothing, and the trainer's next request plans again.
"""

from __future__ import annotations

from collections.abc import Callable

from bus.messages import Batch
from dart_cli.config.schema import DataConfig
from dart_cli.data.baselines import Baselines
from dart_cli.data.batching import (
    Batches,
    BatchPlan,
    Behind,
    Standing,
    drops_hint,
    finished_group,
    step_credit,
)
from dart_cli.data.closing import Closing
from dart_cli.data.curate import Curation, curate, use_decisions
from dart_cli.data.groups import GroupTable
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.writer import Store


class Forming:
    """Forms the batches of one run."""

    def __init__(
        self,
        data: DataConfig,
        store: Store,
        group_table: GroupTable,
        batches: Batches,
        baselines: Baselines,
        closing: Closing,
        *,
        behind: Behind,
        newest_updates: Callable[[str], int],
        wall: Callable[[], float],
    ) -> None:
        """`behind` and `newest_updates` (as Baselines.learn's) are asked when a batch is formed."""
        self._data = data
        self._store = store
        self._group_table = group_table
        self._batches = batches
        self._baselines = baselines
        self._closing = closing
        self._behind = behind
        self._newest_updates = newest_updates
        self._wall = wall
        self._planned: tuple[BatchPlan, Curation | None] | None = None  # None: a replay

    def plan(self, standing: Standing) -> BatchPlan | NotYet:
        """Which steps are in the trainer's next batch; nothing is filed."""
        if (filed := self._batches.oldest_untrained()) is not None:
            return filed
        replay = self._batches.planned_replay(standing, self._behind)
        if replay is not None:
            self._planned = replay, None
            return replay
        return self._plan_fresh(standing)

    def take(self, plan: BatchPlan, batch: Batch, trainer_version: int) -> Batch | None:
        """The loaded batch of a plan, filed if it is new; None if that is not to be done any more.

        Then groups in it were dropped, or a trainer began elsewhere, while it was loaded.
        """
        if plan.is_filed:
            is_next = plan.batch_id == min(self._batches.untrained, default=0)
            return self._batches.serve(batch, self._behind) if is_next else None
        if self._planned is None or self._planned[0] != plan:
            return None
        curation = self._planned[1]
        self._planned = None
        if self._batches.untrained or plan.batch_id != self._batches.formed + 1:
            return None
        ready = {group.id for group in self._group_table.ready}
        if curation is not None and not ready.issuperset(plan.group_ids):
            return None
        now = self._wall()
        self._batches.file(
            plan, batch, curation, trainer_version=trainer_version, behind=self._behind, at=now
        )
        if curation is not None:
            self._close(curation, plan.batch_id, now)
        return self._batches.serve(batch, self._behind)

    def _plan_fresh(self, standing: Standing) -> BatchPlan | NotYet:
        data = self._data
        curation = curate(
            [finished_group(group, data.reward, self._behind) for group in self._group_table.ready],
            groups_per_batch=data.groups_per_batch,
            max_staleness=data.max_staleness,
            advantage=data.advantage,
            high_entropy_share=data.high_entropy,
            credit=step_credit(data),
            visits=self._store.visits,
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
        plan = self._batches.planned(curation, standing)
        self._planned = plan, curation
        return plan

    def _close(self, curation: Curation, batch_id: int, at: float) -> None:
        """The batch is filed: its groups are done with."""
        weights, own = curation.weights, self._baselines.reason
        self._baselines.learn(curation.chosen, self._newest_updates)
        for group in curation.chosen:
            self._store.add_decisions(use_decisions(group, batch_id, weights, own), at)
            self._closing.remove(self._group_table.groups[group.id])
        if self._data.scheduling == "april" and not self._data.recycle:
            for unfinished in self._group_table.open:
                self._closing.drop(unfinished, "surplus")
        self._closing.dropped_since_batch.clear()
