"""The time budget of a training, and its progress line: loss, held-out rows, and the time left.

Budget         the number of updates of a stage, and its time limit
seconds_left   how long the remaining stages take
HeldOutWatch   measures the model on the held-out rows from time to time
Pace           measures the speed of updates, and writes the note of the progress line
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dart_cli.runtime.tables import minutes
from dart_cli.tune.held_out import Measurement

MEASURE_SHARE = 0.05
"""Largest share of the time that measurements on the held-out rows take."""
FIRST_MEASURE_S = 60.0
"""Seconds before the first measurement, when its duration is not yet known."""
LONG_S = 60.0
"""Seconds; for a longer training, the user reads how to end it earlier."""
RECENT = 10
"""Number of updates whose mean loss is shown: single updates vary."""


@dataclass(frozen=True)
class Budget:
    """The budget of one stage."""

    updates: int
    seconds: float = 0.0  # at most; 0 for no limit

    def share(self, updates: float, seconds: float) -> float:
        """Return the share of the stage, in [0, 1], that is over after `updates` in `seconds`."""
        by_time = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(updates / self.updates, by_time))

    def left_s(self, updates: int, seconds: float, update_s: float) -> float:
        """Return the seconds that the rest of the stage takes, at `update_s` seconds for an update."""
        by_updates = (self.updates - updates) * update_s
        return max(0.0, min(by_updates, self.seconds - seconds) if self.seconds else by_updates)


def seconds_left(budgets: Sequence[Budget], updates: int, seconds: float, update_s: float) -> float:
    """Return the seconds that are left; the first stage of `budgets` has made `updates` in `seconds`."""
    first, *later = budgets
    return first.left_s(updates, seconds, update_s) + sum(
        budget.left_s(0, 0.0, update_s) for budget in later
    )


class HeldOutWatch:
    """Measures the model on the held-out rows from time to time, in at most MEASURE_SHARE of the time."""

    def __init__(
        self,
        measure: Callable[[], Measurement],
        rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._rows = rows
        self._clock = clock
        self._due = clock() + FIRST_MEASURE_S
        self.newest: Measurement | None = None

    def measure_first(self) -> Measurement:
        """Measure the model before its training, and print that, since it may take minutes."""
        sys.stderr.write(f"measuring the model on {self._rows} held-out rows\n")
        return self.measure()

    def measure(self) -> Measurement:
        """Measure now, and plan the next measurement."""
        start = self._clock()
        self.newest = self._measure()
        end = self._clock()
        self._due = end + (end - start) / MEASURE_SHARE
        return self.newest

    def measure_if_due(self) -> None:
        """Measure if enough time has passed since the last measurement."""
        if self._rows and self._clock() >= self._due:
            self.measure()

    @property
    def note(self) -> str:
        """The newest measurement in words; empty before the first one, and without rows."""
        return f"held out: {self.words(self.newest)}" if self.newest else ""

    def words(self, measurement: Measurement) -> str:
        """Return a measurement in words."""
        return f"loss {measurement.loss:.3f}, {measurement.right} of {self._rows} right"


class Pace:
    """Measures the speed of updates in this process, and writes the note of the progress line."""

    def __init__(self, held_out: HeldOutWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._held_out = held_out
        self._clock = clock
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._start = clock()
        self._updates = 0  # of the stage, in this process

    def begin_stage(self) -> None:
        """Forget the updates so far, because the updates of another stage take another time."""
        self._losses.clear()
        self._start, self._updates = self._clock(), 0

    def add(self, loss: float) -> None:
        """Add an update that has ended."""
        self._losses.append(loss)
        self._updates += 1
        self._held_out.measure_if_due()

    @property
    def update_s(self) -> float:
        """Seconds of an update, measurements included."""
        return (self._clock() - self._start) / self._updates

    def note(self, left_s: float) -> str:
        """Return e.g. `loss 0.812, held out: loss 0.93, 12 of 18 right, about 4:10 left`."""
        loss = f"loss {sum(self._losses) / len(self._losses):.3f}" if self._losses else ""
        left = f"about {minutes(left_s)} left" if left_s >= 1 else ""
        return ", ".join(filter(None, (loss, self._held_out.note, left)))


def print_length(
    what: str, updates: int, update_s: float, left_s: float, max_minutes: float
) -> None:
    """Print how long the updates take, by the duration of the first; `left_s` respects `max_minutes`."""
    whole_s = updates * update_s
    text = f"{what}: the first update took {update_s:.2g} s, {updates} updates take about {minutes(whole_s)}"
    if left_s < whole_s - update_s:
        text += f"; tune.max_minutes = {max_minutes:g} ends them earlier"
    elif whole_s >= LONG_S:
        text += "; tune.max_minutes ends them earlier, or fewer tune.epochs"
    sys.stderr.write(f"{text}\n")
