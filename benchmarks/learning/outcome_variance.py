"""What a value of the first screen could explain: outcomes between tasks, between instances, within one.

    python benchmarks/learning/outcome_variance.py runs/quickstart runs/curation --parts 5

A group plays one instance of a task several times by nearly the same weights, so that the variance of the outcome R in
{0, 1} splits, without bias, into three parts (law of total variance), for n_g counted members of group g of
which the share q_g passed:

    within an instance     mean_g  q_g (1 - q_g) n_g / (n_g - 1)
    between instances      mean over neighbouring groups g, h of one task  (q_g - q_h)^2 / 2,  less  mean_g q_g (1 - q_g) / (n_g - 1)
    between tasks          variance of the tasks' means over groups, less what their own noise adds

Neighbours in time are compared, since the policy changes: its drift within a part of the run would count as
a difference of instances. Parts hold equally many groups. A baseline of the task explains the first; a value of the first screen
at most the second; what is left is chance, which only values of later states can explain. With data.early_stop
the members that the rule plays in any case count, or groups that end early would look alike.

The last line is JSON: for each run `parts`, each with `groups`, `tasks`, `success`, `variance`, and the shares `task`,
`instance` and `within` of that variance (a share can be a little below 0, being an unbiased estimate). A critic of the
first screen is worth building where `instance` is above a fifth; `by_task` has the shares of `instance` in the
variance within each task, over the whole run. `bound_trajectories_ratio` is the mean over the parts of within / (within +
instance): if noise of outcomes were all that costs trajectories, a baseline that knows each instance's success
exactly would need that share of those that one by task needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, variance
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import DartError
from dart_cli.data.store.open import open_reader

LEAST_GROUPS = 8
"""Groups of a task below which its shares are not told alone."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A group's counted members: how many, and how many passed."""

    task: str
    members: int
    passed: int

    @property
    def share(self) -> float:
        """Passed among members."""
        return self.passed / self.members

    @property
    def noise(self) -> float:
        """Unbiased estimate of the variance of `share` among repetitions of the group, R of one trajectory: times members."""
        return self.share * (1 - self.share) / (self.members - 1)


def main() -> None:
    """Split the outcomes of each run, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--parts", type=int, default=5, help="equal parts of each run")
    arguments = parser.parse_args()
    try:
        found = {str(run): told(counted_groups(run), arguments.parts) for run in arguments.runs}
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{'run':28} part  groups  success  variance   task  instance  within")
    for run, result in found.items():
        for number, part in enumerate(result["parts"], start=1):
            print(
                f"{run[-28:]:28} {number:4}  {part['groups']:6}  {part['success']:7.3f}  {part['variance']:8.4f}"
                f"  {part['task']:5.2f}  {part['instance']:8.2f}  {part['within']:6.2f}"
            )
    print(json.dumps({"benchmark": "outcome_variance", "runs": found}))


def counted_groups(run: Path) -> list[Counted]:
    """Return groups with two or more counted members, in the order in which they opened. Raises RunDirectoryError."""
    with open_reader(run) as reader:
        members: dict[str, list[bool]] = defaultdict(list)
        for row in reader.trajectories():
            if row.counted:
                members[row.group_id].append(row.outcome == "pass")
        groups = sorted(reader.groups_by_id(members).values(), key=lambda group: group.number)
    return [
        Counted(group.task_id, len(taken), sum(taken))
        for group in groups
        if len(taken := members[group.id]) > 1
    ]


def told(groups: Sequence[Counted], parts: int) -> dict[str, Any]:
    """Return the shares of each part of a run, and of `instance` by task."""
    size = max(1, -(-len(groups) // parts))
    cut = [groups[start : start + size] for start in range(0, len(groups), size)]
    by_task: dict[str, float] = {}
    for task, own in sorted(_by_task(groups).items()):
        within, between = split_of(own)
        if len(own) >= LEAST_GROUPS and within + between > 0:
            by_task[task] = round(between / (within + between), 3)
    shares = [shares_of(part) for part in cut]
    of_tasks = [(each["within"], each["within"] + each["instance"]) for each in shares]
    known = [within / whole for within, whole in of_tasks if whole > 0]
    bound = round(mean(known), 3) if known else None
    return {"parts": shares, "by_task": by_task, "bound_trajectories_ratio": bound}


def shares_of(groups: Sequence[Counted]) -> dict[str, Any]:
    """Shares of `task`, `instance` and `within` in the variance of an outcome, tasks weighted by their groups."""
    own = {task: each for task, each in _by_task(groups).items() if len(each) > 1}
    every = [group for each in own.values() for group in each]
    if not every:
        return {"groups": 0, "tasks": 0, "success": 0.0, "variance": 0.0} | _shares(0.0, 0.0, 0.0)
    weights = {task: len(each) / len(every) for task, each in own.items()}
    means = {task: mean(group.share for group in each) for task, each in own.items()}
    success = sum(weights[task] * means[task] for task in own)
    within = instance = task_part = 0.0
    for task, each in own.items():
        inside, between = split_of(each)
        within += weights[task] * inside
        instance += weights[task] * between
        noise = variance(group.share for group in each) / len(each)
        task_part += weights[task] * ((means[task] - success) ** 2 - noise * (1 - weights[task]))
    result = {"groups": len(every), "tasks": len(own), "success": round(success, 4)}
    return (
        result
        | {"variance": round(within + instance + task_part, 5)}
        | _shares(task_part, instance, within)
    )


def split_of(groups: Sequence[Counted]) -> tuple[float, float]:
    """Variance within an instance and between instances, of one task's groups in order (0 of a single group)."""
    within = mean(group.noise * group.members for group in groups)
    if len(groups) < 2:
        return within, 0.0
    apart = mean((a.share - b.share) ** 2 / 2 for a, b in pairwise(groups))
    ends = (groups[0].noise + groups[-1].noise) / 2
    noise = (sum(group.noise for group in groups) - ends) / (len(groups) - 1)
    return within, apart - noise


def _shares(task: float, instance: float, within: float) -> dict[str, float]:
    whole = task + instance + within
    values = {"task": task, "instance": instance, "within": within}
    return {name: round(value / whole, 3) if whole else 0.0 for name, value in values.items()}


def _by_task(groups: Sequence[Counted]) -> dict[str, list[Counted]]:
    found: dict[str, list[Counted]] = defaultdict(list)
    for group in groups:
        found[group.task].append(group)
    return found


if __name__ == "__main__":
    main()
