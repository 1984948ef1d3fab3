"""The other processes of the run, by their heartbeats: which live, what they hold, where time goes.

WorkerWatch   notes each heartbeat; takes leases and permits back from processes that are dead
TokenWatch    how long the requests of each rollout worker have yielded no token
StartsWatch   how often each process was started again within a day
Usage         seconds of all processes by phase

Every heartbeat reports how many seconds its process has spent in each phase since it began
(dart_cli/runtime/waits.py). `Usage` makes of them, by role, the last minute for the status page
and totals that add up over restarts of any process, `dart data` included. A process counts as `capacity`
seconds a second: an environment process its slots, any other one. What a process that died did between
its last heartbeat and the first of its successor is `dead`, less what the successor accounts for itself.
A process that announced its stop is not dead.
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
"""Without a process of each the run does not go on."""
TOKENS = "tokens"
"""Gauge of a rollout worker."""
WINDOW_S = 60
DEAD = "dead"


class WorkerWatch:
    """Bounded by the number of workers' names. Not thread-safe: one event loop owns it."""

    def __init__(self, ledger: Ledger, permits: Permits, liveness: Liveness, usage: Usage) -> None:
        self.liveness = liveness
        self.usage = usage
        self.tokens = TokenWatch()
        self.starts = StartsWatch()
        self._ledger = ledger
        self._permits = permits

    def observe(self, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat and renew its leases; whether a held request may be answered now."""
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
        # A worker may hold a permit before its first heartbeat arrives, above all when this data
        # process has just started: only a successor's heartbeat frees what the old one held.
        is_successor = before is not None and before.started_at != heartbeat.started_at
        if is_successor or heartbeat.state == "stopping":
            is_changed |= self._permits.free(heartbeat.worker) is not None
        return is_changed

    def check(self) -> bool:
        """Take back what silent processes held, and forget those that had announced their stop.

        Return True if a held request may be answered now.
        """
        is_changed = self._ledger.take_back_expired() > 0
        for gone in self.liveness.dead():
            is_changed |= (
                self._ledger.take_back_from(gone.worker, has_ended=gone.state == "stopping") > 0
            )
            held_s = self._permits.free(gone.worker)
            if held_s is not None:
                is_changed = True
                log.warning(
                    "%s is gone with the permit to take weights, which it had for %.0f s; "
                    "the next one may",
                    *(gone.worker, held_s),
                )
            is_changed |= self._ledger.versions.forget(gone.worker)
            self.tokens.forget(gone.worker)
            if gone.state == "stopping":
                self.liveness.forget(gone.worker)
        for worker in self._permits.expire():
            is_changed = True
            log.warning(
                "%s has not taken weights within %g s; the next one may",
                *(worker, self._permits.deadline_s),
            )
        self.usage.tend(time.monotonic())
        return is_changed

    def absent(self) -> list[Role]:
        """Of env (or serve), rollout and train those without a living process."""
        alive = {beat.role for beat in self.liveness.alive()}
        if not alive.isdisjoint(PLAYERS):
            alive.add("env")
        return [role for role in WORKING if role not in alive]

    def discount_pause(self, seconds: float) -> None:
        """No heartbeat was heard for so long because of this process: that silence does not count."""
        self.liveness.discount_pause(seconds)
        self.usage.discount_pause(seconds)

    def save(self, store: Store) -> None:
        """Write down each worker's newest heartbeat, and where its time went."""
        now = time.time()
        store.save_processes(
            process_row(beat, now - self.liveness.silent_s(beat.worker))
            for beat in (*self.liveness.alive(), *self.liveness.dead())
        )
        store.save_usage(self.usage.changed())


def process_row(beat: Heartbeat, heard_at: float) -> ProcessRow:
    """Return a heartbeat that came at `heard_at` (unix seconds), as it is stored."""
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
    """How often each process was started again within a day, since this `dart data` began; bounded by names."""

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
        times = {worker: each.within_day(now) for worker, each in sorted(self._restarts.items())}
        return {worker: number for worker, number in times.items() if number > RESTARTS}


@dataclass
class _WorkerTokens:
    tokens: float
    in_hand: bool
    since: float  # monotonic seconds


class TokenWatch:
    """Rollout workers by the tokens they produce."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: dict[str, _WorkerTokens] = {}

    def observe(self, heartbeat: Heartbeat) -> None:
        """Note a rollout worker's heartbeat."""
        gauges = heartbeat.gauges
        if TOKENS not in gauges:
            self._work.pop(heartbeat.worker, None)
            return
        in_hand = gauges.get("in_flight", 0.0) + gauges.get("waiting", 0.0) > 0
        before = self._work.get(heartbeat.worker)
        tokens = gauges[TOKENS]
        if before is None or before.tokens != tokens or not (before.in_hand and in_hand):
            self._work[heartbeat.worker] = _WorkerTokens(tokens, in_hand, self._clock())

    def seconds(self, worker: str) -> float:
        """How long its requests have yielded no token; 0 where it has none."""
        work = self._work.get(worker)
        return self._clock() - work.since if work and work.in_hand else 0.0

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._work.pop(worker, None)


@dataclass
class _WorkerUsage:
    """The processes that had one name, one after the other."""

    role: str
    started_at: float  # unix seconds: which process it is now
    seconds: dict[str, float] = field(
        default_factory=dict
    )  # of that process, by its newest heartbeat
    before: dict[str, float] = field(default_factory=dict)  # of those before it, and between them
    capacity: float = 1.0
    heard: float | None = None  # monotonic seconds; None: not since this `dart data` began
    has_left: bool = False  # its last heartbeat announced that it stops
    dead_s: float = 0.0  # booked as dead of the present silence
    is_saved: bool = True

    def total(self) -> dict[str, float]:
        """Seconds by phase over all of them."""
        return _added(self.before, self.seconds)


class _RecentPhases:
    """Seconds by phase of one role, in a bucket for each of the last WINDOW_S seconds."""

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
            sums = _added(sums, bucket)
        # Time booked as dead is taken back later, when the process is heard again.
        return {phase: max(seconds, 0.0) for phase, seconds in sums.items()}

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_S:
            self._buckets.popleft()


class Usage:
    """The time of all processes of a run; bounded by the number of workers' names."""

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
            return  # its predecessor's, late; or two processes go by one name
        reported = _phases(beat.gauges)
        if beat.started_at > worker.started_at:
            self._succeed(worker, beat, reported, now)
        elif worker.dead_s:  # it was only silent, and accounts for that time itself
            self._book_dead(worker, -worker.dead_s, now)
        gained = {
            phase: max(seconds - worker.seconds.get(phase, 0.0), 0.0)
            for phase, seconds in reported.items()
        }
        if reported:
            worker.seconds = reported
        worker.role = beat.role
        worker.capacity = max(beat.gauges.get("slots", 1.0), 1.0) if beat.role in PLAYERS else 1.0
        worker.heard, worker.dead_s, worker.is_saved = now, 0.0, False
        worker.has_left = beat.state == "stopping"
        self._window(beat.role).add(now, _at_most(gained, worker.capacity * WINDOW_S))

    def tend(self, now: float) -> None:
        """Book the time of those that have been silent for too long, up to `now`."""
        for worker in self._workers.values():
            if worker.heard is None or worker.has_left:
                continue
            silent_s = min(now - worker.heard, FORGET_AFTER_S)
            if silent_s > DEAD_AFTER_S:
                self._book_dead(worker, worker.capacity * silent_s - worker.dead_s, now)

    def discount_pause(self, seconds: float) -> None:
        """Count no silence against a worker for the `seconds` in which this process heard nothing."""
        for worker in self._workers.values():
            if worker.heard is not None:
                worker.heard += seconds

    def by_role(self, now: float) -> dict[str, UsageView]:
        """Seconds by phase of each role: the last minute, and all."""
        totals: dict[str, dict[str, float]] = {}
        for worker in self._workers.values():
            if total := worker.total():
                totals[worker.role] = _added(totals.get(worker.role, {}), total)
        return {
            role: UsageView(minute=self._window(role).sums(now), total=total)
            for role, total in sorted(totals.items())
        }

    def changed(self) -> list[UsageRow]:
        """Rows of the workers of which something was booked since the last call."""
        rows = []
        for name, worker in self._workers.items():
            if worker.is_saved:
                continue
            worker.is_saved = True
            rows += [
                UsageRow(
                    name,
                    phase,
                    worker.role,
                    worker.started_at,
                    worker.seconds.get(phase, 0.0),
                    worker.before.get(phase, 0.0),
                )
                for phase in {**worker.before, **worker.seconds}
            ]
        return rows

    def _succeed(
        self, worker: _WorkerUsage, beat: Heartbeat, reported: Mapping[str, float], now: float
    ) -> None:
        """Begin the counts of a new process that goes by the worker's name."""
        worker.before = worker.total()
        worker.seconds = {}
        worker.started_at = beat.started_at
        if worker.heard is not None and not worker.has_left:
            gap_s = worker.capacity * min(now - worker.heard, FORGET_AFTER_S)
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
    """Phase -> seconds, of the gauges that hold them."""
    return {
        name.removeprefix(PREFIX): seconds
        for name, seconds in gauges.items()
        if name.startswith(PREFIX)
    }


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        phase: one.get(phase, 0.0) + other.get(phase, 0.0)
        for phase in dict.fromkeys([*one, *other])
    }


def _at_most(phases: Mapping[str, float], limit: float) -> dict[str, float]:
    """Scaled down to add up to `limit`: a process may have been silent for longer than a window."""
    total = sum(phases.values())
    scale = limit / total if total > limit else 1.0
    return {phase: seconds * scale for phase, seconds in phases.items()}
