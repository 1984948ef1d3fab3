"""Scores from episodes: by task, by mode, and within k attempts.

mode_score  all episodes of one mode
by_instance their verdicts by instance (task and seed)
METHOD      how the intervals of pass@k are computed, in words
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum

from dart_cli.algo.statistics import (
    LEAST_DRAWN,
    RESAMPLES,
    counts_of,
    over_tasks,
    pass_at_k,
    pass_hat_k,
)
from dart_cli.evaluation.results import (
    EpisodeRow,
    ModeScore,
    PassAtK,
    TaskScore,
)
from envs.contract.base import reward_of

SEED = 0
"""Of the bootstrap: the same episodes have the same intervals."""

METHOD = (
    f"95 %, percentile bootstrap over tasks, {RESAMPLES:,} resamples, seed {SEED}; with one task over "
    f"its instances; none for fewer than {LEAST_DRAWN}"
)

Instance = tuple[str, int]
"""(task id, seed)"""
Verdicts = Mapping[Instance, Sequence[bool]]
"""Instance -> whether each judged attempt passed."""


def by_instance(rows: Iterable[EpisodeRow]) -> dict[Instance, list[bool]]:
    """Whether the judged attempts passed, by instance; an instance without any is left out."""
    found: dict[Instance, list[bool]] = defaultdict(list)
    for row in rows:
        if row.outcome != "invalid":
            found[row.task_id, row.seed].append(row.outcome == "pass")
    return dict(found)


def mode_score(
    rows: Sequence[EpisodeRow], tasks: Sequence[str], compositions: Sequence[str], attempts: int
) -> ModeScore:
    """Return the score of one mode's episodes; `tasks` and `compositions` are told in their order."""
    parts: list[list[EpisodeRow]] = [[], []]
    for row in rows:
        parts[row.composed].append(row)
    scores = [
        [
            _task_score(name, [row for row in part if row.task_id == name], attempts)
            for name in names
        ]
        for part, names in zip(parts, (tasks, compositions), strict=True)
    ]
    estimates = [_estimates(by_instance(part), attempts) for part in parts]
    return ModeScore(
        tasks=scores[0],
        compositions=scores[1],
        pass_at=estimates[0],
        composed_pass_at=estimates[1],
    )


def _task_score(name: str, rows: Sequence[EpisodeRow], attempts: int) -> TaskScore:
    judged = [row for row in rows if row.outcome != "invalid"]
    verdicts = by_instance(rows)
    pass_at: dict[int, float] = {}
    pass_hat: dict[int, float] = {}
    for k in counts_of(attempts):
        if some := _of_k(verdicts, k, pass_at_k):
            every = _of_k(verdicts, k, pass_hat_k)
            pass_at[k], pass_hat[k] = fsum(some) / len(some), fsum(every) / len(every)
    return TaskScore(
        task_id=name,
        episodes=len(judged),
        passed=sum(row.outcome == "pass" for row in judged),
        invalid=len(rows) - len(judged),
        steps=sum(row.steps for row in judged),
        rewards=fsum(reward_of(row.outcome, row.reward) or 0.0 for row in judged),
        ends=dict(sorted(Counter(row.stop_reason for row in rows).items())),
        pass_at=pass_at,
        pass_hat=pass_hat,
    )


def _of_k(verdicts: Verdicts, k: int, estimate: Callable[[int, int, int], float]) -> list[float]:
    """Return the estimate of each instance with k judged attempts."""
    return [estimate(len(each), sum(each), k) for each in verdicts.values() if len(each) >= k]


def _estimates(verdicts: Verdicts, attempts: int) -> list[PassAtK]:
    """For each k that some instance has as many judged attempts for."""
    found = []
    for k in counts_of(attempts):
        whole = {name: each for name, each in verdicts.items() if len(each) >= k}
        if not whole:
            continue
        some, some_interval = over_tasks(_by_task(whole, k, pass_at_k), seed=SEED)
        every, every_interval = over_tasks(_by_task(whole, k, pass_hat_k), seed=SEED)
        found.append(
            PassAtK(
                k=k,
                any=some,
                any_interval=some_interval,
                every=every,
                every_interval=every_interval,
                tasks=len({task for task, _ in whole}),
                instances=len(whole),
            )
        )
    return found


def _by_task(
    verdicts: Verdicts, k: int, estimate: Callable[[int, int, int], float]
) -> list[list[float]]:
    """Return the estimates of the instances of each task: [T][I]."""
    values: dict[str, list[float]] = defaultdict(list)
    for (task, _), each in verdicts.items():
        values[task].append(estimate(len(each), sum(each), k))
    return list(values.values())
