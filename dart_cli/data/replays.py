"""Which batch is trained on again, and when.

    Replays      the batches that may still be trained on again, and which of them is next (pure)
    most_behind  the staleness limit of a batch that is trained on again
    WHY_REFUSED  the reasons for which a batch is not trained on again, in words

A replay is a batch with a new id, on the samples of an earlier, fresh batch. Each fresh batch is followed by
at most `train.reuse` replays, of the oldest batches first. A batch is left out while its last
use is less than GAP updates ago. With one reuse:

    batch    1      2      3         4      5         6      7
             fresh  fresh  1 again   fresh  2 again   fresh  4 again

The order follows from the batches' ids alone, so it is the same after a restart, and after the trainer
has gone back to a checkpoint. A batch that is refused once is not trained on again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from bus.messages import REPLAY_METRIC

GAP = 2
"""Fewest updates between two uses of a batch: the update between them is on other samples."""

ReplayRefusal = Literal["incomplete", "stale", "low_ess", "skipped"]
WHY_REFUSED: dict[str, str] = {
    "incomplete": "a screenshot of it was removed to keep data.max_gb",
    "stale": "its oldest token would be too many versions behind",
    "low_ess": "the trainer skipped it: its effective sample size was too low",
    "skipped": "the trainer skipped it",
}
"""ReplayRefusal -> its meaning in words."""


@dataclass(frozen=True)
class Uses:
    """The uses so far of one batch that may be trained on again."""

    first: int  # id of the fresh batch
    last: int  # id of its last use
    reused: int  # how often it was trained on again


class Replays:
    """The batches that may be trained on again. Call `note_filed` for every batch, in order of id."""

    def __init__(self, reuse: int) -> None:
        """Begin without a batch; `reuse` is train.reuse."""
        self._reuse = reuse
        self._uses: dict[int, Uses] = {}  # by id of the first use, the oldest first
        self._newest = 0  # id of the newest batch
        self._since_fresh = 0  # replays after the newest fresh batch

    def note_filed(self, batch_id: int, replay_of: int | None, reused: int) -> None:
        """Note that a batch was formed: a fresh one, or the `reused`-th replay of batch `replay_of`."""
        self._newest = batch_id
        first = batch_id if replay_of is None else replay_of
        self._since_fresh = 0 if replay_of is None else self._since_fresh + 1
        if reused >= self._reuse:
            self.end(first)
        elif replay_of is None or first in self._uses:
            self._uses[first] = Uses(first, batch_id, reused)
        # In a run of constant `reuse` no batch waits for longer than this. Batches of an earlier start with
        # fewer reuses do: they would always come first, and make every later batch as much older.
        pace = GAP * (self._reuse + 1)
        for use in list(self._uses.values()):
            if batch_id + 1 - use.first > (use.reused + 1) * pace:
                self.end(use.first)

    def end(self, first: int) -> bool:
        """Forget a batch that must not be trained on again; return True if that was still possible."""
        return self._uses.pop(first, None) is not None

    def due(self) -> Uses | None:
        """Return the batch to train on again before the next fresh one; None if there is none."""
        return self._due(self._newest + 1, self._since_fresh, self._uses)

    @property
    def owed(self) -> int:
        """Number of replays before the next fresh batch, if none of them is refused."""
        uses, next_id, since_fresh = dict(self._uses), self._newest + 1, self._since_fresh
        while use := self._due(next_id, since_fresh, uses):
            uses[use.first] = replace(use, last=next_id, reused=use.reused + 1)
            if uses[use.first].reused >= self._reuse:
                del uses[use.first]
            next_id, since_fresh = next_id + 1, since_fresh + 1
        return since_fresh - self._since_fresh

    @property
    def oldest(self) -> int | None:
        """Id of the oldest batch that may be trained on again; None if there is none."""
        return next(iter(self._uses), None)

    def _due(self, next_id: int, since_fresh: int, uses: Mapping[int, Uses]) -> Uses | None:
        if since_fresh >= self._reuse:
            return None
        return next((use for use in uses.values() if next_id - use.last >= GAP), None)


def most_behind(*, max_staleness: int, reused: int, reuse: int, publish_every: int) -> int:
    """Return how many versions the tokens of a batch's `reused`-th replay may be behind.

    That is `max_staleness`, and for each reuse the versions that are published while GAP fresh batches and
    their replays are trained on.
    """
    return max_staleness + ceil(reused * GAP * (reuse + 1) / publish_every)


def replay_subject(batch_id: int) -> str:
    """Return the subject of stored decisions about training on a batch again."""
    return f"batch {batch_id}"


def skip_reason(metrics: Mapping[str, float]) -> ReplayRefusal | None:
    """Return why the trainer skipped a batch, by the metrics of its update; None if it did not skip it."""
    flags = {name.removeprefix(REPLAY_METRIC) for name, value in metrics.items() if value}
    if "skipped" not in flags:
        return None
    return "low_ess" if "low_ess" in flags else "skipped"
