"""How much a run holds and how its tasks fare, counted once for `dart data stats`, the pages and the report.

Counts      of the trajectories of the run, or of one of its tasks
RunCounts   both, with groups, pool and batches
count       these, by one pass over the ledger without steps and images; counts_json, with sizes and judges
counts_of   of some rows of counters
unaccounted sentences on what does not add up
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any, get_args

from pydantic_core import to_jsonable_python

from bus.messages import Outcome
from dart_cli.algo.success_trackers import Tracker
from dart_cli.data.exchange.transfer import run_id
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CountersRow, Remainder, ReplayCounts
from dart_cli.inspection.trajectories import STATES
from dart_cli.status.judges import judge_json

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_LIFE = ("open", "leased", "playing", "finished", "ready", "batched", "trained", "dropped")


@dataclass(frozen=True)
class StateCount:
    """How many are in one state, for one reason."""

    state: str
    reason: str  # why dropped; else empty
    number: int
    steps: int = 0  # of trajectories that are over


@dataclass(frozen=True)
class Counts:
    """Some of a run's trajectories."""

    states: list[StateCount]  # in the order of a trajectory's life, the most frequent reason first
    trajectories: int
    steps: int
    verdicts: dict[Outcome, int]  # without those that the end of the run or a lease cut off
    invalid_after_action: int
    success: float | None  # of those that count for it; None before the first
    mean_reward: float | None  # likewise
    mean_steps: float | None  # of those that passed or failed

    @property
    def by_state(self) -> dict[str, int]:
        """Trajectories in each state."""
        numbers: dict[str, int] = dict.fromkeys(STATES, 0)
        for each in self.states:
            numbers[each.state] += each.number
        return numbers

    @property
    def is_partial(self) -> bool:
        """Whether rewards tell more than success: some lie between 0 and 1."""
        return self.mean_reward != self.success

    @property
    def dropped(self) -> list[StateCount]:
        """Why trajectories were dropped, the most frequent reason first."""
        return [each for each in self.states if each.state == "dropped"]


@dataclass(frozen=True)
class RunCounts:
    """A whole run."""

    all: Counts
    tasks: dict[str, Counts]  # by name
    groups: list[StateCount]
    pool: dict[str, dict[str, int]]  # task -> source -> members
    expected: dict[str, list[float]]
    """Task -> the reward that its trackers expect of it, then at each step; nothing without trackers."""
    batches: int
    replays: ReplayCounts
    left_out: dict[str, int]  # reason -> steps of batches that are not trained on
    remainder: Remainder


def count(reader: Reader) -> RunCounts:
    """How much there is of everything but tokens and images, and whether it adds up."""
    rows = reader.counters()
    by_task: dict[str, list[CountersRow]] = defaultdict(list)
    for row in rows:
        by_task[row.task_id].append(row)
    pool: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for member in reader.pool():
        pool[member.task_id][member.source] += 1
    expected: dict[str, list[float]] = defaultdict(list)
    for tracker in reader.trackers():  # by step, the whole task's first
        expected[tracker.task_id].append(Tracker(tracker.passed, tracker.failed).value)
    groups = (StateCount(*key, number) for key, number in reader.count("groups").items())
    return RunCounts(
        all=counts_of(rows),
        tasks={task: counts_of(by_task[task]) for task in sorted(by_task)},
        groups=_ordered(groups),
        pool={task: dict(sources) for task, sources in pool.items()},
        expected=dict(expected),
        batches=reader.total("batches"),
        replays=reader.replay_counts(),
        left_out=reader.left_out(),
        remainder=reader.remainder(),
    )


def counts_json(reader: Reader) -> dict[str, Any]:
    """How much there is of everything, as plain values."""
    return {
        "run": run_id(reader),
        "run_dir": str(reader.path.parent),
        **to_jsonable_python(count(reader)),
        **to_jsonable_python(reader.sizes()),
        "judges": [judge_json(judge) for judge in reader.judge_views()],
    }


def counts_of(rows: Sequence[CountersRow]) -> Counts:
    """Of the trajectories of these rows."""
    states: dict[tuple[str, str], int] = defaultdict(int)
    played: dict[tuple[str, str], int] = defaultdict(int)
    verdicts = dict.fromkeys(OUTCOMES, 0)
    for row in rows:
        states[row.state, row.reason] += row.trajectories
        played[row.state, row.reason] += row.steps
        if row.verdict is not None:
            verdicts[row.verdict] += row.trajectories
    counted = sum(row.counted for row in rows)
    passed = sum(row.counted for row in rows if row.outcome == "pass")
    judged = verdicts["pass"] + verdicts["fail"]
    steps = sum(row.steps for row in rows if row.outcome in ("pass", "fail"))
    return Counts(
        states=_ordered(StateCount(*key, number, played[key]) for key, number in states.items()),
        trajectories=sum(row.trajectories for row in rows),
        steps=sum(row.steps for row in rows),
        verdicts=verdicts,
        invalid_after_action=sum(row.acted for row in rows if row.verdict == "invalid"),
        success=passed / counted if counted else None,
        mean_reward=fsum(row.rewards for row in rows if row.counted) / counted if counted else None,
        mean_steps=steps / judged if judged else None,
    )


def unaccounted(remainder: Remainder) -> list[str]:
    """Return what does not add up, a sentence each; [] where all that was played is in an account."""
    said = {
        "steps": "episodes have not as many steps stored as they told",
        "samples": "trajectories of a batch have not each of their steps in it once",
        "batches": "batches were trained with other numbers of steps than were planned",
        "reasons": "trajectories were dropped for no reason",
    }
    return [f"{number} {said[name]}" for name, number in asdict(remainder).items() if number]


def _ordered(counts: Iterable[StateCount]) -> list[StateCount]:
    return sorted(counts, key=lambda each: (_LIFE.index(each.state), -each.number))
