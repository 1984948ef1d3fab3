"""The other processes of the run, as their heartbeats show them: which live, what they hold.

WorkerWatch   notes each heartbeat; takes leases and permits back from processes that are dead
"""

from __future__ import annotations

import logging
import time

from bus.heartbeat import Liveness
from bus.messages import PLAYERS, Heartbeat, Role
from dart_cli.data.ledger import Ledger
from dart_cli.data.permits import Permits
from dart_cli.data.stall_monitor import ProgressMonitor
from dart_cli.data.store.writer import Store
from dart_cli.data.usage import Usage

log = logging.getLogger(__name__)

WORKING: tuple[Role, ...] = ("env", "rollout", "train")
"""Without a process of each the run does not go on."""


class WorkerWatch:
    """Bounded by the number of workers' names. Not thread-safe: one event loop owns it."""

    def __init__(self, ledger: Ledger, permits: Permits, liveness: Liveness, usage: Usage) -> None:
        self.liveness = liveness
        self.usage = usage
        self.token_progress = ProgressMonitor()
        self._ledger = ledger
        self._permits = permits

    def observe(self, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat and renew its leases; whether a held request may be answered now."""
        before = self.liveness.get(heartbeat.worker)
        is_new = self.liveness.observe(heartbeat)
        if is_new:
            log.info("%s joined: pid %d on %s", heartbeat.worker, heartbeat.pid, heartbeat.host)
        self.usage.observe(heartbeat, time.monotonic())
        self.token_progress.observe(heartbeat)
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

        Returns whether a held request may be answered now.
        """
        is_changed = self._ledger.take_back_expired() > 0
        for gone in self.liveness.dead():
            is_changed |= self._ledger.take_back_from(gone.worker) > 0
            held_s = self._permits.free(gone.worker)
            if held_s is not None:
                is_changed = True
                log.warning(
                    "%s is gone with the permit to take weights, which it had for %.0f s; "
                    "the next one may",
                    *(gone.worker, held_s),
                )
            is_changed |= self._ledger.versions.forget(gone.worker)
            self.token_progress.forget(gone.worker)
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
        heard = [*self.liveness.alive(), *self.liveness.dead()]
        beats = {beat.worker: beat for beat in heard}
        now = time.time()
        store.save_processes(
            beats, {worker: now - self.liveness.silent_s(worker) for worker in beats}
        )
        store.save_usage(self.usage.changed())
