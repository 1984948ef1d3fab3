"""The end of a run: its bounds, and how long this process outlives it.

RunEnd    whether the run is over, why, what is waited for, and when this process may end
learned   whether train.stop_at has ended a run, in a line

The order of an ending, however it begins:

    data             leases nothing more, and announces the end each second (RunState)
    env, rollout     end at once; data waits for them for STOP_S at most
    train            finishes its update, publishes, acknowledges, writes its last checkpoint, within
                     LAST_WORK_S of dart_cli/runtime/role.py; its heartbeats say what it finishes
    data             ends after the trainer, or TRAINER_S after the run

So what the trainer did is counted before anything reads the database. Where it was killed, or took longer, the
updates in the newest announced weights count, and no others (Ledger.settle_end).

A signal ends this process alone: at once where the trainer goes on, and after the trainer where that ends, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time

from bus.errors import AttentionError
from bus.heartbeat import Liveness
from bus.messages import PLAYERS, Heartbeat
from dart_cli.config.schema import Config, TrainConfig
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.writer import Store
from dart_cli.runtime.liveness import process_liveness
from dart_cli.runtime.role import GRACE_S, LAST_WORK_S, finishing

log = logging.getLogger(__name__)

STOP_S = 10.0
"""Longest time the service stays up for the other processes after the run is over."""
STOP_LEAST_S = 2.0
"""Shortest such time; a process unheard for as long is no longer waited for."""
LOOK_S = 0.1
"""Between two looks whether what is waited for has ended."""
_UNDER_WAY = ("waiting", "training", "syncing")
"""States of a trainer that may have something to report when it ends."""
UNATTENDED = "it needed attention"
"""What the reason of such an end begins with."""
TRAINER_S = LAST_WORK_S + 3 * GRACE_S
"""Longest time that the service stays up for a trainer that finishes its work: longer than that may take."""


def learned(success: float, train: TrainConfig) -> str:
    """Return the line of a run that ends since its tasks' success is at least this; empty if it is too low."""
    if not 0 < train.stop_at <= success:
        return ""
    proved = math.floor(1000 * success) / 1000
    return f"learned: success is at least {proved:.3f} (train.stop_at = {train.stop_at:g})"


class RunEnd:
    """The end of one run; made inside a running loop."""

    def __init__(self, config: Config, store: Store, ledger: Ledger, liveness: Liveness) -> None:
        self.reason = ""
        """Why the run is over; empty while it goes on."""
        self.awaited = ""
        """What this process waits for before it ends, after `waits for`; empty if nothing."""
        self._train = config.train
        self._store = store
        self._ledger = ledger
        self._liveness = liveness
        self._over = asyncio.Event()
        self._known = store.run().learned
        self._attention = ""  # what the run needs it for; empty if it does not
        self._attention_since = 0.0  # monotonic seconds

    @property
    def is_over(self) -> bool:
        """Whether the run is over."""
        return self._over.is_set()

    def bound(self, served_s: float) -> str:
        """Return the bound that the run has reached after `served_s` seconds; empty if none."""
        train, ledger = self._train, self._ledger
        if line := self._learned():
            return line
        if ledger.updates >= train.updates:
            return f"{ledger.updates} updates are done"
        if 0 < train.max_trajectories <= ledger.trajectories and not self._is_trained_on():
            return f"{ledger.trajectories} trajectories were played"
        if 0 < 60 * train.max_minutes <= served_s:
            return f"{train.max_minutes:g} minutes are over"
        return self._unattended()

    def note_attention(self, what: str) -> None:
        """Note what the run needs attention for at the moment; a moment without it begins the count anew."""
        if not self._attention:
            self._attention_since = time.monotonic()
        self._attention = what

    def discount_pause(self, seconds: float) -> None:
        """Note that this process stood still for so long."""
        self._attention_since += seconds

    def _unattended(self) -> str:
        """Return the line of a run that has needed attention for train.attention_minutes; else nothing."""
        needed_s = time.monotonic() - self._attention_since
        if not (self._attention and 0 < 60 * self._train.attention_minutes <= needed_s):
            return ""
        minutes = self._train.attention_minutes
        return f"{UNATTENDED} for {minutes:g} minutes (train.attention_minutes): {self._attention}"

    def _learned(self) -> str:
        """Return the line of `learned`, kept in the database for the next start: trajectories still come in."""
        if not self._train.stop_at:
            return ""
        success = self._ledger.progress.newest_success().bound
        if self._train.stop_at <= success and success > self._known:
            self._known = success
            self._store.save_learned(success)
        return learned(self._known, self._train)

    def finish(self, reason: str) -> bool:
        """Note that the run is over; return False if it was over already."""
        if self.is_over:
            return False
        log.info("the run is over: %s", reason)
        self.reason = reason
        self._over.set()
        return True

    async def wait_for_end(self, stop: asyncio.Event) -> None:
        """Return when this process may end: see the module. Raises AttentionError where it ends for that."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            with finishing("waiting for the trainer to end", TRAINER_S + GRACE_S):
                await self._others_end(stop)
        finally:
            for wait in waits:
                wait.cancel()
        if self.is_over or not any(map(self._goes_on, self._liveness.alive("train"))):
            self._ledger.settle_end()
        if self.is_over and not stop.is_set():
            self._store.save_stop_reason("")
        if self.reason.startswith(UNATTENDED):
            raise AttentionError(f"{self.reason}; once that is fixed, the same command goes on")

    async def _others_end(self, stop: asyncio.Event) -> None:
        """Wait for the processes that are still to be served, with what is awaited in `awaited`."""
        began = time.monotonic()
        while True:
            since_s = time.monotonic() - began
            if (trainer := self._awaited_trainer(since_s)) is not None:
                if since_s >= TRAINER_S:
                    log.warning("does not wait any longer for %s", self.awaited)
                    self.awaited = ""
                    return
                what = trainer.waiting_for or "its process to end"
                self.awaited = f"{trainer.worker}: {what}, {TRAINER_S:.0f} s at most"
            else:
                self.awaited = ""
                if stop.is_set() or not self._is_to_be_announced(since_s):
                    return
            await asyncio.sleep(LOOK_S)

    def _is_to_be_announced(self, since_s: float) -> bool:
        """Return True if others than the trainer may not have heard of an end that began so long ago."""
        if since_s < STOP_LEAST_S:
            return True
        others = (*PLAYERS, "rollout")
        return since_s < STOP_S and any(
            beat.role in others and self._is_heard(beat) for beat in self._liveness.alive()
        )

    def _awaited_trainer(self, since_s: float) -> Heartbeat | None:
        """Return the heartbeat of the trainer that this process outlives; None if there is none.

        Where this process alone was asked to end, the trainer has STOP_LEAST_S to say that it ends, too: one that
        waits for a batch may have updates that it has not published yet.
        """
        for beat in self._liveness.alive("train"):
            may_end = since_s < STOP_LEAST_S and beat.state in _UNDER_WAY
            is_awaited = self.is_over or may_end or not self._goes_on(beat)
            if is_awaited and not (self._has_finished(beat) or self._is_gone(beat)):
                return beat
        return None

    def _has_finished(self, trainer: Heartbeat) -> bool:
        """Return True if nothing is heard any more of a trainer that had nothing left to do."""
        return not trainer.waiting_for and not self._is_heard(trainer)

    def _goes_on(self, trainer: Heartbeat) -> bool:
        """Return True if the trainer lives, and has not said that it ends."""
        return trainer.state != "stopping" and not self._is_gone(trainer)

    def _is_gone(self, beat: Heartbeat) -> bool:
        """Return True if the process was on this host, and is there no more."""
        is_here = beat.host == socket.gethostname()
        silent_s = self._liveness.silent_s(beat.worker)
        return is_here and process_liveness(beat.pid, silent_s=silent_s) == "gone"

    def _is_trained_on(self) -> bool:
        """Whether a living trainer has a batch left to train on, once nothing more is played."""
        has_trainer = any(beat.role == "train" for beat in self._liveness.alive())
        return has_trainer and self._ledger.has_batch

    def _is_heard(self, beat: Heartbeat) -> bool:
        """Return True if the process was heard in the last moments."""
        return self._liveness.silent_s(beat.worker) < STOP_LEAST_S
