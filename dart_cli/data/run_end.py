"""The end of a run: its bounds, and how long it is announced.

RunEnd    whether the run is over, why, and when this process may follow it
learned   whether train.stop_at has ended a run, in a line
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from bus.heartbeat import Liveness
from bus.messages import PLAYERS, Heartbeat
from dart_cli.config.schema import Config, TrainConfig
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.writer import Store

log = logging.getLogger(__name__)

STOP_S = 10.0
"""Longest time the service stays up for the other processes after the run is over."""
STOP_LEAST_S = 2.0
"""Shortest such time; a process unheard for as long is no longer waited for."""


def learned(success: float, updates: int, train: TrainConfig) -> str:
    """The line of a run that ends since its tasks' success is at least this; empty if it is too low."""
    if not 0 < train.stop_at <= success:
        return ""
    return (
        f"learned: success is at least {math.floor(1000 * success) / 1000:.3f} (train.stop_at = "
        f"{train.stop_at:g}); ends after {updates} of {train.updates} updates"
    )


class RunEnd:
    """The end of one run; made inside a running loop."""

    def __init__(self, config: Config, store: Store, ledger: Ledger, liveness: Liveness) -> None:
        self.reason = ""
        """Why the run is over; empty while it goes on."""
        self._train = config.train
        self._store = store
        self._ledger = ledger
        self._liveness = liveness
        self._over = asyncio.Event()
        self._over_at = 0.0  # monotonic seconds
        self._known = store.run().learned

    @property
    def is_over(self) -> bool:
        """Whether the run is over."""
        return self._over.is_set()

    def bound(self, served_s: float) -> str:
        """The bound that the run has reached after `served_s` seconds; empty if none."""
        train, ledger = self._train, self._ledger
        if line := self._learned():
            return line
        if ledger.updates >= train.updates:
            return f"{ledger.updates} updates are done"
        if 0 < train.max_trajectories <= ledger.trajectories and not self._is_trained_on():
            return f"{ledger.trajectories} trajectories were played"
        if 0 < 60 * train.max_minutes <= served_s:
            return f"{train.max_minutes:g} minutes are over"
        return ""

    def _learned(self) -> str:
        """The line of `learned`, kept in the database for the next start: trajectories still come in."""
        if not self._train.stop_at:
            return ""
        success = self._ledger.progress.newest_success().bound
        if self._train.stop_at <= success and success > self._known:
            self._known = success
            self._store.save_learned(success)
        return learned(self._known, self._ledger.updates, self._train)

    def finish(self, reason: str) -> bool:
        """The run is over; False if it was already."""
        if self.is_over:
            return False
        log.info("the run is over: %s", reason)
        self.reason = reason
        self._over_at = time.monotonic()
        self._over.set()
        return True

    async def announced(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set, or the run is over and the other processes had time to hear it."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            while not stop.is_set():
                announced_s = time.monotonic() - self._over_at
                others = [beat for beat in self._liveness.alive() if self._is_heard(beat)]
                if announced_s >= STOP_S or (announced_s >= STOP_LEAST_S and not others):
                    self._store.save_stop_reason("")
                    return
                await asyncio.sleep(0.1)
        finally:
            for wait in waits:
                wait.cancel()

    def _is_trained_on(self) -> bool:
        """Whether a living trainer has a batch left to train on, once nothing more is played."""
        has_trainer = any(beat.role == "train" for beat in self._liveness.alive())
        return has_trainer and self._ledger.has_batch

    def _is_heard(self, beat: Heartbeat) -> bool:
        """Whether another process of the run was heard in the last moments."""
        return beat.role in (*PLAYERS, "rollout", "train") and (
            self._liveness.silent_s(beat.worker) < STOP_LEAST_S
        )
