"""What a judge model decided in a run, and how far it agrees with the evaluators.

judge_lines  in words, for the terminal
judge_json   as plain values, for JSON
"""

from __future__ import annotations

from typing import Any

from bus.snapshot import JudgeView
from dart_cli.algo.statistics import Agreement


def judge_lines(judge: JudgeView) -> list[str]:
    """Return what it decided, how far it agrees with the evaluators, what it cost."""
    name, lines = f"judge {judge.judge}", []
    if judge.verdicts:
        said = ", ".join(
            f"{judge.verdicts.get(outcome, 0)} {outcome}" for outcome in ("pass", "fail", "invalid")
        )
        lines.append(
            f"{name} gave the verdict of {sum(judge.verdicts.values())} trajectories "
            f"of tasks without an evaluator: {said}"
        )
    found = _agreement(judge)
    if found.n and found.share is not None:
        low, high = found.share_interval
        kappa = "kappa undefined, both say the same of all"
        if found.kappa is not None and (interval := found.kappa_interval) is not None:
            kappa = f"kappa {found.kappa:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
        lines.append(
            f"{name} beside the evaluators, n = {found.n}: agree {found.share:.2f} "
            f"[{low:.2f}, {high:.2f}], {kappa}; both pass {found.both_pass}, both fail {found.both_fail}, "
            f"the judge passes what the evaluator fails {found.judge_alone}, the reverse "
            f"{found.evaluator_alone}"
        )
    each_s = judge.seconds / judge.judged if judge.judged else 0.0
    without = f"; {judge.unanswered} without an answer" if judge.unanswered else ""
    lines.append(
        f"{name}: {judge.judged} trajectories, {judge.calls} calls, {judge.prompt_tokens} + "
        f"{judge.completion_tokens} tokens, {each_s:.1f} s each{without}"
    )
    return lines


def judge_json(judge: JudgeView) -> dict[str, Any]:
    """With the agreement and its 95 % intervals."""
    found = _agreement(judge)
    return judge.model_dump() | {
        "n": found.n,
        "agreement": found.share,
        "agreement_interval": list(found.share_interval),
        "kappa": found.kappa,
        "kappa_interval": None if found.kappa_interval is None else list(found.kappa_interval),
    }


def _agreement(judge: JudgeView) -> Agreement:
    """Over the trajectories of which judge and evaluator have an opinion."""
    return Agreement(judge.both_pass, judge.both_fail, judge.judge_alone, judge.evaluator_alone)
