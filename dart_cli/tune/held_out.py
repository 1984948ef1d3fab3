"""Rows that a training does not learn from, and what they tell of it.

Split, split_rows   which rows are learned, and which are held out: whole episodes, demonstrations or screenshots
LearnedRows         a training set without those that are held out
Measured            loss and right answers on the held-out rows
Outcome             what a training changed, and whether anything was learned
fallen              the loss of the learned rows at a stage's beginning and end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dart_cli.evaluation.results import StoredModel
from dart_cli.tune.loss import Costs, LossSettings
from dart_cli.tune.training_set import Recorded, TrainingSet

LEAST_GROUPS = 24
"""With fewer episodes or screenshots all are learned: too few would be left to tell anything."""
MOST_ROWS = 256
"""Rows that are held out of a large set; more would only cost time."""
MARGIN = 0.05
"""A loss that is not lower by this share, and right answers that are not more by this share of the rows, show no
learning."""

BY_HEART = 0.5
"""Learned rows whose loss fell to this share, while that of others did not, are known by heart."""
QUARTER = 4
"""A stage's beginning and end are the means of its first and last quarter: single updates vary."""


@dataclass(frozen=True)
class Split:
    """Rows by number."""

    learned: list[int]
    held: list[int]
    groups: int  # that are held out


def split_rows(together: Sequence[str], share: float, seed: int) -> Split:
    """Hold out a share of the names in `together` [N], with all of their rows; the same for the same seed."""
    names = sorted(set(together))
    wanted = round(share * len(names))
    if len(names) < LEAST_GROUPS or not wanted:
        return Split(list(range(len(together))), [], 0)
    counts = dict.fromkeys(names, 0)
    for name in together:
        counts[name] += 1
    held: set[str] = set()
    rows = 0
    for name in Random(f"{seed}/held out").sample(names, wanted):  # noqa: S311 - repeatable on purpose
        if held and rows + counts[name] > MOST_ROWS:
            break
        held.add(name)
        rows += counts[name]
    learned = [index for index, name in enumerate(together) if name not in held]
    return Split(learned, [i for i, name in enumerate(together) if name in held], len(held))


class LearnedRows:
    """A TrainingSet of some rows of another."""

    def __init__(self, whole: TrainingSet, rows: Sequence[int]) -> None:
        self._whole = whole
        self._rows = rows

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        names = self._whole.together
        return [names[row] for row in self._rows]

    def passes(self, places: Sequence[tuple[int, int]], losses: LossSettings) -> Iterator[Costs]:
        """See TrainingSet."""
        return self._whole.passes([(epoch, self._rows[row]) for epoch, row in places], losses)

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        return self._whole.recorded(self._rows[index])


class Measured(StoredModel):
    """A model on the held-out rows."""

    loss: float
    right: int  # rows whose place is hit, or whose greedy answer is the recorded one


@dataclass(frozen=True)
class Outcome:
    """What a training changed."""

    rows: int  # held out; 0: the loss is that of the rows that were learned
    groups: int
    pointed: bool  # `right` counts hits of places, else answers that equal the recorded ones
    before: Measured | None
    after: Measured | None
    first_loss: float  # of what was learned, in the stage that fell most
    last_loss: float

    @property
    def fell(self) -> bool:
        """Whether the loss of the learned rows fell by MARGIN."""
        return self.last_loss < (1 - MARGIN) * self.first_loss

    @property
    def learned(self) -> bool:
        """Whether the model is better than before on rows that it has not seen; else, where none are, on its own."""
        if self.before is None or self.after is None:
            return self.fell
        is_lower = self.after.loss < (1 - MARGIN) * self.before.loss
        more = self.after.right - self.before.right
        return is_lower or more >= max(
            2, MARGIN * self.rows
        )  # one may be a tie that rounding turned

    def summary(self) -> dict[str, Any]:
        """For `--json` and tune.json."""
        told: dict[str, Any] = {"learned": self.learned, "held_out": None}
        if self.before is not None and self.after is not None:
            told["held_out"] = {
                "rows": self.rows,
                "groups": self.groups,
                "measure": "hits" if self.pointed else "answers",
                "loss_before": round(self.before.loss, 6),
                "loss_after": round(self.after.loss, 6),
                "right_before": round(self.before.right / self.rows, 4),
                "right_after": round(self.after.right / self.rows, 4),
            }
        return told

    def lines(self, lr: float, updates: int) -> list[str]:
        """The same in words, with a cure where nothing was learned."""
        lines = []
        if self.before is None or self.after is None:
            lines.append(
                f"loss of the rows that were learned: {self.first_loss:.3f} -> {self.last_loss:.3f}; none were "
                f"held out (tune.held_out, and {LEAST_GROUPS} episodes or screenshots)"
            )
        else:
            what = "places hit" if self.pointed else "greedy answers as recorded"
            lines.append(
                f"on {self.rows} held-out rows: loss {self.before.loss:.3f} -> {self.after.loss:.3f}, {what} "
                f"{self.before.right} -> {self.after.right} of {self.rows}"
            )
        if not self.learned:
            lines.append(f"NOTHING WAS LEARNED: {self._cure(lr, updates)}")
        return lines

    def _cure(self, lr: float, updates: int) -> str:
        if self.before is not None and self.before.right >= 0.95 * self.rows:
            return "the model could do this before; give it rows that it cannot, or go on to the next step"
        if self.last_loss < BY_HEART * self.first_loss:
            return (
                "the loss fell on the learned rows alone, which are known by heart: collect more of them, or lower "
                "tune.epochs"
            )
        return (
            f"the loss did not fall by {MARGIN:.0%} in {updates} updates at tune.lr = {lr:g}: try tune.lr = "
            f"{10 * lr:g}, or more tune.epochs (both have fitting values where they are unset); if that changes "
            "nothing, look at the rows: is the answer on the screen, is it the same for the same screen?"
        )


def fallen(curve: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The first and last loss of a curve's stage: of the one that fell most, for each trains something else."""
    stages: dict[int, list[float]] = {}
    for point in curve:
        stages.setdefault(point["stage"], []).append(point["loss"])
    ends = []
    for losses in stages.values():
        few = -(-len(losses) // QUARTER)
        ends.append((sum(losses[:few]) / few, sum(losses[-few:]) / few))
    return min(ends, key=lambda pair: pair[1] / pair[0] if pair[0] else 1.0, default=(0.0, 0.0))
