"""What the probes' episodes of one task show.

    Bounds       what counts as slow, and as guessable
    TaskReport   one task; `wrong` if its evaluator or environment must be fixed
    judge        episodes -> TaskReport

A pass by doing nothing, or by a claim alone, is false. A pass by random clicks is not: some tasks
are done by pressing one large button. Tasks that random clicks pass more often than
`Bounds.guessable`, with 95 % confidence, are listed as guessable, because they teach little. Tasks
without an oracle that random clicks never passed are listed as unproven: nothing shows that they can be
passed at all.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from PIL import Image, ImageChops

from dart_cli.algo.statistics import wilson
from dart_cli.suite_check.probes import EXCUSES, ProbeEpisode
from envs.contract.base import Task
from envs.contract.screenshots import as_seen

LEAST_GUESSES = 3
"""With fewer random episodes no task is called guessable."""


@dataclass(frozen=True)
class Bounds:
    """Limits beyond which a task is slow or guessable."""

    step_s: float = 1.0  # 95th percentile of the steps
    reset_s: float = 10.0  # likewise of the resets
    guessable: float = 0.2  # share of the random episodes that pass, with 95 % confidence


MISTAKES = {
    "false_passes": "passes without doing it",
    "true_at_reset": "true at reset",
    "errors": "breaks",
    "flaky": "does not repeat",
    "oracle_failures": "its oracle fails",
    "odd_rewards": "rewards a pass too little",
}
"""Fields of TaskReport: what must be fixed, by kind."""


@dataclass(frozen=True)
class TaskReport:
    """One task. Each text begins with the seed it happened with."""

    task_id: str
    episodes: int
    left_out: int = 0  # episodes not played: the first one broke, or a signal stopped the check
    false_passes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # environment or evaluator broke
    true_at_reset: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)  # a seed that did not repeat
    oracle_failures: list[str] = field(default_factory=list)
    odd_rewards: list[str] = field(default_factory=list)  # of passes, too low
    partial_passes: bool = False  # a pass had a reward below 1.0
    oracle: tuple[int, int] | None = None  # (passed, played); None where there is no oracle
    random: tuple[int, int] = (0, 0)  # (passed, played)
    reset_p95_s: float | None = None
    step_p95_s: float | None = None
    slow: list[str] = field(default_factory=list)
    guessable: bool = False
    unproven: bool = False  # has no oracle, and no episode passed

    @property
    def wrong(self) -> bool:
        """Whether anything must be fixed; slow, guessable and unproven tasks are only reported."""
        return any(getattr(self, kind) for kind in MISTAKES)

    def as_json(self) -> dict[str, Any]:
        """Plain values; times in seconds."""
        told = {name: value for name, value in asdict(self).items() if name != "task_id"}
        return {"wrong": self.wrong, **told}


def judge(
    task: Task, episodes: Sequence[ProbeEpisode], bounds: Bounds, planned: int | None = None
) -> TaskReport:
    """Return what the episodes of one task show. `planned` is how many were to be played; None: these."""
    resets = [each.reset_s for each in episodes if each.reset_s is not None]
    steps = [seconds for each in episodes for seconds in each.step_s]
    reset_p95, step_p95 = percentile(resets, 0.95), percentile(steps, 0.95)
    # The solution of an infeasible task is to declare it infeasible.
    solver = "oracle" if task.feasible else "fail"
    solved = [each for each in episodes if each.probe == solver and each.outcome is not None]
    guessed = [each for each in episodes if each.probe == "random" and each.outcome != "invalid"]
    lucky = sum(each.outcome == "pass" for each in guessed)
    unsolved = any(each.probe == solver and each.outcome is None for each in episodes)
    return TaskReport(
        task_id=task.id,
        episodes=len(episodes),
        left_out=0 if planned is None else planned - len(episodes),
        false_passes=[
            f"seed {each.seed}: by {EXCUSES[each.probe]}: {each.reason}"
            for each in episodes
            if each.probe in EXCUSES and each.probe != solver and each.outcome == "pass"
        ],
        errors=[
            f"seed {each.seed}, {each.probe}: {each.reason}" for each in episodes if each.is_broken
        ],
        true_at_reset=sorted(
            {f"seed {each.seed}: {each.reason}" for each in episodes if each.true_at_reset}
        ),
        flaky=list(_flaky(episodes)),
        oracle_failures=[
            f"seed {each.seed}: {each.reason}" for each in solved if each.outcome == "fail"
        ],
        odd_rewards=list(_odd_rewards(episodes)),
        partial_passes=any(
            each.outcome == "pass" and each.reward is not None and each.reward < 1.0
            for each in episodes
        ),
        oracle=(sum(each.outcome == "pass" for each in solved), len(solved)) if solved else None,
        random=(lucky, len(guessed)),
        reset_p95_s=_rounded(reset_p95),
        step_p95_s=_rounded(step_p95),
        slow=[
            f"{what}s take {seconds:.2f} s (95th percentile), bound {bound:g} s"
            for what, seconds, bound in (
                ("reset", reset_p95, bounds.reset_s),
                ("step", step_p95, bounds.step_s),
            )
            if seconds is not None and seconds > bound
        ],
        guessable=len(guessed) >= LEAST_GUESSES
        and wilson(lucky, len(guessed))[0] > bounds.guessable,
        unproven=unsolved and not solved and lucky == 0,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of them do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _flaky(episodes: Sequence[ProbeEpisode]) -> list[str]:
    """Seeds that did not begin as they did the first time, each once."""
    first: dict[int, ProbeEpisode] = {}
    found: dict[int, str] = {}
    for each in episodes:
        if each.reset_s is None:
            continue
        before = first.setdefault(each.seed, each)
        if each.instruction != before.instruction:
            text = f"the instruction was {before.instruction!r}, then {each.instruction!r}"
            found.setdefault(each.seed, f"seed {each.seed}: {text}")
        elif share := difference(before.screenshot, each.screenshot):
            text = f"{share:.2%} of the first screenshot's pixels differ"
            found.setdefault(each.seed, f"seed {each.seed}: {text}")
    return list(found.values())


def _odd_rewards(episodes: Sequence[ProbeEpisode]) -> Iterator[str]:
    """Yield passes that no threshold explains: their reward is 0, or below that of a task's failure.

    A pass may well have less than 1.0, where its task has a threshold of its own.
    """
    failures = [each for each in episodes if each.outcome == "fail" and each.reward is not None]
    best = max(failures, key=lambda each: each.reward or 0.0, default=None)
    for each in episodes:
        if each.outcome != "pass" or each.reward is None:
            continue
        told = f"seed {each.seed}, {each.probe}: passes with reward {each.reward:g}"
        if best is not None and best.reward is not None and each.reward < best.reward:
            yield f"{told}, a failure has {best.reward:g} (seed {best.seed}, {best.probe})"
        elif each.reward == 0.0:
            yield told


def difference(first: bytes, second: bytes) -> float:
    """Share of pixels in which two encoded pictures differ; 1 where their sizes do."""
    if first == second:
        return 0.0
    one, other = (as_seen(Image.open(io.BytesIO(each))) for each in (first, second))
    if one.size != other.size:
        return 1.0
    red, green, blue = ImageChops.difference(one, other).split()
    same = ImageChops.lighter(ImageChops.lighter(red, green), blue).histogram()[0]
    return 1 - same / (one.width * one.height)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
