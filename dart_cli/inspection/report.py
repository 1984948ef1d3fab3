"""The results of a finished run: a summary, a success curve, films before and after, one JSON line.

write_report     all of it: RUN/report/{curve.png, films.png, report.json}; JSON last on stdout
summarize        the numbers of the JSON line
why_short        why a run made fewer updates than planned
judge_learning   whether it learned: from its held-out success, its curve and what the policy itself played
pick_films       the same held-out episodes before and after: failed before, passed after
draw_films       these, with clicks drawn on the screenshots
draw_trajectory  one trajectory of the run or its pool, all of it: `dart data show --film`
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from rich.console import Console

from bus.errors import UserError
from bus.snapshot import OwnView
from dart_cli.config.schema import Config
from dart_cli.data.progress import restored_play
from dart_cli.data.stalls import NO_GRADIENT, RISE, SUCCESSES_FIRST, malformed_text
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint, RunRow
from dart_cli.evaluation.films import Film, FilmFrame, films_dir, read_films
from dart_cli.evaluation.filmstrip_png import film_strip, save_animation
from dart_cli.evaluation.results import Evaluation, Mode, ModeScore, TaskScore, read_evaluation
from dart_cli.inspection import curves
from dart_cli.inspection.counts import RunCounts, count, unaccounted
from dart_cli.inspection.pictures import draw_curve
from dart_cli.inspection.trajectories import Shown
from dart_cli.runtime.tables import fraction, minutes, page_table

BEFORE, AFTER = "before", "after"
"""Names of the evaluations around a run."""

MAX_FILMS = 3
LEAST_TRAJECTORIES = 128
"""Of the policy's own, and of each end of the curve together, below which a run shows nothing."""
SOLVED = 0.9
"""Success from which on there is little to learn, so that a level line is no fault."""
NO_LEARNING = 0.9
"""Share of dropped groups from which on a run that made too few updates is told why."""


def write_report(config: Config, *, minutes_total: float, ended_by: str = "") -> dict[str, Any]:
    """Draw, print the summary and, as the last line of stdout, its JSON; returns that object.

    `minutes_total` is how long this `dart up` took; earlier ones may have done parts of the run.
    `ended_by` is the trouble that ended it, if any did.
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
    parts_s = run.active_s + sum(each.wall_s for each in (before, after) if each)
    result = summarize(before, after) | {
        "minutes": round(run.active_s / 60, 2),
        "minutes_total": round(max(minutes_total, parts_s / 60), 2),
        "trajectories": counts.all.verdicts["pass"] + counts.all.verdicts["fail"],
        "unaccounted": counts.remainder.total,  # of what was played, in no account: 0
        "policy_version": -1 if version is None else version.policy_version,
        "updates": counts.replays.updates,
        "updates_planned": config.train.updates,
        "stopped_at": run.learned or None,  # success that was proved when train.stop_at ended it
        "note": "; ".join(filter(None, [why_short(config, run, counts), ended_by])),
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
    _print_summary(result, run, folder / "report.json", unaccounted(counts.remainder))
    if not sys.stdout.isatty():
        sys.stdout.write(json.dumps(result) + "\n")
    return result


# --- numbers ---------------------------------------------------------------------------------


def summarize(before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """Held-out success before and after: sampled, greedy, by task, and of compositions.

    A figure is None where its evaluation was not made.
    """
    sampled = [_mode(each, "sampled") for each in (before, after)]
    greedy = [_mode(each, "greedy") for each in (before, after)]
    guess, last = _mode(before, "random"), sampled[1].overall
    return {
        "success_before": sampled[0].overall.success,
        "success_after": last.success,
        "success_after_interval": [round(each, 4) for each in last.interval]
        if last.episodes
        else None,
        "random_clicks": guess.overall.success,
        "greedy_before": greedy[0].overall.success,
        "greedy_after": greedy[1].overall.success,
        "episodes": last.episodes,
        "invalid": sum(mode.overall.invalid for mode in (*sampled, *greedy, guess)),
        "per_task": _by_task(*(mode.tasks for mode in (*sampled, *greedy))),
        "compositions": {
            "before": sampled[0].composed.success,
            "after": sampled[1].composed.success,
            "per_task": _by_task(*(mode.compositions for mode in (*sampled, *greedy))),
        },
    }


def why_short(config: Config, run: RunRow, counts: RunCounts) -> str:
    """Why a run made fewer updates than planned, and the cure; empty where it made them all."""
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
    dropped = [each for each in counts.groups if each.state == "dropped"]
    groups = sum(each.number for each in counts.groups)
    if dropped and sum(each.number for each in dropped) >= NO_LEARNING * groups:
        most = dropped[0]  # the most frequent reason
        text += f"; {most.number} of {groups} groups were dropped as {most.reason}"
        text += f": {NO_GRADIENT[most.reason]}" if most.reason in NO_GRADIENT else ""
    return text


def _mode(evaluation: Evaluation | None, mode: Mode) -> ModeScore:
    """One way of choosing actions; without an episode where it was not played."""
    found = evaluation.modes.get(mode) if evaluation else None
    return found or ModeScore(tasks=[], compositions=[])


def _by_task(*columns: Sequence[TaskScore]) -> dict[str, dict[str, float | None]]:
    names = ("before", "after", "greedy_before", "greedy_after")
    result: dict[str, dict[str, float | None]] = {}
    for name, scores in zip(names, columns, strict=True):
        for score in scores:
            result.setdefault(score.task_id, dict.fromkeys(names))[name] = score.success
    return result


def _print_summary(
    result: Mapping[str, Any], run: RunRow, report: Path, lost: Sequence[str]
) -> None:
    console = Console(markup=False, highlight=False)
    composed = result["compositions"]
    if result["per_task"] or composed["per_task"]:
        numbers = ("sampled", "greedy")
        table = page_table("held-out success, before -> after", "task", *numbers, right=numbers)
        for rows, name, whole in (
            (result["per_task"], "all tasks", (result["success_before"], result["success_after"])),
            (composed["per_task"], "all compositions", (composed["before"], composed["after"])),
        ):
            for task_id, row in rows.items():
                greedy = _arrow(row["greedy_before"], row["greedy_after"])
                table.add_row(task_id, _arrow(row["before"], row["after"]), greedy)
            if rows:
                table.add_row(name, _arrow(*whole), "", style="bold", end_section=True)
        console.print(table)
    played = f"{result['trajectories']} trajectories, policy version {result['policy_version']}"
    lines = [
        f"{played}, {minutes(run.active_s)} of training; everything is in {result['run_dir']}",
        *([f"note: {result['note']}"] if result["note"] else []),
        *(f"error: {each}: see `dart data stats {result['run_dir']}`" for each in lost),
        *(f"{name}: {result[name]}" for name in ("curve", "films") if name in result),
        *([result["why"]] if result["why"] else []),
        *([f"report: {report}"] if console.is_terminal else []),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _arrow(before: float | None, after: float | None) -> str:
    return f"{fraction(before)} -> {fraction(after)}"


# --- whether it learned ----------------------------------------------------------------------


class Learning(NamedTuple):
    """Two keys of the report."""

    learned: bool | None  # None where the evidence is too thin to say
    why: str  # of a run that shows no improvement: figures and cure; else empty


def judge_learning(
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
    was, now = (_mode(each, "sampled").overall for each in (before, after))
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
        strips.append(film_strip(films_dir(run_dir, BEFORE), was, BEFORE, _heading(was)))
        strips.append(film_strip(films_dir(run_dir, AFTER), now, AFTER, ""))
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, optimize=True)
    return path


def draw_trajectory(path: Path, reader: Reader, shown: Shown) -> Path:
    """All steps of one trajectory as a picture, a moving one for `.gif`. Raises UserError if its screens were removed."""
    subject, row = shown.subject, shown.subject.trajectory
    keys = [step.screenshot for step in shown.steps]
    if row is not None and row.final_screenshot is not None:
        keys.append(row.final_screenshot)
    images = reader.screenshots(keys)
    if not shown.steps or len(images) < len(set(keys)):
        removed = "its screenshots were removed to keep data.max_gb"
        why = removed if shown.steps else "it has no step yet"
        raise UserError(f"no film of {subject.id}: {why}; choose another trajectory")
    film = Film(
        task_id=subject.task_id,
        seed=subject.task_seed,
        instruction=shown.instruction,
        outcome=(row.outcome if row is not None else "pass") or "invalid",
        reason=(row.verdict_reason if row is not None else "") or "",
        frames=[
            FilmFrame(
                screenshot=step.screenshot, text=step.text, action=step.action, pointed=step.pointed
            )
            for step in shown.steps
        ],
        last=keys[-1],
    )
    with tempfile.TemporaryDirectory() as folder:
        for key, image in images.items():
            (Path(folder) / key).write_bytes(image)
        try:
            if path.suffix.lower() == ".gif":
                save_animation(path, Path(folder), film)
                return path
            most = len(film.frames)
            picture = film_strip(Path(folder), film, subject.id, _heading(film), most=most)
            picture.save(path, format="PNG", optimize=True)
        except OSError as error:
            raise UserError(f"--film {path}: cannot be written: {error.strerror}") from None
    return path


def _heading(film: Film) -> str:
    return f'{film.task_id}, seed {film.seed}: "{film.instruction}"'
