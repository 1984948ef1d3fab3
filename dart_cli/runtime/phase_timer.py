"""Where a process's time goes: one phase at a time, every second in exactly one of them.

PhaseTimer  seconds by phase
as_gauges  the same in a heartbeat
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

PREFIX = "seconds."
"""Prefix of the gauges that hold a PhaseTimer; `dart data` keeps their newest values by process."""


class PhaseTimer:
    """Seconds by phase since it was made, the present phase up to now included."""

    def __init__(
        self, phases: Iterable[str], now: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`phases` are all that may be entered, `now` is the one to begin with."""
        self._seconds = dict.fromkeys(phases, 0.0)
        self._clock = clock
        self._phase = now
        self._since = clock()

    @property
    def phase(self) -> str:
        """The present phase."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Enter `phase`, one of those named at the start."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds; they add up to the time since the start."""
        running = self._clock() - self._since
        return self._seconds | {self._phase: self._seconds[self._phase] + running}


def as_gauges(splits: Iterable[PhaseTimer]) -> dict[str, float]:
    """The sum of several splits, as gauges of a heartbeat: `seconds.PHASE`."""
    gauges: dict[str, float] = {}
    for timer in splits:
        for phase, seconds in timer.seconds().items():
            gauges[PREFIX + phase] = gauges.get(PREFIX + phase, 0.0) + seconds
    return gauges
