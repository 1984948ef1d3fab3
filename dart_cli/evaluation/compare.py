"""The comparison of two evaluations, over the instances (task and seed) that both have played.

compare             compares two evaluations: `dart eval compare`, and the page of an evaluation
Comparison          the result
ModeComparison      the result for one mode, with a statistical test
TaskComparison      the result for one task
comparison_table    a table of one mode by task
difference_text     the difference of one mode in one line
difference_lines    lines on the settings that differ
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
"""Instance -> whether each attempt passed, in the first evaluation and in the second."""

MCNEMAR = "McNemar's exact test"
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
SIGN_FLIP = f"random signs of the instances' differences, {DRAWS:,} draws, seed {SEED}"


class TaskComparison(StoredModel):
    """The comparison over the instances of one task."""

    task_id: str
    instances: int
    first: float  # mean success
    second: float


class ModeComparison(StoredModel):
    """The comparison in one mode, over the trained tasks or over the others."""

    mode: Mode
    heldout: bool  # whether its tasks are never trained on
    part: str  # what its tasks are, in words
    instances: int  # with a verdict in both evaluations
    first: float  # mean over tasks of the mean over their instances
    second: float
    difference: float  # second - first
    interval: tuple[float, float] | None  # 95 %, for the difference on other tasks of this kind
    p: float  # two-sided, for the difference on these tasks
    test: str
    first_only: int | None  # instances that only the first passed; None with several attempts
    second_only: int | None
    tasks: list[TaskComparison]


class Comparison(StoredModel):
    """The comparison of a second evaluation with a first."""

    first: str
    second: str
    modes: list[ModeComparison]
    settings: list[str]  # a line for each setting that differs
    interval_method: str


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare the second evaluation with the first. Raises UserError if they share no instance of a mode."""
    for evaluation in (first, second):
        if not evaluation.episodes:
            raise UserError(f"{evaluation.name} has no single episodes; play it again")
    modes = [mode for mode in first.modes if mode in second.modes]
    comparisons = [
        comparison
        for mode in modes
        for heldout in (False, True)
        if (comparison := _compare_mode(first, second, mode, heldout=heldout)) is not None
    ]
    if not comparisons:
        raise UserError(
            f"{first.name} and {second.name} have no episode of the same mode, task and seed: "
            f"{_content(first)}; {_content(second)}"
        )
    return Comparison(
        first=first.name,
        second=second.name,
        modes=comparisons,
        settings=list(_differences(first, second)),
        interval_method=METHOD,
    )


def difference_text(comparison: Comparison, mode: ModeComparison) -> str:
    """Return one line with the difference, its test, and its interval."""
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
    """Return the interval with the tasks to which it applies, or why there is none."""
    one_task = len(mode.tasks) == 1
    others = "other instances of this task" if one_task else "other tasks of this kind"
    if mode.interval is None:
        units = "instances" if one_task else "tasks"
        return f"for {others} no interval: it needs {LEAST_DRAWN} {units}"
    return f"for {others} {mode.interval[0]:+.3f} to {mode.interval[1]:+.3f} (95 %)"


def comparison_table(comparison: Comparison, mode: ModeComparison) -> Table:
    """Return a table of one mode by task."""
    numbers = ("instances", comparison.first, comparison.second, "difference")
    table = page_table(f"{mode.mode}, {mode.part}", "task", *numbers, right=numbers)
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
        "all",
        str(mode.instances),
        f"{mode.first:.2f}",
        f"{mode.second:.2f}",
        f"{mode.difference:+.2f}",
        style="bold",
    )
    return table


def difference_lines(comparison: Comparison) -> list[str]:
    """Return a line for each setting that differs; digests are cut to their first 12 digits."""
    return [_DIGEST.sub(r"\1", line) for line in comparison.settings]


def _compare_mode(
    first: Evaluation, second: Evaluation, mode: Mode, *, heldout: bool
) -> ModeComparison | None:
    """Compare one mode over the trained tasks of `second` or the others; return None without a shared instance."""
    verdicts = [
        by_instance(row for row in first.episodes if row.mode == mode),
        by_instance(row for row in second.episodes if (row.mode, row.heldout) == (mode, heldout)),
    ]
    pairs = {
        name: (verdicts[0][name], after)
        for name, after in verdicts[1].items()
        if name in verdicts[0]
    }
    if not pairs:
        return None
    differences: dict[str, list[float]] = defaultdict(list)
    for (task, _), (before, after) in pairs.items():
        differences[task].append(_mean(after) - _mean(before))
    difference, interval = over_tasks(list(differences.values()), seed=SEED)
    only_one = _passed_by_one(pairs)
    tasks = list(_by_task(pairs))
    return ModeComparison(
        mode=mode,
        heldout=heldout,
        part=second.part_name(heldout=heldout),
        instances=len(pairs),
        first=fsum(row.first for row in tasks) / len(tasks),
        second=fsum(row.second for row in tasks) / len(tasks),
        difference=difference,
        interval=interval,
        p=mcnemar(*only_one)
        if only_one
        else sign_flip([value for part in differences.values() for value in part], seed=SEED),
        test=MCNEMAR if only_one else SIGN_FLIP,
        first_only=only_one[0] if only_one else None,
        second_only=only_one[1] if only_one else None,
        tasks=tasks,
    )


def _passed_by_one(pairs: Pairs) -> tuple[int, int] | None:
    """Return the numbers of instances that only the first passed, and only the second.

    Returns None if an instance has several attempts.
    """
    if any(len(before) != 1 or len(after) != 1 for before, after in pairs.values()):
        return None
    both = [(before[0], after[0]) for before, after in pairs.values()]
    return both.count((True, False)), both.count((False, True))


def _by_task(pairs: Pairs) -> Iterator[TaskComparison]:
    """Yield the comparison of each task."""
    for name in dict.fromkeys(task for task, _ in pairs):
        verdicts = [pair for (task, _), pair in pairs.items() if task == name]
        yield TaskComparison(
            task_id=name,
            instances=len(verdicts),
            first=fsum(_mean(before) for before, _ in verdicts) / len(verdicts),
            second=fsum(_mean(after) for _, after in verdicts) / len(verdicts),
        )


def _mean(passed: Sequence[bool]) -> float:
    return sum(passed) / len(passed)


def _content(evaluation: Evaluation) -> str:
    """Return the modes, tasks and seeds of an evaluation in words."""
    seeds = [row.seed for row in evaluation.episodes]
    tasks = len({row.task_id for row in evaluation.episodes})
    modes = ", ".join(evaluation.modes)
    return f"{evaluation.name} has {modes}, {tasks} tasks, seeds {min(seeds)} to {max(seeds)}"


def _differences(first: Evaluation, second: Evaluation) -> Iterator[str]:
    """Yield a line for each setting that differs."""
    for name, one, other in differences(first.settings, second.settings):
        none = "base weights" if name == "weights" else "-"
        yield f"{name}: {one or none}, {other or none}"
    parts = [{row.task_id: row.heldout for row in one.episodes} for one in (first, second)]
    if tasks := [task for task, part in parts[0].items() if parts[1].get(task, part) != part]:
        yield f"trained on in one of them only: {', '.join(tasks)}"
    if first.dart != second.dart:
        yield f"dart: {first.dart}, {second.dart}"
