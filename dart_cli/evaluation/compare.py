"""Two evaluations beside each other, over the instances (task and seed) that both have played.

compare        the second against the first: `dart eval compare`, and the page of an evaluation
Comparison     what came of it, by mode; ModeComparison with its test, by task
comparison_table, difference_text, difference_lines   for people
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import fsum

from rich.table import Table

from bus.errors import UserError
from dart_cli.algo.statistics import DRAWS, LEAST_DRAWN, mcnemar, over_tasks, sign_flip
from dart_cli.evaluation.results import Evaluation, Mode, differences
from dart_cli.evaluation.scores import METHOD, SEED, Instance, by_instance
from dart_cli.runtime.tables import page_table
from dart_cli.runtime.work_folder import StoredModel

Pairs = Mapping[Instance, tuple[Sequence[bool], Sequence[bool]]]
"""Instance -> whether the attempts of the first passed, and those of the second."""

MCNEMAR = "McNemar's exact test"
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
SIGN_FLIP = f"random signs of the instances' differences, {DRAWS:,} draws, seed {SEED}"


class TaskComparison(StoredModel):
    """The instances of one task."""

    task_id: str
    instances: int
    first: float  # mean success
    second: float


class ModeComparison(StoredModel):
    """One mode, over the tasks or over the compositions."""

    mode: Mode
    composed: bool
    instances: int  # that both have judged
    first: float  # mean over tasks of the mean over their instances
    second: float
    difference: float  # second - first
    interval: tuple[float, float] | None  # 95 %, of the difference for other tasks of this kind
    p: float  # two-sided, for these tasks
    test: str
    first_only: int | None  # instances that the first alone passed; None with several attempts
    second_only: int | None
    tasks: list[TaskComparison]


class Comparison(StoredModel):
    """The second evaluation against the first."""

    first: str
    second: str
    modes: list[ModeComparison]
    settings: list[str]  # what differs in what the episodes depend on
    interval_method: str


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Return the second against the first. Raises UserError where they share no instance of a mode."""
    for each in (first, second):
        if not each.episodes:
            raise UserError(f"{each.name} has no single episodes; play it again")
    modes = [mode for mode in first.modes if mode in second.modes]
    found = [
        compared
        for mode in modes
        for composed in (False, True)
        if (compared := _compared(first, second, mode, composed=composed)) is not None
    ]
    if not found:
        raise UserError(
            f"{first.name} and {second.name} have no episode of the same mode, task and seed: {_played(first)}; "
            f"{_played(second)}"
        )
    return Comparison(
        first=first.name,
        second=second.name,
        modes=found,
        settings=list(_differences(first, second)),
        interval_method=METHOD,
    )


def difference_text(comparison: Comparison, mode: ModeComparison) -> str:
    """Return the difference with its test and its interval, and what each of them is about, in one line."""
    alone = ""
    if mode.first_only is not None and mode.second_only is not None:
        alone = (
            f"; only {comparison.first} passed {mode.first_only} of the instances, only "
            f"{comparison.second} {mode.second_only}"
        )
    number = len(mode.tasks)
    these = f"these {number} tasks" if number > 1 else "this task"
    return (
        f"{comparison.second} - {comparison.first} = {mode.difference:+.3f}; for {these} p = {mode.p:.3g} by "
        f"{mode.test} over {mode.instances} instances{alone}; {_interval_text(mode)}"
    )


def _interval_text(mode: ModeComparison) -> str:
    """Return the interval with what it is about, or why there is none."""
    one_task = len(mode.tasks) == 1
    others = "other instances of this task" if one_task else "other tasks of this kind"
    if mode.interval is None:
        drawn = "instances" if one_task else "tasks"
        return f"for {others} no interval: it takes {LEAST_DRAWN} {drawn}"
    return f"for {others} {mode.interval[0]:+.3f} to {mode.interval[1]:+.3f} (95 %)"


def comparison_table(comparison: Comparison, mode: ModeComparison) -> Table:
    """Return a mode by task."""
    what = "compositions" if mode.composed else "tasks"
    numbers = ("instances", comparison.first, comparison.second, "difference")
    table = page_table(f"{mode.mode}, {what}", "task", *numbers, right=numbers)
    for row in mode.tasks:
        table.add_row(
            row.task_id,
            str(row.instances),
            f"{row.first:.2f}",
            f"{row.second:.2f}",
            f"{row.second - row.first:+.2f}",
            end_section=row is mode.tasks[-1],
        )
    table.add_row(
        f"all {what}",
        str(mode.instances),
        f"{mode.first:.2f}",
        f"{mode.second:.2f}",
        f"{mode.difference:+.2f}",
        style="bold",
    )
    return table


def difference_lines(comparison: Comparison) -> list[str]:
    """Return what differs in the settings, a line each; of a digest its first 12 digits."""
    return [_DIGEST.sub(r"\1", line) for line in comparison.settings]


def _compared(
    first: Evaluation, second: Evaluation, mode: Mode, *, composed: bool
) -> ModeComparison | None:
    """One mode over tasks or compositions; None without an instance of both."""
    verdicts = [
        by_instance(row for row in each.episodes if (row.mode, row.composed) == (mode, composed))
        for each in (first, second)
    ]
    pairs = {
        name: (verdicts[0][name], each) for name, each in verdicts[1].items() if name in verdicts[0]
    }
    if not pairs:
        return None
    differences: dict[str, list[float]] = defaultdict(list)
    for (task, _), (before, after) in pairs.items():
        differences[task].append(_mean(after) - _mean(before))
    difference, interval = over_tasks(list(differences.values()), seed=SEED)
    alone = _alone(pairs)
    tasks = list(_by_task(pairs))
    return ModeComparison(
        mode=mode,
        composed=composed,
        instances=len(pairs),
        first=fsum(row.first for row in tasks) / len(tasks),
        second=fsum(row.second for row in tasks) / len(tasks),
        difference=difference,
        interval=interval,
        p=mcnemar(*alone)
        if alone
        else sign_flip([each for part in differences.values() for each in part], seed=SEED),
        test=MCNEMAR if alone else SIGN_FLIP,
        first_only=alone[0] if alone else None,
        second_only=alone[1] if alone else None,
        tasks=tasks,
    )


def _alone(pairs: Pairs) -> tuple[int, int] | None:
    """Instances that one of the two alone passed; None where some has several attempts."""
    if any(len(before) != 1 or len(after) != 1 for before, after in pairs.values()):
        return None
    both = [(before[0], after[0]) for before, after in pairs.values()]
    return both.count((True, False)), both.count((False, True))


def _by_task(pairs: Pairs) -> Iterator[TaskComparison]:
    for name in dict.fromkeys(task for task, _ in pairs):
        mine = [each for (task, _), each in pairs.items() if task == name]
        yield TaskComparison(
            task_id=name,
            instances=len(mine),
            first=fsum(_mean(before) for before, _ in mine) / len(mine),
            second=fsum(_mean(after) for _, after in mine) / len(mine),
        )


def _mean(passed: Sequence[bool]) -> float:
    return sum(passed) / len(passed)


def _played(evaluation: Evaluation) -> str:
    """Return what an evaluation has played, in words."""
    seeds = [row.seed for row in evaluation.episodes]
    tasks = len({row.task_id for row in evaluation.episodes})
    return f"{evaluation.name} has {', '.join(evaluation.modes)}, {tasks} tasks, seeds {min(seeds)} to {max(seeds)}"


def _differences(first: Evaluation, second: Evaluation) -> Iterator[str]:
    """Yield what the two do not share, a line each."""
    for name, one, other in differences(first.settings, second.settings):
        none = "base weights" if name == "weights" else "-"
        yield f"{name}: {one or none}, {other or none}"
    if first.dart != second.dart:
        yield f"dart: {first.dart}, {second.dart}"
