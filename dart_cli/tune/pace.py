"""What a training says while it goes on: its loss, what the held-out rows say, and the time left.

Budget         of a stage: updates, and seconds at most
seconds_left   how long the stages that are left take
HeldOutWatch   measures the held-out rows from time to time
Pace           the note of each progress line
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dart_cli.runtime.tables import minutes
from dart_cli.tune.held_out import Measured

MEASURE_SHARE = 0.05
"""Share of the time that measurements of the held-out rows may take."""
FIRST_MEASURE_S = 60.0
"""Seconds before the first one, where how long it takes is not known."""
LONG_S = 60.0
"""Seconds from which on a training is told how to end earlier."""
RECENT = 10
"""Updates whose mean loss is shown: single ones vary."""


@dataclass(frozen=True)
class Budget:
    """Of one stage."""

    updates: int
    seconds: float = 0.0  # at most; 0 for no limit

    def share(self, updates: float, seconds: float) -> float:
        """Return the share in [0, 1] that is over after so many updates, which took so many seconds."""
        by_time = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(updates / self.updates, by_time))

    def left_s(self, updates: int, seconds: float, update_s: float) -> float:
        """Return how long the rest takes, at so many seconds an update."""
        by_updates = (self.updates - updates) * update_s
        return max(0.0, min(by_updates, self.seconds - seconds) if self.seconds else by_updates)


def seconds_left(budgets: Sequence[Budget], updates: int, seconds: float, update_s: float) -> float:
    """Return how long the stages of `budgets` take, the first of which has made so many updates."""
    first, *later = budgets
    return first.left_s(updates, seconds, update_s) + sum(
        each.left_s(0, 0.0, update_s) for each in later
    )


class HeldOutWatch:
    """Measures the held-out rows from time to time, in at most MEASURE_SHARE of the time."""

    def __init__(
        self,
        measure: Callable[[], Measured],
        rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._rows = rows
        self._clock = clock
        self._due = clock() + FIRST_MEASURE_S
        self.newest: Measured | None = None

    def measure_first(self) -> Measured:
        """Measure the model that was not trained yet, and say so: a large one takes minutes."""
        sys.stderr.write(f"measures {self._rows} held-out rows\n")
        return self.measure()

    def measure(self) -> Measured:
        """Measure now."""
        start = self._clock()
        self.newest = self._measure()
        end = self._clock()
        self._due = end + (end - start) / MEASURE_SHARE
        return self.newest

    def look(self) -> None:
        """Measure if it is time to."""
        if self._rows and self._clock() >= self._due:
            self.measure()

    @property
    def note(self) -> str:
        """Return the newest measurement in words; empty before the first one, and without rows."""
        return f"held out: {self.words(self.newest)}" if self.newest else ""

    def words(self, measured: Measured) -> str:
        """Return a measurement in words."""
        return f"loss {measured.loss:.3f}, {measured.right} of {self._rows} right"


class Pace:
    """Measures the updates of one start, and says how far they are."""

    def __init__(self, held_out: HeldOutWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._held_out = held_out
        self._clock = clock
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._start = clock()
        self._updates = 0  # of this start

    def begin_stage(self) -> None:
        """Measure the updates of another stage, which take another time."""
        self._losses.clear()
        self._start, self._updates = self._clock(), 0

    def add(self, loss: float) -> None:
        """Add an update that has ended."""
        self._losses.append(loss)
        self._updates += 1
        self._held_out.look()

    @property
    def update_s(self) -> float:
        """Return the seconds of an update, measurements included."""
        return (self._clock() - self._start) / self._updates

    def note(self, left_s: float) -> str:
        """Return `loss 0.812, held out: loss 0.93, 12 of 18 right, about 4:10 left`."""
        loss = f"loss {sum(self._losses) / len(self._losses):.3f}" if self._losses else ""
        left = f"about {minutes(left_s)} left" if left_s >= 1 else ""
        return ", ".join(filter(None, (loss, self._held_out.note, left)))


def tell_length(
    what: str, updates: int, update_s: float, left_s: float, max_minutes: float
) -> None:
    """Print how long so many updates take, by the first one of `what`; `left_s` is within `max_minutes`."""
    whole_s = updates * update_s
    text = f"{what}: the first update took {update_s:.2g} s, {updates} updates take about {minutes(whole_s)}"
    if left_s < whole_s - update_s:
        text += f"; tune.max_minutes = {max_minutes:g} ends them earlier"
    elif whole_s >= LONG_S:
        text += "; tune.max_minutes ends them earlier, or fewer tune.epochs"
    sys.stderr.write(f"{text}\n")
