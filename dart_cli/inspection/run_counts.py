"""How much a run holds, and the results of its tasks: for `dart data stats`, the pages and the report.

Counts       counts of the trajectories of the run, or of one task
RunCounts    the counts of the run and of each task, with groups, pool and batches
count        reads the counts in one pass over the ledger, without steps and images
counts_json  the same with sizes and judges, as plain values
counts_of    sums up rows of counters
unaccounted  sentences on what does not add up
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any, get_args

from pydantic_core import to_jsonable_python

from bus.messages import Outcome
from dart_cli.algo.running_baselines import RunningBaseline
from dart_cli.data.exchange.transfer import run_id
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CountersRow, Remainder, ReplayCounts
from dart_cli.inspection.trajectories import STATES
from dart_cli.status.judges import judge_json

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_STATE_ORDER = ("open", "leased", "playing", "finished", "ready", "batched", "trained", "dropped")


@dataclass(frozen=True)
class StateCount:
    """How many trajectories or groups are in one state, for one reason."""

    state: str
    reason: str  # why they were dropped; empty for other states
    number: int
    steps: int = 0  # steps of the trajectories among them that are over


@dataclass(frozen=True)
class Counts:
    """Counts of some of a run's trajectories."""

    states: list[StateCount]  # as states follow one another, the most frequent reason first
    trajectories: int
    steps: int
    # Without trajectories that the end of the run, or of their lease, cut off.
    verdicts: dict[Outcome, int]
    invalid_after_action: int
    success: float | None  # over the trajectories that count for it; None if there are none
    mean_reward: float | None  # likewise
    mean_steps: float | None  # over the trajectories that passed or failed

    @property
    def by_state(self) -> dict[str, int]:
        """Number of trajectories in each state."""
        numbers: dict[str, int] = dict.fromkeys(STATES, 0)
        for row in self.states:
            numbers[row.state] += row.number
        return numbers

    @property
    def is_partial(self) -> bool:
        """Whether the mean reward differs from success, because some rewards lie between 0 and 1."""
        return self.mean_reward != self.success

    @property
    def dropped(self) -> list[StateCount]:
        """The dropped trajectories by reason, the most frequent reason first."""
        return [row for row in self.states if row.state == "dropped"]


@dataclass(frozen=True)
class RunCounts:
    """Counts of a whole run."""

    all: Counts
    tasks: dict[str, Counts]  # by name
    groups: list[StateCount]
    pool: dict[str, dict[str, int]]  # task -> source -> members
    expected: dict[str, list[float]]
    """Task -> expected reward by running baselines: of the task, then at each step; empty without them."""
    batches: int
    replays: ReplayCounts
    left_out: dict[str, int]  # reason -> steps of batches that are not trained on
    remainder: Remainder


def count(reader: Reader) -> RunCounts:
    """Return the counts of everything but tokens and images, with what does not add up."""
    rows = reader.counters()
    by_task: dict[str, list[CountersRow]] = defaultdict(list)
    for row in rows:
        by_task[row.task_id].append(row)
    pool: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for member in reader.pool():
        pool[member.task_id][member.source] += 1
    expected: dict[str, list[float]] = defaultdict(list)
    for baseline in reader.baselines():  # in the order of steps, the baseline of the task first
        expected[baseline.task_id].append(RunningBaseline(baseline.passed, baseline.failed).value)
    groups = (
        StateCount(state=state, reason=reason, number=number)
        for (state, reason), number in reader.count("groups").items()
    )
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
    """Return the counts of everything as plain values."""
    return {
        "run": run_id(reader),
        "run_dir": str(reader.path.parent),
        **to_jsonable_python(count(reader)),
        **to_jsonable_python(reader.sizes()),
        "judges": [judge_json(judge) for judge in reader.judge_views()],
    }


def counts_of(rows: Sequence[CountersRow]) -> Counts:
    """Return the counts of the trajectories that rows of counters sum up."""
    states: dict[tuple[str, str], int] = defaultdict(int)
    state_steps: dict[tuple[str, str], int] = defaultdict(int)
    verdicts = dict.fromkeys(OUTCOMES, 0)
    for row in rows:
        states[row.state, row.reason] += row.trajectories
        state_steps[row.state, row.reason] += row.steps
        if row.verdict is not None:
            verdicts[row.verdict] += row.trajectories
    counted = sum(row.counted for row in rows)
    passed = sum(row.counted for row in rows if row.outcome == "pass")
    with_verdict = verdicts["pass"] + verdicts["fail"]
    steps = sum(row.steps for row in rows if row.outcome in ("pass", "fail"))
    return Counts(
        states=_ordered(
            StateCount(
                state=state,
                reason=reason,
                number=number,
                steps=state_steps[state, reason],
            )
            for (state, reason), number in states.items()
        ),
        trajectories=sum(row.trajectories for row in rows),
        steps=sum(row.steps for row in rows),
        verdicts=verdicts,
        invalid_after_action=sum(row.acted for row in rows if row.verdict == "invalid"),
        success=passed / counted if counted else None,
        mean_reward=fsum(row.rewards for row in rows if row.counted) / counted if counted else None,
        mean_steps=steps / with_verdict if with_verdict else None,
    )


def unaccounted(remainder: Remainder) -> list[str]:
    """Return a sentence for each thing that does not add up; none if everything played is accounted for."""
    sentences = {
        "steps": "episodes have another number of steps stored than they reported",
        "samples": "trajectories of a batch do not have each of their steps in it exactly once",
        "batches": "batches were trained with another number of steps than was planned",
        "reasons": "trajectories were dropped without a reason",
    }
    return [f"{number} {sentences[name]}" for name, number in asdict(remainder).items() if number]


def _ordered(counts: Iterable[StateCount]) -> list[StateCount]:
    """Return counts in the order of states, the most frequent reason of a state first."""
    return sorted(counts, key=lambda row: (_STATE_ORDER.index(row.state), -row.number))
