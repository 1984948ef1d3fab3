"""An evaluation as tables for people, and as JSON for scripts.

headline         a table of the two figures: of trained tasks, and of tasks never trained on
score_table      a table of the scores of one mode by task
pass_at_table    a table of success within k attempts
deviation_lines  lines on deviations from the protocol, and notes
summary          the evaluation as one JSON object
"""

from __future__ import annotations

from rich.table import Table

from dart_cli.evaluation.results import Evaluation, Mode, ModeScore, TaskScore
from dart_cli.runtime.tables import fraction, page_table


def headline(evaluation: Evaluation) -> Table:
    """Return a table of success with intervals: a row for the trained tasks and one for the others."""
    modes = list(evaluation.modes)
    title = f"{evaluation.name}: success, 95 % interval"
    table = page_table(title, "", *modes, "tasks", right=(*modes, "tasks"))
    for heldout in (False, True):
        parts = [
            (score.heldout, score.heldout_overall) if heldout else (score.tasks, score.overall)
            for score in evaluation.modes.values()
        ]
        table.add_row(
            evaluation.part_name(heldout=heldout),
            *(_with_interval(whole) for _, whole in parts),
            str(max(len(rows) for rows, _ in parts)),
            style="bold",
        )
    return table


def _with_interval(score: TaskScore) -> str:
    """Return success with its interval, e.g. `0.84 (0.80 - 0.87)`; a dash without episodes."""
    if score.success is None:
        return "-"
    return f"{fraction(score.success)} ({between(score.interval)})"


def score_table(evaluation: Evaluation, mode: Mode, score: ModeScore) -> Table:
    """Return a table of success by task, those never trained on below; with mean rewards if scores are partial."""
    version = "(base weights)" if evaluation.policy_version < 0 else f"v{evaluation.policy_version}"
    title = "random clicks" if mode == "random" else f"{evaluation.model} {version}, {mode}"
    is_partial = any(row.is_partial for row in (*score.tasks, *score.heldout))
    reward = ("mean reward",) if is_partial else ()
    numbers = ("success", "95 % interval", *reward, "episodes", "invalid", "mean steps")
    table = page_table(title, "task", *numbers, right=numbers)
    for heldout, rows, whole in (
        (False, score.tasks, score.overall),
        (True, score.heldout, score.heldout_overall),
    ):
        if not rows:
            continue
        for row in (*rows, whole):
            table.add_row(
                evaluation.part_name(heldout=heldout) if row is whole else row.task_id,
                fraction(row.success),
                between(row.interval),
                *((fraction(row.mean_reward),) if is_partial else ()),
                str(row.episodes),
                str(row.invalid),
                "-" if row.mean_steps is None else f"{row.mean_steps:.1f}",
                style="bold" if row is whole else "",
                end_section=row is whole,
            )
    return table


def pass_at_table(evaluation: Evaluation, mode: Mode, score: ModeScore) -> Table:
    """Return a table of pass@k and pass^k with intervals, over the trained tasks and over the others."""
    numbers = ("k", "pass@k", "95 % interval", "pass^k", "95 % interval", "instances")
    table = page_table(
        f"within k of {evaluation.attempts} attempts, {mode}", "", *numbers, right=numbers
    )
    for heldout, rows in ((False, score.pass_at), (True, score.heldout_pass_at)):
        for row in rows:
            table.add_row(
                evaluation.part_name(heldout=heldout),
                str(row.k),
                f"{row.any:.3f}",
                between(row.any_interval),
                f"{row.every:.3f}",
                between(row.every_interval),
                str(row.instances),
                end_section=row is rows[-1],
            )
    return table


def between(interval: tuple[float, float] | None) -> str:
    """Return an interval as text, e.g. `0.12 - 0.34`; a dash for None."""
    return "-" if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}"


def deviation_lines(evaluation: Evaluation) -> list[str]:
    """Return a line for each deviation from the protocol, and for each note."""
    lines = []
    protocol = evaluation.protocol
    if protocol is not None:
        if not protocol.deviations:
            lines.append(f"protocol {protocol.name}: as published")
        lines += [f"protocol {protocol.name}, deviates: {line}" for line in protocol.deviations]
        lines += [f"protocol {protocol.name}, left open: {line}" for line in protocol.left_to_model]
    lines += [f"note: {line}" for line in evaluation.notes]
    if not any(score.heldout for score in evaluation.modes.values()):
        lines.append(
            "note: no task is kept apart, so nothing here says how the policy does on other tasks: set env.heldout"
        )
    if evaluation.left_out:
        lines.append(f"note: {len(evaluation.left_out)} tasks of the suite cannot be played here")
    return lines


def summary(evaluation: Evaluation) -> dict[str, object]:
    """Return the evaluation as one flat JSON object, for `--json`."""
    result: dict[str, object] = {
        "model": evaluation.model,
        "weights": evaluation.weights,
        "policy_version": evaluation.policy_version,
        "attempts": evaluation.attempts,
        "protocol": evaluation.protocol.name if evaluation.protocol else "none",
        "deviations": evaluation.protocol.deviations if evaluation.protocol else [],
        "fixed_instances": evaluation.fixed,
        "notes": evaluation.notes,
        "wall_s": round(evaluation.wall_s, 3),
    }
    for mode, score in evaluation.modes.items():
        for name, rows, whole, estimates in (
            ("tasks", score.tasks, score.overall, score.pass_at),
            ("heldout", score.heldout, score.heldout_overall, score.heldout_pass_at),
        ):
            result[f"{mode}_{name}"] = {
                "success": whole.success,
                "interval": list(whole.interval),
                "mean_reward": whole.mean_reward,
                "episodes": whole.episodes,
                "invalid": whole.invalid,
                "mean_steps": whole.mean_steps,
                "ends": whole.ends,
                "pass_at": {str(row.k): row.any for row in estimates},
                "pass_hat": {str(row.k): row.every for row in estimates},
                "per_task": {row.task_id: row.success for row in rows},
                "mean_reward_per_task": {row.task_id: row.mean_reward for row in rows},
            }
    return result
