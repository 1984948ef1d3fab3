"""Report what the probes' episodes show about one task.

    Bounds           limits beyond which a task is slow or guessable
    TaskReport       what the episodes show about one task; `wrong` if its evaluator or environment must be fixed
    report_on_task   makes the report from the episodes

A pass by doing nothing, or by a claim alone, is false. A pass by random clicks is not: some tasks consist of
pressing one large button. Tasks that random clicks pass more often than `Bounds.guessable`, with 95 %
confidence, are listed as guessable, because they teach little. Tasks without an oracle that random clicks
never passed are listed as unproven: nothing shows that they can be passed at all. Tasks that begin alike for
all seeds are listed as fixed: a fresh seed is then no fresh instance.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from PIL import Image, ImageChops

from dart_cli.algo.statistics import wilson
from dart_cli.evaluation.results import LEAST_SEEDS
from dart_cli.suite_check.probes import EXCUSES, ProbeEpisode
from envs.contract.base import Task
from envs.contract.screenshots import as_seen

LEAST_GUESSES = 3
"""Fewest random episodes from which a task can be called guessable."""


@dataclass(frozen=True)
class Bounds:
    """Limits beyond which a task is slow or guessable."""

    step_s: float = 1.0  # 95th percentile of the steps
    reset_s: float = 10.0  # 95th percentile of the resets
    guessable: float = 0.2  # share of the random episodes that pass, with 95 % confidence


MISTAKES = {
    "false_passes": "passes without doing it",
    "true_at_reset": "true at reset",
    "errors": "breaks",
    "flaky": "does not repeat",
    "oracle_failures": "its oracle fails",
    "odd_rewards": "rewards a pass too little",
}
"""Field of TaskReport -> in words, what must be fixed."""


@dataclass(frozen=True)
class TaskReport:
    """The report of one task. Each text begins with the seed of its episode."""

    task_id: str
    episodes: int
    left_out: int = 0  # episodes not played: the first one broke, or a signal stopped the check
    false_passes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # environment or evaluator broke
    true_at_reset: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)  # seeds whose resets differed
    oracle_failures: list[str] = field(default_factory=list)
    odd_rewards: list[str] = field(default_factory=list)  # rewards of passes that are too low
    partial_passes: bool = False  # a pass had a reward below 1.0
    oracle: tuple[int, int] | None = None  # (passed, played); None where there is no oracle
    random: tuple[int, int] = (0, 0)  # (passed, played)
    reset_p95_s: float | None = None
    step_p95_s: float | None = None
    slow: list[str] = field(default_factory=list)
    guessable: bool = False
    unproven: bool = False  # has no oracle, and no episode passed
    fixed: bool = False  # all seeds gave the same instruction and first screenshot

    @property
    def wrong(self) -> bool:
        """Whether anything must be fixed. Slow, guessable, unproven and fixed tasks are only reported."""
        return any(getattr(self, kind) for kind in MISTAKES)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, with times in seconds."""
        fields = {name: value for name, value in asdict(self).items() if name != "task_id"}
        return {"wrong": self.wrong, **fields}


def report_on_task(
    task: Task, episodes: Sequence[ProbeEpisode], bounds: Bounds, planned: int | None = None
) -> TaskReport:
    """Return the report of a task from its episodes.

    `planned` is the number of episodes that were planned; None if all of them were played.
    """
    resets = [episode.reset_s for episode in episodes if episode.reset_s is not None]
    steps = [seconds for episode in episodes for seconds in episode.step_s]
    reset_p95, step_p95 = percentile(resets, 0.95), percentile(steps, 0.95)
    # The solution of an infeasible task is to declare it infeasible.
    solver = "oracle" if task.feasible else "fail"
    solved = [
        episode for episode in episodes if episode.probe == solver and episode.outcome is not None
    ]
    guessed = [
        episode
        for episode in episodes
        if episode.probe == "random" and episode.outcome != "invalid"
    ]
    lucky = sum(episode.outcome == "pass" for episode in guessed)
    unsolved = any(episode.probe == solver and episode.outcome is None for episode in episodes)
    return TaskReport(
        task_id=task.id,
        episodes=len(episodes),
        left_out=0 if planned is None else planned - len(episodes),
        false_passes=[
            f"seed {episode.seed}: by {EXCUSES[episode.probe]}: {episode.reason}"
            for episode in episodes
            if episode.probe in EXCUSES and episode.probe != solver and episode.outcome == "pass"
        ],
        errors=[
            f"seed {episode.seed}, {episode.probe}: {_reason(episode)}"
            for episode in episodes
            if episode.is_broken
        ],
        true_at_reset=sorted(
            {
                f"seed {episode.seed}: {episode.reason}"
                for episode in episodes
                if episode.true_at_reset
            }
        ),
        flaky=list(_flaky(episodes)),
        oracle_failures=[
            f"seed {episode.seed}: {_reason(episode)}"
            for episode in solved
            if episode.outcome == "fail"
        ],
        odd_rewards=list(_odd_rewards(episodes)),
        partial_passes=any(
            episode.outcome == "pass" and episode.reward is not None and episode.reward < 1.0
            for episode in episodes
        ),
        oracle=(sum(episode.outcome == "pass" for episode in solved), len(solved))
        if solved
        else None,
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
        fixed=_is_fixed(episodes),
    )


def _reason(episode: ProbeEpisode) -> str:
    """Return the reason of a verdict, with the first line that the application reported."""
    reported = f"; the application reported at {episode.app_log[0]}" if episode.app_log else ""
    return f"{episode.reason}{reported}"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _flaky(episodes: Sequence[ProbeEpisode]) -> list[str]:
    """Return a text for each seed whose episodes did not all begin in the same way."""
    first: dict[int, ProbeEpisode] = {}
    texts: dict[int, str] = {}
    for episode in episodes:
        if episode.reset_s is None:
            continue
        before = first.setdefault(episode.seed, episode)
        if episode.instruction != before.instruction:
            text = f"the instruction was {before.instruction!r}, then {episode.instruction!r}"
            texts.setdefault(episode.seed, f"seed {episode.seed}: {text}")
        elif share := difference(before.screenshot, episode.screenshot):
            text = f"{share:.2%} of the first screenshot's pixels differ"
            texts.setdefault(episode.seed, f"seed {episode.seed}: {text}")
    return list(texts.values())


def _is_fixed(episodes: Sequence[ProbeEpisode]) -> bool:
    """Return True if the first episodes of all seeds began alike, and there are enough seeds to say so."""
    first: dict[int, ProbeEpisode] = {}
    for episode in episodes:
        if episode.reset_s is not None:
            first.setdefault(episode.seed, episode)
    starts = list(first.values())
    return len(starts) >= LEAST_SEEDS and all(
        other.instruction == starts[0].instruction
        and not difference(starts[0].screenshot, other.screenshot)
        for other in starts[1:]
    )


def _odd_rewards(episodes: Sequence[ProbeEpisode]) -> Iterator[str]:
    """Yield a text for each pass whose reward is 0, or lower than the reward of a failure of the same task.

    A reward below 1.0 alone is no mistake: a task may have its own threshold for a pass.
    """
    failures = [
        episode for episode in episodes if episode.outcome == "fail" and episode.reward is not None
    ]
    best = max(failures, key=lambda episode: episode.reward or 0.0, default=None)
    for episode in episodes:
        if episode.outcome != "pass" or episode.reward is None:
            continue
        text = f"seed {episode.seed}, {episode.probe}: passes with reward {episode.reward:g}"
        if best is not None and best.reward is not None and episode.reward < best.reward:
            yield f"{text}, a failure has {best.reward:g} (seed {best.seed}, {best.probe})"
        elif episode.reward == 0.0:
            yield text


def difference(first: bytes, second: bytes) -> float:
    """Return the share of pixels in which two encoded pictures differ; 1 if their sizes differ."""
    if first == second:
        return 0.0
    one, other = (as_seen(Image.open(io.BytesIO(picture))) for picture in (first, second))
    if one.size != other.size:
        return 1.0
    red, green, blue = ImageChops.difference(one, other).split()
    same = ImageChops.lighter(ImageChops.lighter(red, green), blue).histogram()[0]
    return 1 - same / (one.width * one.height)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
