"""The run at one moment, for `dart status` and whatever else watches.

Overview   collects from ledger, store, heartbeats and usage what a bus.snapshot.Snapshot holds
Moment     what it is told of the process that serves the run
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bus.heartbeat import Liveness
from bus.messages import Heartbeat
from bus.snapshot import (
    GroupsView,
    ProcessView,
    QueuesView,
    Snapshot,
    StalenessView,
    SyncView,
    TaskView,
)
from dart_cli.config import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import Scheduler
from dart_cli.data.store import Store
from dart_cli.data.usage import Usage
from envs.base import Task

RECENT_BATCHES = 20
"""Batches over which the status page shows staleness."""
WARN_AFTER_S = 30.0
"""Longest wait of a process that goes without a word."""


@dataclass(frozen=True)
class Moment:
    """What only the service knows."""

    now: float  # monotonic seconds
    run_id: str
    uptime_s: float  # of this process
    run_s: float  # served over all starts
    stopping: bool
    reason: str  # why it stops; empty while it runs
    free_slots: int  # environment slots that wait for a lease
    is_full: bool  # data.max_gb is reached, and nothing may be removed


class Overview:
    """Makes snapshots of one run."""

    def __init__(
        self,
        config: Config,
        store: Store,
        ledger: Ledger,
        scheduler: Scheduler,
        tasks: list[Task],
        liveness: Liveness,
        usage: Usage,
    ) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._scheduler = scheduler
        self._tasks = tasks
        self._liveness = liveness
        self._usage = usage

    def snapshot(self, moment: Moment) -> Snapshot:
        """The run now."""
        ledger, progress = self._ledger, self._ledger.progress
        newest = ledger.weights.policy_version if ledger.weights else -1
        trajectories = self._store.count("trajectories")
        return Snapshot(
            run_id=moment.run_id,
            run_dir=str(self._config.run.dir),
            now=time.time(),
            uptime_s=moment.uptime_s,
            run_s=moment.run_s,
            stopping=moment.stopping,
            reason=moment.reason,
            policy_version=newest,
            updates=ledger.updates,
            updates_total=self._config.train.updates,
            processes=[
                self._process(beat) for beat in (*self._liveness.alive(), *self._liveness.dead())
            ],
            trajectories=_by_state(trajectories),
            verdicts={
                "pass": progress.all.passed,
                "fail": progress.all.failed,
                "invalid": progress.all.invalid,
            },
            dropped=_by_reason(trajectories),
            groups=self._groups(),
            tasks=self._task_views(newest),
            success=progress.mean_success(),
            success_curve=progress.mean_curve(newest),
            rates=progress.rates(moment.now),
            staleness=self._staleness(),
            metrics=progress.metrics(),
            metric_curves=progress.metric_curves(),
            usage=self._usage.by_role(moment.now),
            queues=self._queues(moment.free_slots),
            syncs=self._sync_views(),
            store_bytes=self._store.bytes_on_disk(),
            warnings=self._warnings(moment),
        )

    def _groups(self) -> GroupsView:
        board, counts = self._ledger.board, self._store.count("groups")
        states = _by_state(counts)
        return GroupsView(
            open=len(board.open),
            ready=len(board.ready),
            batched=states.get("batched", 0),
            trained=states.get("trained", 0),
            limit=self._ledger.group_limit,
            pool=len(self._ledger.pool),
            dropped=_by_reason(counts),
        )

    def _staleness(self) -> StalenessView:
        histogram = self._store.staleness(after=self._ledger.updates - RECENT_BATCHES)
        tokens = sum(histogram.values())
        return StalenessView(
            mean=sum(k * v for k, v in histogram.items()) / tokens if tokens else 0.0,
            max=max(histogram, default=0),
            histogram=histogram,
        )

    def _process(self, beat: Heartbeat) -> ProcessView:
        silent_s = self._liveness.silent_s(beat.worker)
        return ProcessView(
            role=beat.role,
            worker=beat.worker,
            host=beat.host,
            pid=beat.pid,
            alive=silent_s <= self._liveness.dead_after_s,
            heartbeat_age_s=silent_s,
            started_at=beat.started_at,
            policy_version=beat.policy_version,
            state=beat.state,
            waiting_for=beat.waiting_for,
            waiting_s=beat.waiting_s,
            gauges=beat.gauges,
        )

    def _queues(self, free_slots: int) -> QueuesView:
        rollouts = [beat.gauges for beat in self._liveness.alive("rollout")]
        return QueuesView(
            in_flight=int(sum(gauges.get("in_flight", 0.0) for gauges in rollouts)),
            waiting=int(sum(gauges.get("waiting", 0.0) for gauges in rollouts)),
            leases=sum(1 for _ in self._ledger.board.live()),
            free_slots=free_slots,
        )

    def _sync_views(self) -> list[SyncView]:
        return [
            SyncView(
                worker=row.worker,
                policy_version=row.policy_version,
                error=row.error,
                done_at=row.done_at,
                waited_s=row.waited_s,
                transfer_s=row.transfer_s,
                pause_s=row.pause_s,
                finish_s=row.finish_s,
                resume_s=row.resume_s,
                in_flight=row.in_flight,
                syncs=syncs,
                refused=refused,
            )
            for row, syncs, refused in self._store.newest_syncs()
        ]

    def _task_views(self, newest: int) -> list[TaskView]:
        progress = self._ledger.progress
        weights = self._scheduler.probabilities(progress.success())
        views = []
        for task in self._tasks:
            fares = progress.tasks[task.id]
            views.append(
                TaskView(
                    suite=task.suite,
                    task_id=task.id,
                    trajectories=fares.passed + fares.failed,
                    passed=fares.passed,
                    invalid=fares.invalid,
                    success=fares.average.value,
                    weight=weights[task.id],
                    curve=fares.tally.curve(newest),
                )
            )
        return views

    def _warnings(self, moment: Moment) -> list[str]:
        """Which role nobody has, and who waits too long for what; `processes` tells the dead."""
        found = [
            f"{beat.worker} has waited {beat.waiting_s:.0f} s: {beat.waiting_for}"
            for beat in self._liveness.alive()
            if beat.waiting_s >= WARN_AFTER_S
        ]
        if moment.is_full:
            found.append(
                f"the database takes more than data.max_gb = {self._config.data.max_gb:g}, and all "
                "of it is needed; see that its disk has room"
            )
        roles = {beat.role for beat in self._liveness.alive()}
        found += [
            f"no {role} process is alive; start `dart {role}`"
            for role in ("env", "rollout", "train")
            if role not in roles and not moment.stopping
        ]
        return found


def _by_state(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for (state, _), number in counts.items():
        totals[state] = totals.get(state, 0) + number
    return totals


def _by_reason(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    return {reason: number for (state, reason), number in counts.items() if state == "dropped"}
