"""The run at one moment, for `dart status` and other readers of snapshots.

Overview       makes a bus.snapshot.Snapshot from the ledger, the store, heartbeats and usage
ServiceState   the state of the data service, which a snapshot includes
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bus.heartbeat import awaited
from bus.messages import PLAYERS, Heartbeat
from bus.snapshot import (
    GroupsView,
    ProcessView,
    QueuesView,
    ReplaysView,
    Snapshot,
    StalenessView,
    StopView,
    TaskView,
)
from dart_cli.config import endpoints
from dart_cli.config.schema import Config
from dart_cli.data.groups import Group, GroupTable
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import Scheduler
from dart_cli.data.stalls import diagnose
from dart_cli.data.store.writer import Store
from dart_cli.data.workers import WORKING, WorkerWatch
from dart_cli.runtime.liveness import error_of, process_liveness, workers_of
from envs.contract.base import Task

HEARD_AFTER_S = 5.0
"""Time after this process's start at which a role without a heartbeat is reported as absent. Heartbeats
come each second, and connections are made again within another second."""
RECENT_BATCHES = 20
"""Number of newest batches whose staleness the status page shows."""


@dataclass(frozen=True)
class ServiceState:
    """The state of the service at one moment, for a snapshot."""

    now: float  # monotonic seconds
    run_id: str
    uptime_s: float  # of this process
    run_s: float  # for how long the run has been served, over all starts
    stopping: bool  # the run is over
    reason: str  # why it is over; empty while it goes on
    is_ending: bool  # this process ends; the run may go on later
    ending: str  # as in Snapshot
    free_slots: int  # environment slots that wait for a lease
    is_full: bool  # data.max_gb is reached, and nothing may be removed
    quiet_s: float  # since a step, an end, an update or a weight set was last filed
    permits: Mapping[str, float]  # worker that may take weights -> for how many seconds
    settings: Sequence[str]
    """How the settings of living processes differ from the data service's, a line each."""
    unequal: Sequence[str]  # which of these lines are about keys that must be equal


class Overview:
    """The overview of one run, from which snapshots are made."""

    def __init__(
        self,
        config: Config,
        store: Store,
        ledger: Ledger,
        scheduler: Scheduler,
        tasks: list[Task],
        watch: WorkerWatch,
    ) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._scheduler = scheduler
        self._tasks = tasks
        self._starts = watch.starts
        self._liveness = watch.liveness
        self._usage = watch.usage
        self._tokens = watch.tokens
        self._host = socket.gethostname()

    def snapshot(self, service: ServiceState) -> Snapshot:
        """Return a snapshot of the run, with this state of the service and with the present stalls."""
        ledger, progress = self._ledger, self._ledger.progress
        newest = ledger.weights.policy_version if ledger.weights else -1
        trajectories = self._store.count("trajectories")
        snapshot = Snapshot(
            run_id=service.run_id,
            run_dir=str(self._config.run.dir),
            now=time.time(),
            uptime_s=service.uptime_s,
            run_s=service.run_s,
            stopping=service.stopping,
            reason=service.reason,
            ending=service.ending,
            policy_version=newest,
            updates=ledger.updates,
            updates_total=self._config.train.updates,
            ended_trajectories=ledger.trajectories,
            max_trajectories=self._config.train.max_trajectories,
            max_minutes=self._config.train.max_minutes,
            stop=self._stop(),
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
            own=progress.own.view(ledger.updates),
            success=progress.mean_success(),
            reward=progress.mean_reward(),
            success_curve=progress.mean_curve(newest),
            rates=progress.rates(service.now),
            staleness=self._staleness(),
            replays=self._replays(),
            judges=self._store.judge_views(),
            metrics=progress.metrics(),
            metric_curves=progress.metric_curves(),
            usage=self._usage.by_role(service.now),
            queues=self._queues(service.free_slots),
            syncs=self._store.newest_syncs(),
            store_bytes=self._store.bytes_on_disk(),
            stall_s=endpoints.STALL_S,
            quiet_s=service.quiet_s,
            next_batch=next_batch(ledger.group_table, self._config.data.groups_per_batch),
            permits=dict(service.permits),
            warnings=[*self._warnings(service), *service.unequal],
            settings=[line for line in service.settings if line not in service.unequal],
        )
        return snapshot.model_copy(update={"stalls": diagnose(snapshot)})

    def _stop(self) -> StopView | None:
        """Return how far the run is from train.stop_at; None without it."""
        if not (at := self._config.train.stop_at):
            return None
        newest = self._ledger.progress.newest_success()
        return StopView(
            at=at,
            bound=newest.bound,
            counted=newest.counted,
            required=newest.required,
            lowest=newest.lowest,
            lowest_success=newest.lowest_success,
        )

    def _groups(self) -> GroupsView:
        group_table, counts = self._ledger.group_table, self._store.count("groups")
        states = _by_state(counts)
        return GroupsView(
            open=len(group_table.open),
            ready=len(group_table.ready),
            batched=states.get("batched", 0),
            trained=states.get("trained", 0),
            limit=self._ledger.group_limit,
            pool=len(self._ledger.pool),
            dropped=_by_reason(counts),
            by_baseline=self._ledger.baselines.in_use and not self._ledger.has_teacher,
            dropped_since_batch=dict(self._ledger.dropped_since_batch),
        )

    def _staleness(self) -> StalenessView:
        histogram = self._store.staleness(after=self._ledger.updates - RECENT_BATCHES)
        tokens = sum(histogram.values())
        return StalenessView(
            mean=sum(k * v for k, v in histogram.items()) / tokens if tokens else 0.0,
            max=max(histogram, default=0),
            histogram=histogram,
        )

    def _replays(self) -> ReplaysView:
        counts = self._store.replay_counts()
        after = self._ledger.updates - RECENT_BATCHES
        oldest = max(self._store.staleness(after, replays=True), default=0)
        return ReplaysView(updates=counts.replays, refused=counts.refused, oldest=oldest)

    def _process(self, beat: Heartbeat) -> ProcessView:
        """Return the view of a process; a silent one on this host is examined for what became of it."""
        silent_s = self._liveness.silent_s(beat.worker)
        is_alive = silent_s <= self._liveness.dead_after_s
        is_examined = not is_alive and beat.host == self._host
        return ProcessView(
            **beat.model_dump(exclude={"trajectories"}),
            trajectories=[],
            alive=is_alive,
            heartbeat_age_s=silent_s,
            still_s=self._tokens.seconds(beat.worker),
            liveness=process_liveness(beat.pid, silent_s=silent_s) if is_examined else "",
            error=error_of(self._config.run.dir, beat.worker, beat.pid) if is_examined else "",
        )

    def _queues(self, free_slots: int) -> QueuesView:
        rollouts = [beat.gauges for beat in self._liveness.alive("rollout")]
        return QueuesView(
            in_flight=int(sum(gauges.get("in_flight", 0.0) for gauges in rollouts)),
            waiting=int(sum(gauges.get("waiting", 0.0) for gauges in rollouts)),
            leases=sum(1 for _ in self._ledger.group_table.live_attempts()),
            free_slots=free_slots,
        )

    def _task_views(self, newest: int) -> list[TaskView]:
        progress = self._ledger.progress
        weights = self._scheduler.probabilities(progress.estimates(self._config.data.reward))
        views = []
        for task in self._tasks:
            task_progress = progress.tasks[task.id]
            views.append(
                TaskView(
                    suite=task.suite,
                    task_id=task.id,
                    trajectories=task_progress.passed + task_progress.failed,
                    passed=task_progress.passed,
                    invalid=task_progress.invalid,
                    success=task_progress.average.value,
                    reward=task_progress.reward.value,
                    invalid_share=task_progress.invalid_share.value,
                    invalid_after_action=task_progress.invalid_after_action,
                    weight=weights[task.id],
                    curve=task_progress.counters.curve(newest),
                )
            )
        return views

    def _warnings(self, service: ServiceState) -> list[str]:
        """Return warnings of what no stall reports, such as a role without a process."""
        # 1. The database is full.
        warnings = []
        if service.is_full:
            warnings.append(
                f"the database takes more than data.max_gb = {self._config.data.max_gb:g}, and all "
                "of it is needed; see that its disk has room"
            )
        # 2. A process is started again and again.
        warnings += [
            f"{worker} was started again {times} times within a day; logs/{worker}.log shows why"
            for worker, times in self._starts.often(time.monotonic()).items()
        ]
        # 3. A role has no process. A process that has fallen silent is a stall and not reported here. After a
        # start of the data service the others need a moment to be heard.
        present = {beat.role for beat in (*self._liveness.alive(), *self._liveness.dead())}
        if not present.isdisjoint(PLAYERS):
            present |= {"env"}
        missing = [role for role in WORKING if role not in present]
        is_ending = service.stopping or service.is_ending or service.ending
        if missing and not is_ending and service.uptime_s >= HEARD_AFTER_S:
            failed = [worker for worker in workers_of(self._config.run.dir) if worker.error]
            for role in missing:
                reasons = [
                    f"{worker.name} has ended: {worker.error}"
                    for worker in failed
                    if worker.name.startswith(role)
                ]
                warnings.append("; ".join([f"waits for {awaited(role)}", *reasons[:1]]))
        return warnings


def _by_state(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    """Return state -> number, from (state, reason) -> number."""
    totals: dict[str, int] = {}
    for (state, _), number in counts.items():
        totals[state] = totals.get(state, 0) + number
    return totals


def _by_reason(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    """Return reason -> number of those that were dropped, from (state, reason) -> number."""
    return {reason: number for (state, reason), number in counts.items() if state == "dropped"}


def next_batch(group_table: GroupTable, groups_per_batch: int) -> str:
    """Return how far the next batch is, in words.

    For example: "1 of 2 groups are ready; 3 of 8 trajectories of mini/popup have ended, 1 play".
    """
    ready = f"{len(group_table.ready)} of {groups_per_batch} groups are ready"
    if not group_table.open:
        return f"{ready}, none is in play"
    nearest = min(group_table.open, key=_unfinished)
    return (
        f"{ready}; {len(nearest.finished)} of {nearest.size} trajectories of {nearest.task_id} "
        f"have ended, {len(nearest.live)} play"
    )


def _unfinished(group: Group) -> tuple[int, int]:
    """Return a sort key: the group that needs the fewest trajectories first."""
    return group.size - len(group.finished), group.number
