"""Scores from episodes: by task, and within k attempts.

mode_score   the score of all episodes of one mode
by_instance  the verdicts of episodes by instance (task and seed)
METHOD       a text on how the intervals of pass@k are computed
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
"""Seed of the bootstrap, so that the same episodes have the same intervals."""

METHOD = (
    f"95 %, percentile bootstrap over tasks, {RESAMPLES:,} resamples, seed {SEED}; with one task over "
    f"its instances; none for fewer than {LEAST_DRAWN}"
)

Instance = tuple[str, int]
"""(task id, seed)"""
Verdicts = Mapping[Instance, Sequence[bool]]
"""Instance -> whether each attempt with a verdict passed."""


def by_instance(rows: Iterable[EpisodeRow]) -> dict[Instance, list[bool]]:
    """Return instance -> whether each attempt with a verdict passed; an instance without one is left out."""
    verdicts: dict[Instance, list[bool]] = defaultdict(list)
    for row in rows:
        if row.outcome != "invalid":
            verdicts[row.task_id, row.seed].append(row.outcome == "pass")
    return dict(verdicts)


def mode_score(
    rows: Sequence[EpisodeRow], tasks: Sequence[str], heldout: Sequence[str], attempts: int
) -> ModeScore:
    """Return the score of the episodes of one mode, with `tasks` and `heldout` in their order."""
    parts: list[list[EpisodeRow]] = [[], []]
    for row in rows:
        parts[row.heldout].append(row)
    scores = [
        [
            _task_score(name, [row for row in part if row.task_id == name], attempts)
            for name in names
        ]
        for part, names in zip(parts, (tasks, heldout), strict=True)
    ]
    estimates = [_estimates(by_instance(part), attempts) for part in parts]
    return ModeScore(
        tasks=scores[0],
        heldout=scores[1],
        pass_at=estimates[0],
        heldout_pass_at=estimates[1],
    )


def _task_score(name: str, rows: Sequence[EpisodeRow], attempts: int) -> TaskScore:
    """Return the score of one task from its episodes."""
    valid = [row for row in rows if row.outcome != "invalid"]
    verdicts = by_instance(rows)
    pass_at: dict[int, float] = {}
    pass_hat: dict[int, float] = {}
    for k in counts_of(attempts):
        if some := _of_k(verdicts, k, pass_at_k):
            every = _of_k(verdicts, k, pass_hat_k)
            pass_at[k], pass_hat[k] = fsum(some) / len(some), fsum(every) / len(every)
    return TaskScore(
        task_id=name,
        episodes=len(valid),
        passed=sum(row.outcome == "pass" for row in valid),
        invalid=len(rows) - len(valid),
        steps=sum(row.steps for row in valid),
        rewards=fsum(reward_of(row.outcome, row.reward) or 0.0 for row in valid),
        ends=dict(sorted(Counter(row.stop_reason for row in rows).items())),
        pass_at=pass_at,
        pass_hat=pass_hat,
    )


def _of_k(verdicts: Verdicts, k: int, estimate: Callable[[int, int, int], float]) -> list[float]:
    """Return the estimate of each instance that has at least k attempts with a verdict."""
    return [
        estimate(len(passed), sum(passed), k) for passed in verdicts.values() if len(passed) >= k
    ]


def _estimates(verdicts: Verdicts, attempts: int) -> list[PassAtK]:
    """Return success within k attempts, for each k for which some instance has enough attempts."""
    estimates = []
    for k in counts_of(attempts):
        complete = {name: passed for name, passed in verdicts.items() if len(passed) >= k}
        if not complete:
            continue
        some, some_interval = over_tasks(_by_task(complete, k, pass_at_k), seed=SEED)
        every, every_interval = over_tasks(_by_task(complete, k, pass_hat_k), seed=SEED)
        estimates.append(
            PassAtK(
                k=k,
                any=some,
                any_interval=some_interval,
                every=every,
                every_interval=every_interval,
                tasks=len({task for task, _ in complete}),
                instances=len(complete),
            )
        )
    return estimates


def _by_task(
    verdicts: Verdicts, k: int, estimate: Callable[[int, int, int], float]
) -> list[list[float]]:
    """Return the estimates of the instances of each task: [T][I]."""
    values: dict[str, list[float]] = defaultdict(list)
    for (task, _), passed in verdicts.items():
        values[task].append(estimate(len(passed), sum(passed), k))
    return list(values.values())
