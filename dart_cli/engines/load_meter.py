"""The load of an engine: seconds by phase, and how full its batch is."""

from __future__ import annotations

import time
from collections.abc import Callable

from dart_cli.runtime.phase_timer import PhaseTimer, as_gauges

PHASES = ("starting", "idle", "busy", "syncing")


class LoadMeter:
    """Assigns every second of an engine to one phase; the engine reports each change.

    `starting` is the time before the first weights, `syncing` the later halts for weights, `busy`
    the time with at least one running request. Not thread-safe: the engine holds a lock.
    """

    def __init__(
        self, max_batch: int, *, serves: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`serves`: the engine has weights already."""
        self._timer = PhaseTimer(PHASES, "idle" if serves else "starting", clock)
        self._clock = clock
        self._max_batch = max_batch
        self._serves = serves
        self._halted = False
        self._running = 0
        self._load_s = 0.0
        self._since = clock()

    def run(self, running: int) -> None:
        """From now on `running` requests are running."""
        if running != self._running:
            self._settle()
            self._running = running
            self._enter()

    def halt(self) -> None:
        """The engine halts for new weights."""
        self._settle()
        self._halted = True
        self._enter()

    def go(self) -> None:
        """The engine serves with new weights."""
        self._settle()
        self._halted, self._serves = False, True
        self._enter()

    def gauges(self) -> dict[str, float]:
        """`seconds.PHASE`, and `load_s`: the integral of running requests / max_batch over `busy`."""
        self._settle()
        return as_gauges([self._timer]) | {"load_s": self._load_s}

    def _settle(self) -> None:
        now = self._clock()
        if self._timer.phase == "busy":
            self._load_s += (now - self._since) * self._running / self._max_batch
        self._since = now

    def _enter(self) -> None:
        phase = "busy" if self._running else "idle"
        if not self._serves:
            phase = "starting"
        elif self._halted:
            phase = "syncing"
        if phase != self._timer.phase:
            self._timer.enter(phase)
