"""Whether a run learned: by its held-out success, its curve and what the policy itself played.

Learning         the two keys of the report: the verdict, and the figures behind it
assess_learning  reaches the verdict
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import NamedTuple

from bus.snapshot import OwnView
from dart_cli.config.schema import Config
from dart_cli.data.stalls import RISE, SUCCESSES_FIRST, malformed_text
from dart_cli.data.store.rows import CurvePoint
from dart_cli.evaluation.results import Evaluation, TaskScore, score_of
from dart_cli.inspection import curves

LEAST_TRAJECTORIES = 128
"""Trajectories below which a run shows nothing: of the policy's own, and of both ends of the curve together."""
SOLVED = 0.9
"""Success from which on there is little to learn, so that a level line is no fault."""


class Learning(NamedTuple):
    """Two keys of the report."""

    learned: bool | None  # None where the evidence is too thin to say
    why: str  # of a run that shows no improvement: figures and cure; else empty


def assess_learning(
    config: Config,
    own: OwnView,
    before: Evaluation | None,
    after: Evaluation | None,
    curve: Sequence[CurvePoint],
) -> Learning:
    """Whether success rose beyond chance, held out or while training; False needs clear evidence, too."""
    if config.train.learner != "torch":
        return Learning(None, "")
    held_out = _held_out(before, after)
    ends = curves.ends(curve)
    training = ends if ends and sum(e.episodes for e in ends) >= LEAST_TRAJECTORIES else None
    if held_out is not None and held_out[1].interval[0] > held_out[0].interval[1]:
        return Learning(True, "")
    if training is not None and _rose(*training):
        return Learning(True, "")
    malformed = malformed_text(own)
    played = own.passed + own.failed_since
    if not own.passed and own.failed_since >= LEAST_TRAJECTORIES:
        if own.reward > own.reward_first + RISE:  # rewards as values rose without a pass
            return Learning(True, "")
        figures = [f"none of its {played} trajectories passed", *_told(held_out, None)]
        return Learning(False, _line("nothing was learned", figures, malformed))
    if training is not None and _solved(held_out, training):
        return Learning(None, "")
    if training is None and not malformed:
        return Learning(None, "")
    return Learning(False, _line("no improvement is shown", _told(held_out, training), malformed))


def _held_out(
    before: Evaluation | None, after: Evaluation | None
) -> tuple[TaskScore, TaskScore] | None:
    """Return the sampled episodes of both evaluations; None where one has none."""
    was, now = (score_of(each, "sampled").overall for each in (before, after))
    return (was, now) if was.episodes and now.episodes else None


def _rose(first: curves.Point, last: curves.Point) -> bool:
    """Whether the last success is above the first by more than chance explains, 95 %."""
    noise = hypot(first.high - first.low, last.high - last.low) / 2
    return last.success - first.success > noise


def _solved(
    held_out: tuple[TaskScore, TaskScore] | None, training: tuple[curves.Point, curves.Point]
) -> bool:
    after = held_out[1].success if held_out else None
    return (training[1].success if after is None else after) >= SOLVED


def _told(
    held_out: tuple[TaskScore, TaskScore] | None,
    training: tuple[curves.Point, curves.Point] | None,
) -> list[str]:
    """Success at both ends, with its 95 % intervals."""
    found = []
    if held_out is not None:
        before, after = (
            f"{each.success:.2f} ({each.interval[0]:.2f} to {each.interval[1]:.2f})"
            for each in held_out
        )
        found.append(f"held out {before} -> {after}")
    if training is not None:
        first, last = (
            f"{each.success:.2f} ({each.low:.2f} to {each.high:.2f})" for each in training
        )
        found.append(
            f"while training {first} in the first fifth of its versions, {last} in the last"
        )
    return found


def _line(verdict: str, figures: Sequence[str], malformed: str) -> str:
    cure = "" if SUCCESSES_FIRST in malformed else f"What helps: {SUCCESSES_FIRST}"
    told = "; ".join(each for each in (*figures, malformed) if each)
    return f"{verdict}: {told}. {cure}".rstrip()
