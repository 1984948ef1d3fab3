"""The end of a run: its bounds, and how long the data service outlives it.

    RunEnd         decides when the run is over and when this process may end
    learned_line   the line about a run that train.stop_at has ended

A run ends in this order, whatever ended it:

    data             leases nothing more, and announces the end each second (RunState)
    env, rollout     end at once; the data service waits for them for at most STOP_S
    train            finishes its update, publishes, acknowledges and writes its last checkpoint, within
                     LAST_WORK_S of dart_cli/runtime/role.py; its heartbeats say what it is finishing
    data             ends after the trainer, or TRAINER_S after the end of the run

So the trainer's updates are counted before anything reads the database. If the trainer was killed or took
longer, the updates in the newest published weights count, and no others (Ledger.settle_end).

A signal ends this process alone: at once if the trainer goes on, and after the trainer if that ends, too.
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
"""Longest time for which the service waits for environment processes and rollout workers after the run is
over."""
STOP_LEAST_S = 2.0
"""Shortest such time; a process without a heartbeat for so long is not waited for any more."""
LOOK_S = 0.1
"""Time between two checks whether the awaited processes have ended."""
_UNDER_WAY = ("waiting", "training", "syncing")
"""States of a trainer that may have something to report when it ends."""
UNATTENDED = "it needed attention"
"""The beginning of the reason of a run that train.attention_minutes has ended."""
TRAINER_S = LAST_WORK_S + 3 * GRACE_S
"""Longest time for which the service waits for a trainer that finishes its work; it is longer than that
work may take."""


def learned_line(success: float, train: TrainConfig) -> str:
    """Return the line which says that the tasks' success is at least `success`, rounded down.

    It is empty if `success` is below train.stop_at, so that it does not end the run.
    """
    if not 0 < train.stop_at <= success:
        return ""
    proved = math.floor(1000 * success) / 1000
    return f"learned: success is at least {proved:.3f} (train.stop_at = {train.stop_at:g})"


class RunEnd:
    """The end of one run; it must be made inside a running event loop."""

    def __init__(self, config: Config, store: Store, ledger: Ledger, liveness: Liveness) -> None:
        self.reason = ""
        """Why the run is over; empty while it goes on."""
        self.awaited = ""
        """What this process waits for before it ends, worded to follow "waits for"; empty if nothing."""
        self._train = config.train
        self._store = store
        self._ledger = ledger
        self._liveness = liveness
        self._over = asyncio.Event()
        self._success = store.run().learned  # the highest bound so far, over all starts
        self._attention = ""  # what the run needs attention for; empty if nothing
        self._attention_since = 0.0  # monotonic seconds

    @property
    def is_over(self) -> bool:
        """True once the run is over."""
        return self._over.is_set()

    def bound(self, served_s: float) -> str:
        """Return which bound the run has reached after `served_s` seconds, in words; empty if none."""
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
        """Note what the run needs attention for now; an empty text ends the count of minutes."""
        if not self._attention:
            self._attention_since = time.monotonic()
        self._attention = what

    def discount_pause(self, seconds: float) -> None:
        """Extend the deadlines by a time in which this process was stopped."""
        self._attention_since += seconds

    def _unattended(self) -> str:
        """Return the line of a run that has needed attention for too long; else an empty text."""
        minutes = self._train.attention_minutes
        needed_s = time.monotonic() - self._attention_since
        if not (self._attention and 0 < 60 * minutes <= needed_s):
            return ""
        return f"{UNATTENDED} for {minutes:g} minutes (train.attention_minutes): {self._attention}"

    def _learned(self) -> str:
        """Return the text of `learned_line` for the highest success so far.

        The success is stored, since trajectories that end later may lower it before the next start.
        """
        if not self._train.stop_at:
            return ""
        success = self._ledger.progress.newest_success().bound
        if self._train.stop_at <= success and success > self._success:
            self._success = success
            self._store.save_learned(success)
        return learned_line(self._success, self._train)

    def finish(self, reason: str) -> bool:
        """End the run for this reason; return False if it was over already."""
        if self.is_over:
            return False
        log.info("the run is over: %s", reason)
        self.reason = reason
        self._over.set()
        return True

    async def wait_for_end(self, stop: asyncio.Event) -> None:
        """Wait until this process may end, in the order that the module describes.

        Raises AttentionError if train.attention_minutes has ended the run.
        """
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
        """Wait for the processes that still have to be served; `awaited` says which."""
        started_at = time.monotonic()
        while True:
            since_s = time.monotonic() - started_at
            if (trainer := self._awaited_trainer(since_s)) is not None:
                if since_s >= TRAINER_S:
                    log.warning("the data service does not wait any longer for %s", self.awaited)
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
        """Return True if players or rollout workers may not know yet of an end `since_s` ago."""
        if since_s < STOP_LEAST_S:
            return True
        others = (*PLAYERS, "rollout")
        return since_s < STOP_S and any(
            beat.role in others and self._is_heard(beat) for beat in self._liveness.alive()
        )

    def _awaited_trainer(self, since_s: float) -> Heartbeat | None:
        """Return the heartbeat of the trainer that this process waits for; None if there is none.

        If a signal ends this process, the trainer has STOP_LEAST_S to report that it ends, too: even a
        trainer that waits for a batch may have updates that it has not published yet.
        """
        for beat in self._liveness.alive("train"):
            may_end = since_s < STOP_LEAST_S and beat.state in _UNDER_WAY
            is_awaited = self.is_over or may_end or not self._goes_on(beat)
            if is_awaited and not (self._has_finished(beat) or self._is_gone(beat)):
                return beat
        return None

    def _has_finished(self, trainer: Heartbeat) -> bool:
        """Return True if the trainer had nothing left to do and sends no more heartbeats."""
        return not trainer.waiting_for and not self._is_heard(trainer)

    def _goes_on(self, trainer: Heartbeat) -> bool:
        """Return True if the trainer lives and has not announced its end."""
        return trainer.state != "stopping" and not self._is_gone(trainer)

    def _is_gone(self, beat: Heartbeat) -> bool:
        """Return True if the process ran on this host and does not exist any more."""
        is_here = beat.host == socket.gethostname()
        silent_s = self._liveness.silent_s(beat.worker)
        return is_here and process_liveness(beat.pid, silent_s=silent_s) == "gone"

    def _is_trained_on(self) -> bool:
        """Return True if a living trainer has a batch left to train on, once nothing more is played."""
        has_trainer = any(beat.role == "train" for beat in self._liveness.alive())
        return has_trainer and self._ledger.has_batch

    def _is_heard(self, beat: Heartbeat) -> bool:
        """Return True if the process sent a heartbeat within STOP_LEAST_S."""
        return self._liveness.silent_s(beat.worker) < STOP_LEAST_S
