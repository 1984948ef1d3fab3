"""The results of a finished run: a summary, a success curve, films before and after, one JSON line.

write_report    all of it: RUN/report/{curve.png, films.png, report.json}; JSON last on stdout
summarize       the numbers of the JSON line
why_short       why a run made fewer updates than planned
draw_curve      success by task over policy versions, held-out success at both ends
draw_films      the same held-out episodes before and after, clicks drawn on the screenshots
draw_trajectory one trajectory of the run or its pool, all of it: `dart data show --film`
pick_films      which ones: failed before, passed after
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from bus.errors import UserError
from dart_cli.config.schema import Config
from dart_cli.data.own_play import restored
from dart_cli.data.stall_rules import NO_GRADIENT
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint, RunRow
from dart_cli.evaluation.films import Film, FilmFrame, films_dir, read_films
from dart_cli.evaluation.filmstrip import film_strip
from dart_cli.evaluation.results import (
    Evaluation,
    ModeScore,
    TaskScore,
    read_evaluation,
)
from dart_cli.inspection import curves
from dart_cli.inspection.find import Subject
from dart_cli.inspection.learned import judge_learning
from dart_cli.runtime.tables import fraction, minutes, page_table

BEFORE, AFTER = "before", "after"
"""Names of the evaluations around a run."""

CURVE_BUCKETS = 30
MAX_FILMS = 3
NO_LEARNING = 0.9
"""Share of dropped groups from which on a run that made too few updates is told why."""


def write_report(config: Config, *, minutes_total: float) -> dict[str, Any]:
    """Draw, print the summary and, as the last line of stdout, its JSON; returns that object.

    `minutes_total` is how long this `dart up` took; earlier ones may have done parts of the run.
    Raises RunDirectoryError if there is no run.
    """
    run_dir = config.run.dir
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    with open_reader(run_dir) as reader:
        run = reader.run()
        version = reader.newest_version()
        newest = -1 if version is None else version.policy_version
        bucket = max(1, -(-(newest + 1) // CURVE_BUCKETS))
        curve = reader.success_curve(bucket=bucket)
        updates = sum(batch.state == "trained" for batch in reader.batches())
        groups = reader.count("groups")
        counters = reader.counters()
        own = restored(reader, config.data.reward).view(updates)
        over = reader.trajectories_over()
    trajectories = sum(row.trajectories for row in counters if row.outcome in ("pass", "fail"))
    before, after = read_evaluation(run_dir, BEFORE), read_evaluation(run_dir, AFTER)
    result = summarize(before, after)
    result |= {
        "minutes": round(run.active_s / 60, 2),
        "minutes_total": round(max(minutes_total, _parts_s(run, before, after) / 60), 2),
        "trajectories": trajectories,
        "policy_version": newest,
        "updates": updates,
        "updates_planned": config.train.updates,
        "stopped_at": run.learned
        or None,  # success that was proved when train.stop_at ended the run
        "note": why_short(config, run, updates, groups, over),
        **judge_learning(config, own, before, after, curve)._asdict(),
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
    _print_summary(result, run, before, after, folder / "report.json")
    if not sys.stdout.isatty():
        sys.stdout.write(json.dumps(result) + "\n")
    return result


# --- numbers ---------------------------------------------------------------------------------


def summarize(before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """Held-out success before and after: sampled, greedy, by task, and of compositions.

    A figure is None where its evaluation was not made; `averaged` is None where that after the run was of
    published weights, else the updates that the averaged ones are after.
    """
    guess = _mode(before, "random")
    sampled = [_mode(each, "sampled") for each in (before, after)]
    greedy = [_mode(each, "greedy") for each in (before, after)]
    return {
        "success_before": _success(sampled[0]),
        "success_after": _success(sampled[1]),
        "success_after_interval": _interval(sampled[1]),
        "averaged": after.averaged if after else None,
        "random_clicks": _success(guess),
        "greedy_before": _success(greedy[0]),
        "greedy_after": _success(greedy[1]),
        "episodes": sampled[1].overall.episodes if sampled[1] else 0,
        "invalid": sum(mode.overall.invalid for mode in (*sampled, *greedy, guess) if mode),
        "per_task": _by_task(*([] if mode is None else mode.tasks for mode in (*sampled, *greedy))),
        "compositions": {
            "before": sampled[0].composed.success if sampled[0] else None,
            "after": sampled[1].composed.success if sampled[1] else None,
            "per_task": _by_task(
                *([] if mode is None else mode.compositions for mode in (*sampled, *greedy))
            ),
        },
    }


def why_short(
    config: Config,
    run: RunRow,
    updates: int,
    groups: Mapping[tuple[str, str], int],
    over: int = 0,
) -> str:
    """Why a run made fewer updates than planned, and the cure; empty where it made them all.

    `groups` are counts by (state, reason), as the store has them; `over` are the trajectories played.
    """
    planned, limit = config.train.updates, config.train.max_minutes
    budget = config.train.max_trajectories
    if updates >= planned or 0 < config.train.stop_at <= run.learned:
        return ""
    text = f"{updates} of {planned} updates ({updates / planned:.0%})"
    if limit and run.active_s >= 60 * limit:
        text += f" in train.max_minutes = {limit:g}; raise it to go on from here"
    elif 0 < budget <= over:
        text += f" in train.max_trajectories = {budget}; raise it to go on from here"
    dropped = Counter({reason: n for (state, reason), n in groups.items() if state == "dropped"})
    if dropped and sum(dropped.values()) >= NO_LEARNING * sum(groups.values()):
        [(most, number)] = dropped.most_common(1)
        text += f"; {number} of {sum(groups.values())} groups were dropped as {most}"
        text += f": {NO_GRADIENT[most]}" if most in NO_GRADIENT else ""
    return text


def _mode(evaluation: Evaluation | None, mode: str) -> ModeScore | None:
    return evaluation.modes.get(mode) if evaluation else None  # type: ignore[call-overload]


def _parts_s(run: RunRow, before: Evaluation | None, after: Evaluation | None) -> float:
    return run.active_s + sum(each.wall_s for each in (before, after) if each)


def _success(mode: ModeScore | None) -> float | None:
    return mode.overall.success if mode else None


def _interval(mode: ModeScore | None) -> list[float] | None:
    return [round(bound, 4) for bound in mode.overall.interval] if mode else None


def _by_task(*columns: Sequence[TaskScore]) -> dict[str, dict[str, float | None]]:
    names = ("before", "after", "greedy_before", "greedy_after")
    result: dict[str, dict[str, float | None]] = {}
    for name, scores in zip(names, columns, strict=True):
        for score in scores:
            result.setdefault(score.task_id, dict.fromkeys(names))[name] = score.success
    return result


def _print_summary(
    result: dict[str, Any],
    run: RunRow,
    before: Evaluation | None,
    after: Evaluation | None,
    report: Path,
) -> None:
    console = Console(markup=False, highlight=False)
    if before or after:
        numbers = ("sampled", "greedy")
        played = "" if result["averaged"] is None else " (averaged weights)"
        title = f"held-out success, before -> after{played}"
        table = page_table(title, "task", *numbers, right=numbers)
        composed = result["compositions"]
        for rows, name, whole in (
            (result["per_task"], "all tasks", (result["success_before"], result["success_after"])),
            (composed["per_task"], "all compositions", (composed["before"], composed["after"])),
        ):
            for task_id, row in rows.items():
                table.add_row(
                    task_id,
                    _arrow(row["before"], row["after"]),
                    _arrow(row["greedy_before"], row["greedy_after"]),
                )
            if rows:
                table.add_row(name, _arrow(*whole), "", style="bold", end_section=True)
        console.print(table)
    console.print(
        f"{result['trajectories']} trajectories, policy version {result['policy_version']}, "
        f"{minutes(run.active_s)} of training; everything is in {result['run_dir']}",
        soft_wrap=True,
    )
    if result["note"]:
        console.print(f"note: {result['note']}", soft_wrap=True)
    for name in ("curve", "films"):
        if name in result:
            console.print(f"{name}: {result[name]}", soft_wrap=True)
    if result["why"]:
        console.print(result["why"], soft_wrap=True)
    if console.is_terminal:
        console.print(f"report: {report}", soft_wrap=True)


def _arrow(before: float | None, after: float | None) -> str:
    return f"{fraction(before)} -> {fraction(after)}"


# --- curve -----------------------------------------------------------------------------------


def draw_curve(
    path: Path,
    by_task: Sequence[CurvePoint],
    ends: tuple[Evaluation | None, Evaluation | None],
    began_at: float,
) -> Path:
    """Success while training by policy version, a line for each task, minutes on the upper axis.

    The thick line is the mean over tasks with its 95 % interval. `ends` are the evaluations before and
    after, drawn at the versions they played, with the 95 % intervals of their sampled episodes; the
    dashed line is what random clicks passed. `began_at` is when the run began, unix seconds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for task_id, points in curves.by_task(by_task).items():
        axes.plot(
            [point.version for point in points],
            [point.success for point in points],
            linewidth=1,
            marker="." if len(points) == 1 else "",
            label=f"{task_id}, n {sum(point.episodes for point in points):,}",
        )
    mean = curves.over_tasks(by_task)
    versions = [point.version for point in mean]
    episodes = sum(point.episodes for point in mean)
    axes.fill_between(
        versions,
        [point.low for point in mean],
        [point.high for point in mean],
        color="black",
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(
        versions,
        [point.success for point in mean],
        color="black",
        linewidth=2.5,
        label=f"mean, while training, n {episodes:,}, 95 %",
    )
    for evaluation, name in zip(ends, (BEFORE, AFTER), strict=True):
        score = _mode(evaluation, "sampled")
        whole = score.overall if score else None
        if evaluation is not None and whole is not None and whole.success is not None:
            at = max(evaluation.policy_version, 0)  # -1 is the model as it comes, which v0 serves
            low, high = whole.interval
            of_what = "" if evaluation.averaged is None else " (averaged weights)"
            label = f"held out {name}{of_what}: {whole.success:.2f}, n {whole.episodes}"
            errors = [[whole.success - low], [high - whole.success]]
            axes.errorbar([at], [whole.success], errors, fmt="o", capsize=4, label=label)
    guess = _mode(ends[0], "random")
    if guess is not None and guess.overall.success is not None:
        whole = guess.overall
        label = f"random clicks: {guess.overall.success:.2f}, n {whole.episodes}"
        axes.axhline(guess.overall.success, color="gray", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("policy version")
    axes.set_ylabel("success")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    marks = mean[:: max(1, len(mean) // 6)]
    clock = axes.secondary_xaxis("top")
    clock.set_xticks([point.version for point in marks])
    clock.set_xticklabels([f"{(point.ended_at - began_at) / 60:.1f}" for point in marks])
    clock.set_xlabel("minutes")
    figure.savefig(path, dpi=120)
    return path


# --- films -----------------------------------------------------------------------------------


def pick_films(before: Sequence[Film], after: Sequence[Film]) -> list[tuple[Film, Film]]:
    """Episodes played in both, one per task, the clearest first, at most `MAX_FILMS`.

    Clearest: failed before and passed after, in many steps.
    """
    earlier = {(film.task_id, film.seed): film for film in before}
    pairs = [
        (earlier[film.task_id, film.seed], film)
        for film in after
        if (film.task_id, film.seed) in earlier and film.outcome != "invalid"
    ]

    def worth(pair: tuple[Film, Film]) -> tuple[int, int]:
        was, now = pair
        return 2 * (now.outcome == "pass") + (was.outcome == "fail"), len(now.frames)

    best: dict[str, tuple[Film, Film]] = {}
    for pair in sorted(pairs, key=worth, reverse=True):
        best.setdefault(pair[1].task_id, pair)
    return list(best.values())[:MAX_FILMS]


def draw_films(path: Path, run_dir: Path, pairs: Sequence[tuple[Film, Film]]) -> Path:
    """One picture: for each pair its instruction, then a strip before and a strip after."""
    strips = []
    for was, now in pairs:
        for name, film in ((BEFORE, was), (AFTER, now)):
            heading = (
                f'{film.task_id}, seed {film.seed}: "{film.instruction}"' if name == BEFORE else ""
            )
            strips.append(film_strip(films_dir(run_dir, name), film, name, heading))
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, optimize=True)
    return path


def draw_trajectory(path: Path, reader: Reader, subject: Subject) -> Path:
    """All steps of one trajectory as a picture. Raises UserError if its screens were removed."""
    steps, trajectory = reader.steps(subject.id), subject.trajectory
    keys = [step.screenshot for step in steps]
    if trajectory is not None and trajectory.final_screenshot is not None:
        keys.append(trajectory.final_screenshot)
    images = reader.screenshots(keys)
    if not steps or len(images) < len(set(keys)):
        why = "its screenshots were removed to keep data.max_gb" if steps else "it has no step yet"
        raise UserError(f"no film of {subject.id}: {why}; choose another trajectory")
    frames = [
        FilmFrame(
            screenshot=step.screenshot, text=step.text, action=step.action, pointed=step.pointed
        )
        for step in steps
    ]
    film = Film(
        task_id=subject.task_id,
        seed=subject.task_seed,
        instruction=reader.instruction(subject.suite, subject.task_id, [subject.id]),
        outcome=(trajectory.outcome if trajectory is not None else "pass") or "invalid",
        reason=(trajectory.verdict_reason if trajectory is not None else "") or "",
        frames=frames,
        last=keys[-1],
    )
    with tempfile.TemporaryDirectory() as folder:
        for key, image in images.items():
            (Path(folder) / key).write_bytes(image)
        heading = f'{film.task_id}, seed {film.seed}: "{film.instruction}"'
        picture = film_strip(Path(folder), film, subject.id, heading, most=len(frames))
    try:
        picture.save(path, format="PNG", optimize=True)
    except OSError as error:
        raise UserError(f"--film {path}: cannot be written: {error.strerror}") from None
    return path
