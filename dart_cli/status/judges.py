"""What a judge model decided in a run, and how far it agrees with the evaluators.

judge_lines  in words, for the terminal
judge_json   as plain values, for JSON
"""

from __future__ import annotations

from typing import Any

from bus.snapshot import JudgeView
from dart_cli.algo.statistics import Agreement


def judge_lines(judge: JudgeView) -> list[str]:
    """Return lines with the judge's verdicts, its agreement with the evaluators, and its cost."""
    name, lines = f"judge {judge.judge}", []
    if judge.verdicts:
        verdicts = ", ".join(
            f"{judge.verdicts.get(outcome, 0)} {outcome}" for outcome in ("pass", "fail", "invalid")
        )
        lines.append(
            f"{name} gave the verdict of {sum(judge.verdicts.values())} trajectories "
            f"of tasks without an evaluator: {verdicts}"
        )
    agreement = _agreement(judge)
    if agreement.n and agreement.share is not None:
        low, high = agreement.share_interval
        kappa = "kappa undefined, because both gave one verdict to all"
        if agreement.kappa is not None and (interval := agreement.kappa_interval) is not None:
            kappa = f"kappa {agreement.kappa:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
        lines.append(
            f"{name} compared with the evaluators, n = {agreement.n}: agree {agreement.share:.2f} "
            f"[{low:.2f}, {high:.2f}], {kappa}; both pass {agreement.both_pass}, "
            f"both fail {agreement.both_fail}, only the judge passes {agreement.judge_alone}, "
            f"only the evaluator passes {agreement.evaluator_alone}"
        )
    seconds_each = judge.seconds / judge.judged if judge.judged else 0.0
    unanswered = f"; {judge.unanswered} without an answer" if judge.unanswered else ""
    lines.append(
        f"{name}: {judge.judged} trajectories, {judge.calls} calls, {judge.prompt_tokens} + "
        f"{judge.completion_tokens} tokens, {seconds_each:.1f} s each{unanswered}"
    )
    return lines


def judge_json(judge: JudgeView) -> dict[str, Any]:
    """Return the counts of the judge, its agreement with the evaluators, and the 95 % intervals."""
    agreement = _agreement(judge)
    kappa_interval = agreement.kappa_interval
    return judge.model_dump() | {
        "n": agreement.n,
        "agreement": agreement.share,
        "agreement_interval": list(agreement.share_interval),
        "kappa": agreement.kappa,
        "kappa_interval": None if kappa_interval is None else list(kappa_interval),
    }


def _agreement(judge: JudgeView) -> Agreement:
    """Return the agreement over the trajectories that both the judge and the evaluator have decided."""
    return Agreement(judge.both_pass, judge.both_fail, judge.judge_alone, judge.evaluator_alone)
