"""An evaluation as a row of a leaderboard, with everything that makes its score repeatable.

row_of       the row of one mode, as plain values
as_markdown  the row as a table of one line, and a list of the rest below it
"""

from __future__ import annotations

from collections.abc import Mapping

from bus.errors import UserError
from dart_cli.evaluation.results import Evaluation, Mode
from dart_cli.runtime.tables import moment

_IN_TABLE = (
    "benchmark",
    "model",
    "steps",
    "pass@1",
    "pass@k",
    "mean reward",
    "tasks",
    "episodes",
    "mode",
)
"""Keys in the table; the other keys are listed below it."""


def row_of(
    evaluation: Evaluation, mode: Mode | None = None, *, heldout: bool = False
) -> dict[str, object]:
    """Return the row of one mode, by default the first. Raises UserError if the mode has no score."""
    mode = mode or next(iter(evaluation.modes))
    if mode not in evaluation.modes:
        raise UserError(
            f"{evaluation.name} has no episodes of mode {mode}; it has {', '.join(evaluation.modes)}"
        )
    score = evaluation.modes[mode]
    whole, rows = (
        (score.heldout_overall, score.heldout) if heldout else (score.overall, score.tasks)
    )
    if whole.success is None:
        raise UserError(
            f"{evaluation.name}: no episode of mode {mode} has a verdict, so there is no score"
        )
    estimates = score.heldout_pass_at if heldout else score.pass_at
    settings, protocol = evaluation.settings, evaluation.protocol
    values: Mapping[str, object] = settings.values
    episodes = [row for row in evaluation.episodes if (row.mode, row.heldout) == (mode, heldout)]
    first = estimates[0] if estimates else None
    return {
        "benchmark": protocol.title if protocol else settings.suite,
        "protocol": protocol.name if protocol else "none",
        "deviations": protocol.deviations if protocol else [],
        "left open": protocol.left_to_model if protocol else [],
        "suite": settings.suite,
        "suite digest": settings.suite_digest,
        "suite options": values.get("env.options", {}),
        "part": evaluation.part_name(heldout=heldout),
        "tasks": len(rows),
        "instances": len({(row.task_id, row.seed) for row in episodes}),
        "attempts": evaluation.attempts if mode != "greedy" else 1,
        "episodes": whole.episodes,
        "invalid": whole.invalid,
        "gave up": whole.ends.get("gave_up", 0),
        "malformed": whole.ends.get("malformed", 0),
        "left out": len(evaluation.left_out),
        "steps": _limit(evaluation),
        "mode": mode,
        "pass@1": first.any if first else whole.success,
        "pass@1 interval": first.any_interval if first else whole.interval,
        "interval method": evaluation.interval_method if first else "95 %, Wilson",
        "pass@k": {str(estimate.k): estimate.any for estimate in estimates},
        "pass^k": {str(estimate.k): estimate.every for estimate in estimates},
        "mean reward": whole.mean_reward,
        "mean steps": whole.mean_steps,
        "model": evaluation.model,
        "model digest": settings.model_digest,
        "weights": evaluation.weights,
        "weights digest": settings.weights_digest,
        "policy version": evaluation.policy_version,
        "versions that answered": sorted({version for row in episodes for version in row.versions}),
        "action_parser": values.get("policy.action_parser"),
        "coordinates": values.get("policy.coordinates"),
        "history": {
            key.removeprefix("policy."): value
            for key, value in values.items()
            if key.startswith("policy.history")
        },
        "screen": sorted({f"{row.screen[0]}x{row.screen[1]}" for row in episodes if row.screen}),
        "temperature": 0.0 if mode == "greedy" else values.get("rollout.temperature"),
        "max_tokens": values.get("rollout.max_tokens"),
        "engine": values.get("rollout.engine"),
        "dtype": values.get("model.dtype"),
        "seeds": _range([row.seed for row in episodes]),
        "run seed": values.get("run.seed"),
        "settings digest": settings.digest,
        "dart": evaluation.dart,
        "date": moment(evaluation.finished_at),
        "wall s": round(evaluation.wall_s, 1),
        "notes": evaluation.notes,
    }


def _limit(evaluation: Evaluation) -> str:
    """Return the step limit in words: a number for all tasks, or `each task's own`."""
    limit = evaluation.settings.values.get("eval.max_steps")
    return str(limit) if limit else "each task's own"


def as_markdown(row: Mapping[str, object]) -> str:
    """Return the row as Markdown: a table for a leaderboard, and below it what a repetition needs."""
    columns = [key for key in _IN_TABLE if row[key] not in (None, "", {}, [])]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        "| " + " | ".join(_cell(key, row) for key in columns) + " |",
        "",
    ]
    lines += [
        f"- {key}: {_text(value)}"
        for key, value in row.items()
        if key not in columns and value not in (None, "", {}, [])
    ]
    return "\n".join(lines) + "\n"


def _cell(key: str, row: Mapping[str, object]) -> str:
    """Return the content of a cell of the table: the score with its interval, episodes with invalid ones."""
    text = _text(row[key])
    if key == "pass@1" and isinstance(interval := row["pass@1 interval"], list | tuple):
        text += f" ({interval[0]:.3f} - {interval[1]:.3f})"
    if key == "episodes" and row["invalid"]:
        text += f" and {row['invalid']} invalid"
    return text.replace("|", "\\|")


def _text(value: object) -> str:
    """Return a value of the row as text."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
        case list() | tuple():
            return "; ".join(map(_text, value))
    return str(value)


def _range(seeds: list[int]) -> str:
    return f"{min(seeds)} to {max(seeds)}" if seeds else ""
