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
"""Fewest trajectories that show anything: the policy's own, or both ends of the curve together."""
SOLVED = 0.9
"""Success from which on there is little to learn, so that a flat curve is no fault."""


class Learning(NamedTuple):
    """The verdict on a run: two keys of the report."""

    learned: bool | None  # None if the evidence is too thin to decide
    why: str  # the figures and the fix if the run shows no improvement; else empty


def assess_learning(
    config: Config,
    own: OwnView,
    before: Evaluation | None,
    after: Evaluation | None,
    curve: Sequence[CurvePoint],
) -> Learning:
    """Return the verdict: did success rise by more than chance explains, held out or while training?

    `own` counts the policy's own trajectories, `curve` is success while training. Both True and False need
    clear evidence.
    """
    if config.train.learner != "torch":
        return Learning(None, "")
    held_out = _held_out(before, after)
    ends = curves.ends(curve)
    training = ends if ends and sum(end.episodes for end in ends) >= LEAST_TRAJECTORIES else None
    if held_out is not None and held_out[1].interval[0] > held_out[0].interval[1]:
        return Learning(True, "")
    if training is not None and _rose(*training):
        return Learning(True, "")
    malformed = malformed_text(own)
    trajectories = own.passed + own.failed_since
    if not own.passed and own.failed_since >= LEAST_TRAJECTORIES:
        if own.reward > own.reward_first + RISE:  # rewards as values rose without a pass
            return Learning(True, "")
        figures = [f"none of its {trajectories} trajectories passed", *_figures(held_out, None)]
        return Learning(False, _explanation("nothing was learned", figures, malformed))
    if training is not None and _solved(held_out, training):
        return Learning(None, "")
    if training is None and not malformed:
        return Learning(None, "")
    figures = _figures(held_out, training)
    return Learning(False, _explanation("no improvement is shown", figures, malformed))


def _held_out(
    before: Evaluation | None, after: Evaluation | None
) -> tuple[TaskScore, TaskScore] | None:
    """Return the scores of the sampled episodes of both evaluations; None if one has no such episode."""
    first, last = (score_of(evaluation, "sampled").overall for evaluation in (before, after))
    return (first, last) if first.episodes and last.episodes else None


def _rose(first: curves.Point, last: curves.Point) -> bool:
    """Return True if the last success is above the first by more than chance explains (95 %)."""
    noise = hypot(first.high - first.low, last.high - last.low) / 2
    return last.success - first.success > noise


def _solved(
    held_out: tuple[TaskScore, TaskScore] | None, training: tuple[curves.Point, curves.Point]
) -> bool:
    """Return True if success at the end is at least SOLVED, held out or else while training."""
    after = held_out[1].success if held_out else None
    return (training[1].success if after is None else after) >= SOLVED


def _figures(
    held_out: tuple[TaskScore, TaskScore] | None,
    training: tuple[curves.Point, curves.Point] | None,
) -> list[str]:
    """Return success before and after, with 95 % intervals: held out, and while training."""
    figures = []
    if held_out is not None:
        before, after = (
            f"{score.success:.2f} ({score.interval[0]:.2f} to {score.interval[1]:.2f})"
            for score in held_out
        )
        figures.append(f"held out {before} -> {after}")
    if training is not None:
        first, last = (
            f"{point.success:.2f} ({point.low:.2f} to {point.high:.2f})" for point in training
        )
        figures.append(
            f"while training {first} in the first fifth of its versions, {last} in the last"
        )
    return figures


def _explanation(verdict: str, figures: Sequence[str], malformed: str) -> str:
    """Return the verdict with its figures and a fix. `malformed` is a text on malformed completions."""
    fix = "" if SUCCESSES_FIRST in malformed else f"What helps: {SUCCESSES_FIRST}"
    reasons = "; ".join(filter(None, (*figures, malformed)))
    return f"{verdict}: {reasons}. {fix}".rstrip()
