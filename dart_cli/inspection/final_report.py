"""The final report of a run: a summary, a success curve, films before and after, one JSON line.

write_report  writes RUN/report/{curve.png, films.png, report.json}, prints the summary and the JSON line
summarize     the numbers of held-out success in the JSON line
why_short     why a run made fewer updates than planned
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dart_cli.config.schema import Config
from dart_cli.data.progress import restored_play
from dart_cli.data.stalls import NO_GRADIENT
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.rows import RunRow
from dart_cli.evaluation.films import read_films
from dart_cli.evaluation.results import (
    AFTER,
    BEFORE,
    FRESH,
    UNTRAINED,
    Evaluation,
    TaskScore,
    read_evaluation,
    score_of,
)
from dart_cli.inspection import curves
from dart_cli.inspection.film_pictures import draw_films, pick_films
from dart_cli.inspection.learning import assess_learning
from dart_cli.inspection.pictures import draw_curve
from dart_cli.inspection.run_counts import RunCounts, count, unaccounted
from dart_cli.runtime.tables import fraction, minutes, page_table

MOSTLY_DROPPED = 0.9
"""Share of dropped groups from which on the report explains why a run made too few updates."""


def write_report(config: Config, *, minutes_total: float, ended_by: str = "") -> dict[str, Any]:
    """Write the files of the report, print the summary, and return the JSON object.

    If stdout is not a terminal, the object is its last line. `minutes_total` is how long this `dart up` took;
    earlier ones may have done parts of the run. `ended_by` is the error that ended the run, if there is one.
    Raises RunDirectoryError if there is no run.
    """
    run_dir = config.run.dir
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    with open_reader(run_dir) as reader:
        run, counts, curve = reader.run(), count(reader), curves.read_curve(reader)
        version = reader.newest_version()
        own = restored_play(reader, config.data.reward).view(counts.replays.updates)
    before, after = read_evaluation(run_dir, BEFORE), read_evaluation(run_dir, AFTER)
    parts_s = run.active_s + sum(part.wall_s for part in (before, after) if part)
    result = summarize(before, after) | {
        "minutes": round(run.active_s / 60, 2),
        "minutes_total": round(max(minutes_total, parts_s / 60), 2),
        "trajectories": counts.all.verdicts["pass"] + counts.all.verdicts["fail"],
        "unaccounted": counts.remainder.total,  # what does not add up; 0 if all does
        "policy_version": -1 if version is None else version.policy_version,
        "updates": counts.replays.updates,
        "updates_planned": config.train.updates,
        "stopped_at": run.learned or None,  # the success that was proved, if train.stop_at ended it
        "note": "; ".join(filter(None, [why_short(config, run, counts), ended_by])),
        **assess_learning(config, own, before, after, curve)._asdict(),
        "seed": config.run.seed,
        "run_dir": str(run_dir),
    }
    if curve:
        picture = draw_curve(folder / "curve.png", curve, (before, after), run.created_at)
        result["curve"] = str(picture)
    pairs = pick_films(read_films(run_dir, BEFORE), read_films(run_dir, AFTER))
    if pairs:
        result["films"] = str(draw_films(folder / "films.png", run_dir, pairs))
    (folder / "report.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    _print_summary(result, run, folder / "report.json", unaccounted(counts.remainder))
    if not sys.stdout.isatty():
        sys.stdout.write(json.dumps(result) + "\n")
    return result


# --- numbers ---------------------------------------------------------------------------------


def summarize(before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """Return held-out success before and after: sampled, greedy, by task, and of tasks never trained on.

    A figure is None if its evaluation was not made.
    """
    sampled = [score_of(evaluation, "sampled") for evaluation in (before, after)]
    greedy = [score_of(evaluation, "greedy") for evaluation in (before, after)]
    random_clicks, last = score_of(before, "random"), sampled[1].overall
    newest = after or before
    return {
        "part": newest.part_name(heldout=False) if newest else FRESH,
        "success_before": sampled[0].overall.success,
        "success_after": last.success,
        "success_after_interval": [round(bound, 4) for bound in last.interval]
        if last.episodes
        else None,
        "random_clicks": random_clicks.overall.success,
        "greedy_before": greedy[0].overall.success,
        "greedy_after": greedy[1].overall.success,
        "episodes": last.episodes,
        "invalid": sum(mode.overall.invalid for mode in (*sampled, *greedy, random_clicks)),
        "per_task": _by_task(*(mode.tasks for mode in (*sampled, *greedy))),
        "heldout": {
            "part": UNTRAINED,
            "before": sampled[0].heldout_overall.success,
            "after": sampled[1].heldout_overall.success,
            "greedy_before": greedy[0].heldout_overall.success,
            "greedy_after": greedy[1].heldout_overall.success,
            "per_task": _by_task(*(mode.heldout for mode in (*sampled, *greedy))),
        },
    }


def why_short(config: Config, run: RunRow, counts: RunCounts) -> str:
    """Return why a run made fewer updates than planned, and the fix; empty if it made all of them."""
    train, updates = config.train, counts.replays.updates
    if updates >= train.updates or 0 < train.stop_at <= run.learned:
        return ""
    states = counts.all.by_state
    over = counts.all.trajectories - states["leased"] - states["playing"]
    text = f"{updates} of {train.updates} updates ({updates / train.updates:.0%})"
    if 0 < 60 * train.max_minutes <= run.active_s:
        text += f" in train.max_minutes = {train.max_minutes:g}; raise it to go on from here"
    elif 0 < train.max_trajectories <= over:
        text += (
            f" in train.max_trajectories = {train.max_trajectories}; raise it to go on from here"
        )
    dropped = [row for row in counts.groups if row.state == "dropped"]
    groups = sum(row.number for row in counts.groups)
    if dropped and sum(row.number for row in dropped) >= MOSTLY_DROPPED * groups:
        commonest = dropped[0]
        text += f"; {commonest.number} of {groups} groups were dropped as {commonest.reason}"
        text += f": {NO_GRADIENT[commonest.reason]}" if commonest.reason in NO_GRADIENT else ""
    return text


def _by_task(*columns: Sequence[TaskScore]) -> dict[str, dict[str, float | None]]:
    """Return task -> success before and after, sampled and greedy; None where it was not evaluated."""
    names = ("before", "after", "greedy_before", "greedy_after")
    result: dict[str, dict[str, float | None]] = {}
    for name, scores in zip(names, columns, strict=True):
        for score in scores:
            result.setdefault(score.task_id, dict.fromkeys(names))[name] = score.success
    return result


def _print_summary(
    result: Mapping[str, Any], run: RunRow, report: Path, errors: Sequence[str]
) -> None:
    """Print a table of held-out success, and lines on the rest of the report."""
    console = Console(markup=False, highlight=False)
    heldout = result["heldout"]
    if result["per_task"] or heldout["per_task"]:
        numbers = ("sampled", "greedy")
        table = page_table("success, before -> after", "task", *numbers, right=numbers)
        for rows, whole in ((result["per_task"], result), (heldout["per_task"], heldout)):
            names = ("success_before", "success_after") if whole is result else ("before", "after")
            sampled = _before_after(*(whole[name] for name in names))
            greedy = _before_after(whole["greedy_before"], whole["greedy_after"])
            table.add_row(
                whole["part"], sampled if rows else "-", greedy if rows else "-", style="bold"
            )
        table.add_section()
        for rows in (result["per_task"], heldout["per_task"]):
            for task_id, row in rows.items():
                greedy = _before_after(row["greedy_before"], row["greedy_after"])
                table.add_row(task_id, _before_after(row["before"], row["after"]), greedy)
            table.add_section()
        console.print(table)
    totals = f"{result['trajectories']} trajectories, policy version {result['policy_version']}"
    lines = [
        f"{totals}, {minutes(run.active_s)} of training; everything is in {result['run_dir']}",
        *([f"note: {result['note']}"] if result["note"] else []),
        *(f"error: {line}: see `dart data stats {result['run_dir']}`" for line in errors),
        *(f"{name}: {result[name]}" for name in ("curve", "films") if name in result),
        *([result["why"]] if result["why"] else []),
        *([f"report: {report}"] if console.is_terminal else []),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _before_after(before: float | None, after: float | None) -> str:
    return f"{fraction(before)} -> {fraction(after)}"
