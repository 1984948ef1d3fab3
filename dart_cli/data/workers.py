"""The other processes of the run, by their heartbeats: which live, and how they spend their time.

    WorkerWatch   notes each heartbeat, and takes back the leases and permits of processes that are dead
    TokenWatch    measures for how long each rollout worker has produced no token
    StartsWatch   counts how often each process was started again within a day
    Usage         adds up the seconds of all processes by phase

Every heartbeat reports how many seconds its process has spent in each phase since it began
(dart_cli/runtime/waits.py). `Usage` adds them up by role: over the last minute, for the status page, and in
total, over restarts of any process, `dart data` included. A process accounts for `capacity` seconds in each
second: an environment process for its slots, any other process for one. The time between a dead process's
last heartbeat and its successor's first is `dead`, less what the successor accounts for. A process that
announced its end is not dead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bus.heartbeat import DEAD_AFTER_S, FORGET_AFTER_S, Liveness
from bus.messages import PLAYERS, Heartbeat, Role
from bus.snapshot import UsageView
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.rows import ProcessRow, UsageRow
from dart_cli.data.store.writer import Store
from dart_cli.data.versions import Permits
from dart_cli.runtime.supervisor import RESTARTS, Restarts
from dart_cli.runtime.waits import PREFIX

log = logging.getLogger(__name__)

WORKING: tuple[Role, ...] = ("env", "rollout", "train")
"""The roles without which the run does not go on."""
TOKENS = "tokens"
"""A rollout worker's gauge of the tokens that it has produced."""
WINDOW_S = 60
"""Length of the window of recent phases."""
DEAD = "dead"
"""The phase of a process between its death and its successor."""


class WorkerWatch:
    """The processes of the run, by their heartbeats.

    Its size is bounded by the number of workers' names. It is not thread-safe: one event loop owns it.
    """

    def __init__(self, ledger: Ledger, permits: Permits, liveness: Liveness, usage: Usage) -> None:
        self.liveness = liveness
        self.usage = usage
        self.tokens = TokenWatch()
        self.starts = StartsWatch()
        self._ledger = ledger
        self._permits = permits

    def observe(self, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat and renew its leases; return True if a held request may be answered now."""
        before = self.liveness.get(heartbeat.worker)
        is_new = self.liveness.observe(heartbeat)
        if is_new:
            log.info("%s joined: pid %d on %s", heartbeat.worker, heartbeat.pid, heartbeat.host)
        self.starts.observe(heartbeat, time.monotonic())
        self.usage.observe(heartbeat, time.monotonic())
        self.tokens.observe(heartbeat)
        self._ledger.renew(heartbeat.trajectories)
        if heartbeat.role != "rollout":
            return False
        is_changed = self._ledger.versions.observe(heartbeat, is_new)
        # A worker may have a permit before its first heartbeat arrives, especially when this data service has
        # just started. So only the heartbeat of a successor ends the permit of its predecessor.
        is_successor = before is not None and before.started_at != heartbeat.started_at
        if is_successor or heartbeat.state == "stopping":
            is_changed |= self._permits.free(heartbeat.worker) is not None
        return is_changed

    def check(self) -> bool:
        """Take back the leases and permits of dead processes; forget processes that had announced their end.

        Return True if a held request may be answered now.
        """
        is_changed = self._ledger.take_back_expired() > 0
        for beat in self.liveness.dead():
            worker, has_ended = beat.worker, beat.state == "stopping"
            is_changed |= self._ledger.take_back_from(worker, has_ended=has_ended) > 0
            held_s = self._permits.free(worker)
            if held_s is not None:
                is_changed = True
                log.warning(
                    "%s is gone with the permit to take weights, which it had for %.0f s; the next worker may take them",
                    worker,
                    held_s,
                )
            is_changed |= self._ledger.versions.forget(worker)
            self.tokens.forget(worker)
            if has_ended:
                self.liveness.forget(worker)
        for worker in self._permits.expire():
            is_changed = True
            log.warning(
                "%s has not taken weights within %g s; the next worker may take them",
                worker,
                self._permits.deadline_s,
            )
        self.usage.tend(time.monotonic())
        return is_changed

    def absent(self) -> list[Role]:
        """Return the roles of env (or serve), rollout and train that have no living process."""
        alive = {beat.role for beat in self.liveness.alive()}
        if not alive.isdisjoint(PLAYERS):
            alive.add("env")
        return [role for role in WORKING if role not in alive]

    def discount_pause(self, seconds: float) -> None:
        """Do not count a time in which this process was stopped and received no heartbeat."""
        self.liveness.discount_pause(seconds)
        self.usage.discount_pause(seconds)

    def save(self, store: Store) -> None:
        """Store each worker's newest heartbeat and its seconds by phase."""
        now = time.time()
        store.save_processes(
            process_row(beat, now - self.liveness.silent_s(beat.worker))
            for beat in (*self.liveness.alive(), *self.liveness.dead())
        )
        store.save_usage(self.usage.changed())


def process_row(beat: Heartbeat, heard_at: float) -> ProcessRow:
    """Return the row of a heartbeat that came at `heard_at` (unix seconds)."""
    return ProcessRow(
        worker=beat.worker,
        role=beat.role,
        host=beat.host,
        started_at=beat.started_at,
        heard_at=heard_at,
        policy_version=beat.policy_version,
        state=beat.state,
        waiting_for=beat.waiting_for,
        waiting_s=beat.waiting_s,
    )


class StartsWatch:
    """Counts of how often each process was started again within a day, since this `dart data` began."""

    def __init__(self) -> None:
        self._started_at: dict[str, float] = {}  # by worker, unix seconds
        self._restarts: dict[str, Restarts] = {}

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat that came at `now` (monotonic seconds)."""
        worker, started_at = heartbeat.worker, heartbeat.started_at
        before = self._started_at.get(worker, started_at)
        self._started_at[worker] = max(before, started_at)
        if started_at > before:
            self._restarts.setdefault(worker, Restarts()).add(now)

    def often(self, now: float) -> dict[str, int]:
        """Return the restarts of each process that had more than RESTARTS of them in the day before `now`."""
        counts = {
            worker: restarts.within_day(now) for worker, restarts in sorted(self._restarts.items())
        }
        return {worker: number for worker, number in counts.items() if number > RESTARTS}


@dataclass
class _WorkerTokens:
    tokens: float
    has_requests: bool
    since: float  # monotonic seconds


class TokenWatch:
    """The time since each rollout worker last produced a token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: dict[str, _WorkerTokens] = {}

    def observe(self, heartbeat: Heartbeat) -> None:
        """Note a rollout worker's heartbeat."""
        gauges = heartbeat.gauges
        if TOKENS not in gauges:
            self._work.pop(heartbeat.worker, None)
            return
        has_requests = gauges.get("in_flight", 0.0) + gauges.get("waiting", 0.0) > 0
        before = self._work.get(heartbeat.worker)
        tokens = gauges[TOKENS]
        if before is None or before.tokens != tokens or not (before.has_requests and has_requests):
            self._work[heartbeat.worker] = _WorkerTokens(tokens, has_requests, self._clock())

    def seconds(self, worker: str) -> float:
        """Return for how many seconds the worker's requests produced no token; 0 without requests."""
        work = self._work.get(worker)
        return self._clock() - work.since if work and work.has_requests else 0.0

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._work.pop(worker, None)


@dataclass
class _WorkerUsage:
    """The time of the processes that had one name, one after the other."""

    role: str
    started_at: float  # unix seconds; tells which process has the name now
    # Seconds by phase of that process, as its newest heartbeat reports them.
    seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)  # of its predecessors, and between them
    capacity: float = 1.0
    heard_at: float | None = None  # monotonic seconds; None before a heartbeat to this process
    has_left: bool = False  # its last heartbeat announced its end
    dead_s: float = 0.0  # part of its present silence that is booked as dead
    is_saved: bool = True

    def total(self) -> dict[str, float]:
        """Return the seconds by phase of all processes of this name."""
        return _sum(self.before, self.seconds)


class _RecentPhases:
    """The seconds by phase of one role in the last WINDOW_S seconds, in buckets of a second."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, dict[str, float]]] = deque()

    def add(self, now: float, phases: Mapping[str, float]) -> None:
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, {}))
        bucket = self._buckets[-1][1]
        for phase, seconds in phases.items():
            bucket[phase] = bucket.get(phase, 0.0) + seconds
        self._forget(now)

    def sums(self, now: float) -> dict[str, float]:
        self._forget(now)
        sums: dict[str, float] = {}
        for _, bucket in self._buckets:
            sums = _sum(sums, bucket)
        # Time booked as dead is taken back, in a later bucket, if the process sends a heartbeat after all.
        return {phase: max(seconds, 0.0) for phase, seconds in sums.items()}

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_S:
            self._buckets.popleft()


class Usage:
    """The time of all processes of a run; its size is bounded by the number of workers' names."""

    def __init__(self, saved: Iterable[UsageRow] = ()) -> None:
        """Go on from the rows of an earlier `dart data`."""
        self._workers: dict[str, _WorkerUsage] = {}
        self._windows: dict[str, _RecentPhases] = {}
        for row in saved:
            worker = self._workers.setdefault(row.worker, _WorkerUsage(row.role, row.started_at))
            worker.seconds[row.phase] = row.seconds
            worker.before[row.phase] = row.before_s

    def observe(self, beat: Heartbeat, now: float) -> None:
        """Book a heartbeat that came at `now` (monotonic seconds)."""
        worker = self._workers.get(beat.worker)
        if worker is None:
            worker = self._workers[beat.worker] = _WorkerUsage(beat.role, beat.started_at)
        if beat.started_at < worker.started_at:
            return  # a late heartbeat of its predecessor, or two processes have the same name
        reported = _phases(beat.gauges)
        if beat.started_at > worker.started_at:
            self._succeed(worker, beat, reported, now)
        elif worker.dead_s:  # it was only silent, and reports that time itself
            self._book_dead(worker, -worker.dead_s, now)
        gained = {
            phase: max(seconds - worker.seconds.get(phase, 0.0), 0.0)
            for phase, seconds in reported.items()
        }
        if reported:
            worker.seconds = reported
        worker.role = beat.role
        worker.capacity = max(beat.gauges.get("slots", 1.0), 1.0) if beat.role in PLAYERS else 1.0
        worker.heard_at, worker.dead_s, worker.is_saved = now, 0.0, False
        worker.has_left = beat.state == "stopping"
        self._window(beat.role).add(now, _at_most(gained, worker.capacity * WINDOW_S))

    def tend(self, now: float) -> None:
        """Book the time up to `now` of workers that have been silent for too long as dead."""
        for worker in self._workers.values():
            if worker.heard_at is None or worker.has_left:
                continue
            silent_s = min(now - worker.heard_at, FORGET_AFTER_S)
            if silent_s > DEAD_AFTER_S:
                self._book_dead(worker, worker.capacity * silent_s - worker.dead_s, now)

    def discount_pause(self, seconds: float) -> None:
        """Do not count a time in which this process was stopped and received no heartbeat."""
        for worker in self._workers.values():
            if worker.heard_at is not None:
                worker.heard_at += seconds

    def by_role(self, now: float) -> dict[str, UsageView]:
        """Return the seconds by phase of each role, in the last minute and in total."""
        totals: dict[str, dict[str, float]] = {}
        for worker in self._workers.values():
            if total := worker.total():
                totals[worker.role] = _sum(totals.get(worker.role, {}), total)
        return {
            role: UsageView(minute=self._window(role).sums(now), total=total)
            for role, total in sorted(totals.items())
        }

    def changed(self) -> list[UsageRow]:
        """Return the rows of the workers whose time has changed since the last call."""
        rows = []
        for name, worker in self._workers.items():
            if worker.is_saved:
                continue
            worker.is_saved = True
            rows += [
                UsageRow(
                    worker=name,
                    phase=phase,
                    role=worker.role,
                    started_at=worker.started_at,
                    seconds=worker.seconds.get(phase, 0.0),
                    before_s=worker.before.get(phase, 0.0),
                )
                for phase in {**worker.before, **worker.seconds}
            ]
        return rows

    def _succeed(
        self, worker: _WorkerUsage, beat: Heartbeat, reported: Mapping[str, float], now: float
    ) -> None:
        """Begin to count the time of a new process of the worker's name."""
        worker.before = worker.total()
        worker.seconds = {}
        worker.started_at = beat.started_at
        if worker.heard_at is not None and not worker.has_left:
            gap_s = worker.capacity * min(now - worker.heard_at, FORGET_AFTER_S)
            self._book_dead(worker, max(gap_s - sum(reported.values()) - worker.dead_s, 0.0), now)

    def _book_dead(self, worker: _WorkerUsage, seconds: float, now: float) -> None:
        worker.before[DEAD] = worker.before.get(DEAD, 0.0) + seconds
        worker.dead_s += seconds
        worker.is_saved = False
        limit = worker.capacity * WINDOW_S
        self._window(worker.role).add(now, {DEAD: max(min(seconds, limit), -limit)})

    def _window(self, role: str) -> _RecentPhases:
        return self._windows.setdefault(role, _RecentPhases())


def _phases(gauges: Mapping[str, float]) -> dict[str, float]:
    """Return phase -> seconds, from a heartbeat's gauges."""
    return {
        name.removeprefix(PREFIX): seconds
        for name, seconds in gauges.items()
        if name.startswith(PREFIX)
    }


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two tables of seconds by phase."""
    return {
        phase: one.get(phase, 0.0) + other.get(phase, 0.0)
        for phase in dict.fromkeys([*one, *other])
    }


def _at_most(phases: Mapping[str, float], limit: float) -> dict[str, float]:
    """Return the seconds by phase, scaled down if their sum is above `limit`."""
    total = sum(phases.values())
    scale = limit / total if total > limit else 1.0
    return {phase: seconds * scale for phase, seconds in phases.items()}
