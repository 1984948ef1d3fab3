"""Counts what a run whose processes were killed has lost, from its database and the trainer's log.

    FinishedTrajectories   trajectories that were seen finished while the run went on
    Lineage                the batches in the weights, over all processes of the trainer, from its log
    audit                  both against the ledger at the end

A trajectory is lost if it was finished in the database (so acknowledged) and no longer is: in play
again, missing, without one of its steps, or dropped for a reason that only a loss has. A batch is
trained twice if the weights hold it twice, relative to the checkpoint that the trainer resumed from. A
replay (train.reuse) is a separate batch, so that holds for each use; and each use of a batch must be the
next of its uses, never in consecutive updates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.run_times import step_times
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import BatchRow, TrajectoryRow

KEPT_STATES = ("finished", "batched", "trained")
LOSSES = ("lease_expired", "worker_lost", "cancelled", "incomplete")
"""Reasons for which no finished trajectory may be dropped."""
CUT = ("worker_lost", "lease_expired")
"""Drop reasons of an episode that a killed process cut off."""
_LOOK = 500
"""The newest trajectories, read at each look: more than are in play."""

_STARTS = re.compile(r": train starts, pid ")
_RESUMES = re.compile(r": resumes from .*, batch (\d+)$")
_TRAINED = re.compile(r": update \d+ on batch (\d+)[ :]")


@dataclass
class FinishedTrajectories:
    """The ids of trajectories that were seen finished."""

    ids: set[str] = field(default_factory=set)

    def update(self, reader: Reader) -> None:
        """Add those of the newest trajectories that are finished by now."""
        rows = reader.trajectories(limit=_LOOK)
        self.ids |= {row.id for row in rows if _is_finished(row)}


def _is_finished(row: TrajectoryRow) -> bool:
    return row.state in KEPT_STATES or (row.state == "dropped" and row.outcome in ("pass", "fail"))


@dataclass(frozen=True)
class Lineage:
    """Counts of how often a batch went into weights that already held it, or was skipped."""

    lives: int
    doubled: int
    passed_over: int
    retrained: int  # batches trained again because no checkpoint held them


def lineage(log: Iterable[str]) -> Lineage:
    """Read the trainer's log, which holds all its processes."""
    lives = doubled = passed_over = retrained = 0
    last = newest = 0  # batch in the weights; ever
    for line in log:
        if _STARTS.search(line):
            lives, last = lives + 1, 0
        elif match := _RESUMES.search(line):
            last = int(match[1])
        elif match := _TRAINED.search(line):
            batch = int(match[1])
            doubled += batch <= last
            passed_over += max(0, batch - last - 1)
            retrained += last < batch <= newest
            last, newest = max(last, batch), max(newest, batch)
    return Lineage(lives, doubled, passed_over, retrained)


@dataclass(frozen=True)
class Audit:
    """Counts of what was lost. All but `steps_lost_max`, `retrained` and the sums must be 0."""

    finished_lost: int  # trajectories
    double_trained: int  # batches in the weights twice, groups in two fresh batches, wrong replays
    never_trained: int  # batches passed over
    steps_lost_max: int  # of one episode: steps without a row, and the one that ran when it was cut
    retrained: int  # batches trained again from a checkpoint that did not hold them
    replays: int  # batches in the weights that are further uses of earlier ones
    trajectories: int  # finished
    cut: int  # episodes that a killed environment cut off


def audit(reader: Reader, finished: FinishedTrajectories, trainer_log: Iterable[str]) -> Audit:
    """Check the whole ledger; `trainer_log` are the lines of logs/train.log."""
    rows = {row.id: row for row in reader.trajectories()}
    filed: dict[str, set[int]] = {}
    for step in step_times(reader):
        filed.setdefault(step.trajectory_id, set()).add(step.step)
    lost = {each for each in finished.ids if _is_lost(rows.get(each))}
    gaps = {row.id: _missing(filed.get(row.id, set()), row.steps) for row in rows.values()}
    lost |= {row.id for row in rows.values() if row.state in KEPT_STATES and gaps[row.id]}
    cut = [row for row in rows.values() if row.reason in CUT]
    batches = reader.batches()
    in_batches = Counter(
        group
        for batch in batches
        if batch.replay_of is None
        for group in reader.batch_groups(batch.id)
    )
    trained = lineage(trainer_log)
    return Audit(
        finished_lost=len(lost),
        double_trained=trained.doubled
        + sum(number - 1 for number in in_batches.values())
        + wrong_replays(batches),
        never_trained=trained.passed_over,
        steps_lost_max=max((gaps[row.id] + 1 for row in cut), default=0),
        retrained=trained.retrained,
        replays=sum(row.replay_of is not None and row.state == "trained" for row in batches),
        trajectories=sum(_is_finished(row) for row in rows.values()),
        cut=len(cut),
    )


def wrong_replays(batches: Iterable[BatchRow]) -> int:
    """Return replays that are not the next use of an earlier batch, or follow its last use at once."""
    uses: dict[
        int, tuple[int, int]
    ] = {}  # of a fresh batch -> how often it came again, and when last
    wrong = 0
    for row in batches:
        first = row.id if row.replay_of is None else row.replay_of
        if row.replay_of is not None:
            reuse, last = uses.get(first, (-1, row.id))
            wrong += row.reuse != reuse + 1 or row.id < last + 2
        uses[first] = row.reuse, row.id
    return wrong


def _is_lost(row: TrajectoryRow | None) -> bool:
    return row is None or not _is_finished(row) or row.reason in LOSSES


def _missing(filed: set[int], steps: int | None) -> int:
    """Count the steps without a row among the first `steps`, or, for None, below the last one that has a row."""
    expected = max(filed, default=-1) + 1 if steps is None else steps
    return expected - len(filed & set(range(expected)))
