"""Held-out evaluation: the `dart eval CONFIG` verb.

    run_eval    plays what is left of an evaluation, prints a table, keeps the result in RUN/eval
    plan_eval   what it would play, for `--dry-run`

Each episode is kept as it ends (episodes.py), so that a second start goes on. They are played in this
process, or with --workers by several beside it, each a `dart eval --part I/N` with a model and environments
of its own. Rollout workers of a run would not do: they take each newer version while they serve; here the
weights are those that the evaluation has chosen. Nothing is stored for training. Seeds from TRAIN_SEEDS on
are never trained on, and are the same for every set of weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import ConfigError, EnvError, UserError
from dart_cli.config.devices import divide_gpus, gpus_here, gpus_of, gpus_per_worker, gpus_problem
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.evaluation import EvalOptions
from dart_cli.evaluation.episodes import (
    Chosen,
    Counts,
    Kept,
    KeptEpisodes,
    Part,
    Planned,
    attempts_of,
    evaluation_of,
    plan_of,
    step_limit,
)
from dart_cli.evaluation.films import Film, FilmFrame, Films, films_dir, write_shot
from dart_cli.evaluation.results import EpisodeRow, Evaluation, Mode, eval_dir
from dart_cli.evaluation.settings import dart_version, left_out_of, settings_of
from dart_cli.evaluation.text import deviation_lines, pass_at_table, score_table, summary
from dart_cli.player.chosen_model import chosen_weights, loaded_model
from dart_cli.player.episodes import PlannedEpisode, PlayedEpisode, answered_by, each_of, play
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import log_dir, logging_to
from dart_cli.runtime.role import end_with_parent, limit_threads, take_gpus
from dart_cli.runtime.supervisor import RESTARTS, Supervisor
from dart_cli.runtime.tables import minutes, progress
from dart_cli.runtime.waits import WAITED, OpenWaits
from dart_cli.runtime.work_folder import write_whole
from envs.contract.base import reward_of

if TYPE_CHECKING:
    from dart_cli.engines.base import Model, Responder

INVALID = "invalid.json"
"""Beside the episodes: those that are invalid, with their reasons."""
MAX_FILM_BYTES = 64_000_000
"""Screenshots kept of one evaluation, at most."""
LOOK_S = 0.5
"""How often the bar is moved while other processes play."""

MODES: dict[str, tuple[Mode, ...]] = {
    "sampled": ("sampled",),
    "greedy": ("greedy",),
    "both": ("sampled", "greedy"),
    "random": ("random",),
    "all": ("sampled", "greedy", "random"),
}
"""`--mode` -> the ways of choosing actions that are played, in turn."""

_TIMED = 8  # episodes after which the rest is estimated
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENVIRONMENT = re.compile(r"^eval/\d+: ")  # the environment's name before its error


def run_eval(
    config: Config, options: EvalOptions | None = None, arguments: Sequence[str] = ()
) -> Evaluation | None:
    """Evaluate the chosen weights, else the run's newest, else the model's own; None for a part that is not the last.

    An evaluation of the same name and settings goes on where it was. `arguments` give the configuration, for
    the workers. Raises UserError, WeightsError, ModelError, TaskError, and EnvError where every episode of
    the first mode was invalid: no result is kept then.
    """
    options = options or EvalOptions()
    part = _checked(config, options)
    plan = plan_of(config, options.tasks or (), MODES[options.mode], options.episodes)
    limit_threads(config.rollout.threads)
    end_with_parent()
    if not options.workers:  # these share out what they inherit
        take_gpus(config, "rollout", f"eval-{part.number - 1}")
    make_private_dir(config.run.dir)
    role = "eval" if part.count == 1 else f"eval-{part.number}-of-{part.count}"
    with logging_to(config.run.dir, role):
        chosen = _choose(config, options)
        name = options.keep_as or _name_of(plan.modes, chosen)
        settings = settings_of(config, chosen.directory, with_model=plan.modes != ("random",))
        own = None if options.workers else part
        with KeptEpisodes(config.run.dir, name, settings, plan, own, fresh=options.fresh) as kept:
            if kept.told:
                sys.stderr.write(f"{kept.told}\n")
            _tell_kept(kept)
            waits = OpenWaits()
            playing = _play(config, options, kept, chosen, arguments, waits)
            if stopped := run_until_stopped(playing, waits, lambda: _say_stopped(kept)):
                raise SystemExit(stopped)
            counts = kept.counts()
            if counts.over < counts.total:
                left = counts.total - counts.over
                sys.stderr.write(
                    f"part {options.part} is over; {left} episodes of others are left\n"
                )
                return None
            evaluation = evaluation_of(
                config, kept, chosen, dart=dart_version(), left_out=left_out_of(config.env.suite)
            )
            path = _keep(config.run.dir, evaluation, kept)
    _print(evaluation, path, as_json=options.as_json)
    return evaluation


# --- what is played --------------------------------------------------------------------------


def plan_eval(config: Config, options: EvalOptions) -> dict[str, str]:
    """Return what `run_eval` would play, as text by subject. Raises what it raises before it plays."""
    part = _checked(config, options)
    plan = plan_of(config, options.tasks or (), MODES[options.mode], options.episodes)
    names = [task.id for task in (*plan.trained, *plan.composed)]
    counts = []
    for mode in plan.modes:
        attempts = attempts_of(config, mode)
        times = f" x {attempts} attempts" if attempts > 1 else ""
        counts.append(f"{plan.count(mode)} episodes{times} {mode}")
    limit = f", at most {steps} steps each" if (steps := step_limit(config)) else ""
    found = {
        "tasks": f"{len(names)} of {config.env.suite}: {', '.join(names)}",
        "eval": f"{' and '.join(counts)} of each kind of task, seeds from {TRAIN_SEEDS}{limit}",
        "weights": str(_choose(config, options).directory or "the model's own"),
    }
    if options.workers:
        found["workers"] = f"{options.workers} processes, each with the model and its environments"
    if part.count > 1:
        found["part"] = f"every {part.count}-th episode, from number {part.number} on"
    return found


def _checked(config: Config, options: EvalOptions) -> Part:
    """Return the part that is played. Raises UserError for options that cannot be."""
    if options.keep_as and not _NAME.fullmatch(options.keep_as):
        raise UserError(
            f"--keep-as {options.keep_as!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )
    number, _, count = (options.part or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 1024):
        raise UserError(f"--part {options.part}: want I/N, e.g. 1/4")
    if options.part and options.workers:
        raise UserError("--part is one process, and --workers starts several: choose one")
    if options.workers:
        _refuse_workers(config, options.workers)
    else:
        gpus_of(config, "rollout", f"eval-{int(number) - 1}")
    return Part(int(number), int(count))


def _refuse_workers(config: Config, workers: int) -> None:
    """Raise ConfigError where there are GPUs for some of the workers only."""
    _, gpus = divide_gpus(config, gpus_here())
    each = gpus_per_worker(config)
    if gpus and workers * each > len(gpus):
        have = len(gpus) // each
        listed = config.up.rollout_gpus
        whose = f"up.rollout_gpus = {listed} has" if listed else "beside the trainer's there are"
        raise ConfigError(
            f"--workers {workers}: {whose} GPUs for {have}; name more of them by up.rollout_gpus, or --workers {have}"
        )
    if workers > 1 and (problem := gpus_problem(gpus[: workers * each])):
        raise ConfigError(f"--workers {workers}: up.rollout_gpus = {gpus} {problem}")


def _choose(config: Config, options: EvalOptions) -> Chosen:
    if options.model:
        return Chosen(None, -1)
    return Chosen(*chosen_weights(config, options.weights))


def _name_of(modes: Sequence[Mode], chosen: Chosen) -> str:
    """Return what an evaluation is kept as where the user names nothing."""
    if all(mode == "random" for mode in modes):
        return "random"
    return "base" if chosen.version < 0 else f"v{chosen.version}"


# --- playing ---------------------------------------------------------------------------------


async def _play(
    config: Config,
    options: EvalOptions,
    kept: KeptEpisodes,
    chosen: Chosen,
    arguments: Sequence[str],
    waits: OpenWaits,
) -> None:
    """Play what is left, mode by mode; raises EnvError after a first mode without a valid episode."""
    if options.workers:
        async with _shown(kept, None) as look:
            await _by_workers(config, options, kept, chosen, arguments, look)
        return
    async with contextlib.AsyncExitStack() as stack:
        loaded: list[Model] = []
        for mode in kept.plan.modes:
            left = [each for each in kept.left if each.mode == mode]
            if left and mode != "random" and not loaded:  # the model, when a mode first needs it
                weights = chosen.directory, chosen.version
                model = loaded_model(config, *weights, waits=waits)
                loaded.append(await stack.enter_async_context(model))
            responder = loaded[0].responder if loaded and mode != "random" else None
            async with _shown(kept, mode) as look:
                await _play_mode(config, kept, left, responder, look, waits)
            _refuse_invalid(config, kept)  # an error in every episode would also break the others


async def _play_mode(
    config: Config,
    kept: KeptEpisodes,
    left: Sequence[Planned],
    responder: Responder | None,
    look: Callable[[], None],
    waits: OpenWaits,
) -> None:
    tasks, folder = kept.plan.by_id, films_dir(config.run.dir, kept.folder.name)
    folder.mkdir(exist_ok=True)
    of_name = {f"eval-{'-'.join(map(str, each.key))}": each for each in left}

    def planned_episodes() -> Iterator[PlannedEpisode]:
        for name, each in of_name.items():
            yield PlannedEpisode(
                tasks[each.task_id],
                each.seed,
                each.attempt,
                name,
                greedy=each.mode == "greedy",
                keep_steps=each.filmed and kept.film_bytes() < MAX_FILM_BYTES,
            )

    def keep(played: PlayedEpisode) -> None:
        film, size = _film(folder, played) if played.records else (None, 0)
        row = _row(of_name[played.planned.name], played)
        kept.keep(Kept(row=row, film=film, film_bytes=size, ended_at=time.time()))
        look()

    answered = answered_by(config, responder)
    await play(config, each_of(planned_episodes()), answered, keep, most=len(left), waits=waits)


def _row(planned: Planned, played: PlayedEpisode) -> EpisodeRow:
    end = played.end
    return EpisodeRow(
        mode=planned.mode,
        composed=planned.composed,
        task_id=planned.task_id,
        seed=planned.seed,
        attempt=planned.attempt,
        outcome=end.outcome,
        reason=end.reason,
        stop_reason=end.stop_reason,
        reward=reward_of(end.outcome, end.reward),
        steps=end.steps,
        wall_s=round(played.wall_s, 3),
        screen=played.seen.screen,
        versions=sorted(played.seen.versions),
    )


def _film(folder: Path, played: PlayedEpisode) -> tuple[Film, int]:
    """Return the film of an episode, with its screenshots in the folder, and their bytes."""
    shots = [record.screenshot for record in played.records]
    if played.end.screenshot is not None:
        shots.append(played.end.screenshot)
    names = [write_shot(folder, shot) for shot in shots]
    frames = [
        FilmFrame(screenshot=name, text=record.text, action=record.action, pointed=record.pointed)
        for name, record in zip(names, played.records, strict=False)
    ]
    film = Film(
        task_id=played.task.id,
        seed=played.planned.seed,
        instruction=played.instruction,
        outcome=played.end.outcome,
        reason=played.end.reason,
        frames=frames,
        last=names[-1],
    )
    return film, sum(map(len, shots))


async def _by_workers(
    config: Config,
    options: EvalOptions,
    kept: KeptEpisodes,
    chosen: Chosen,
    arguments: Sequence[str],
    look: Callable[[], None],
) -> None:
    """Play what is left by so many processes. Raises ChildError where one of them cannot be kept alive."""
    counts = kept.counts()
    if counts.over < counts.total:
        _tell_live(config)
        given = ["--mode", options.mode, "--keep-as", kept.folder.name]
        given += [word for each in options.tasks or () for word in ("--tasks", each)]
        given += ["--episodes", str(options.episodes)] if options.episodes else []
        if chosen.directory is not None:
            given += ["--weights", str(chosen.directory)]
        else:
            given += ["--model", config.model.path]
        names = [f"eval-{index}" for index in range(options.workers)]
        supervisor = Supervisor(
            {
                name: ["eval", *arguments, *given, "--part", f"{number}/{options.workers}"]
                for number, name in enumerate(names, start=1)
            },
            leaders=names,
            restarts=RESTARTS,
            follow_s=None,  # the episodes of one may take far longer than those of another
            log_file=log_dir(config.run.dir) / "eval-workers.log",
            notice=lambda line: None if "progress:" in line and WAITED not in line else _say(line),
        )
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(stop))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                look()
                _refuse_invalid(config, kept)
        finally:
            stop.set()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        look()
    _refuse_invalid(config, kept)


def _say_stopped(kept: KeptEpisodes) -> None:
    """Say what there is of an evaluation that a signal stops."""
    kept.refresh()
    counts = kept.counts()
    note = progress_note(kept.counts_by_part(), 0.0)
    _say(
        f"{counts.over} of {counts.total} episodes are kept in {kept.folder}{note and f': {note}'}; the same "
        "command goes on"
    )


def _tell_live(config: Config) -> None:
    """Say that a run goes on meanwhile, on the same GPUs."""
    live = [
        each.name
        for each in workers_of(config.run.dir)
        if each.name.startswith("rollout-") and each.liveness not in ("gone", "")
    ]
    if live:
        _say(
            f"the run is live ({', '.join(live)}): these weights are evaluated whatever it publishes; its rollout "
            "workers and these share the GPUs"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.asynccontextmanager
async def _shown(kept: KeptEpisodes, mode: Mode | None) -> AsyncIterator[Callable[[], None]]:
    """Yield a bar of one mode, or of all; gives a function that looks how far it is."""
    counts = kept.counts(mode)
    began, first, done = time.monotonic(), counts.over, 0
    with progress(mode or "episodes", counts.total, "episodes") as advance:

        def look() -> None:
            nonlocal done
            kept.refresh()
            now = kept.counts(mode)
            new, done = now.over - done, now.over
            played = now.over - first
            each_s = (time.monotonic() - began) / played if played >= _TIMED else 0.0
            left_s = each_s * (now.total - now.over)
            advance(new, progress_note(kept.counts_by_part(mode), left_s))

        if first:
            look()
        yield look


def progress_note(counts: Mapping[tuple[Mode, bool], Counts], left_s: float) -> str:
    """Return what came of the episodes so far, tasks and compositions apart, and how long the others may take."""
    several_modes = len({mode for mode, _ in counts}) > 1
    parts = []
    for (mode, composed), each in counts.items():
        judged = each.over - each.invalid
        told = [f"{each.passed / judged:.2f} passed"] if judged else []
        told += [f"{each.invalid} invalid"] if each.invalid else []
        if len(counts) > 1 and each.over:
            name = f"{mode} " * several_modes + ("compositions" if composed else "tasks")
            told.insert(0, f"{name} {each.over}/{each.total}")
        parts += [" ".join(told)] if told else []
    if left_s >= 1:
        parts.append(f"about {minutes(left_s)} left")
    return ", ".join(parts)


def _tell_kept(kept: KeptEpisodes) -> None:
    counts = kept.counts()
    if counts.over:
        rest = "plays the others" if counts.over < counts.total else "nothing is left to play"
        again = ", --fresh begins anew" if counts.over == counts.total else ""
        sys.stderr.write(
            f"{kept.folder} has {counts.over} of {counts.total} episodes already; {rest}{again}\n"
        )


def _refuse_invalid(config: Config, kept: KeptEpisodes) -> None:
    """Raise EnvError, with the commonest reason, where the first mode is over and no episode of it was judged."""
    mode = kept.plan.modes[0]
    counts = kept.counts(mode)
    if counts.invalid < counts.total:
        return
    rows = kept.rows(mode)
    _keep_invalid(kept, rows)
    reasons = Counter(_ENVIRONMENT.sub("", row.reason) for row in rows)
    [(reason, count)] = reasons.most_common(1)
    raise EnvError(
        f"all {len(rows)} episodes were invalid and no result is kept; {count} of them: {reason}; fix "
        f"that (`dart env check {config.env.suite}` tries the environment, {kept.folder / INVALID} "
        f"has the reason of each, {log_dir(config.run.dir) / 'eval.log'} more)"
    )


# --- keeping ---------------------------------------------------------------------------------


def _keep_invalid(kept: KeptEpisodes, rows: Sequence[EpisodeRow]) -> None:
    """Write the invalid episodes with their reasons, for people; where there are none, no file."""
    keys = {"mode", "task_id", "seed", "attempt", "tries", "reason"}
    found = [row.model_dump(include=keys) for row in rows if row.outcome == "invalid"]
    if found:
        write_whole(kept.folder / INVALID, f"{json.dumps(found, indent=1)}\n".encode())
    else:
        (kept.folder / INVALID).unlink(missing_ok=True)


def _keep(run_dir: Path, evaluation: Evaluation, kept: KeptEpisodes) -> Path:
    """Write the evaluation and its films; the JSON last: it exists only when everything does."""
    folder = films_dir(run_dir, evaluation.name)
    folder.mkdir(exist_ok=True)
    films = Films(films=kept.films())
    write_whole(folder / "films.json", films.model_dump_json().encode())
    _keep_invalid(kept, evaluation.episodes)
    path = eval_dir(run_dir) / f"{evaluation.name}.json"
    write_whole(path, evaluation.model_dump_json(indent=1).encode())
    return path


def _print(evaluation: Evaluation, path: Path, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(summary(evaluation))}\n")
        return
    console = Console(markup=False, highlight=False)
    for mode, score in evaluation.modes.items():
        console.print(score_table(evaluation, mode, score))
        if any(each.k > 1 for each in (*score.pass_at, *score.composed_pass_at)):
            console.print(pass_at_table(evaluation, mode, score))
    for line in deviation_lines(evaluation):
        console.print(line, soft_wrap=True)
    console.print(f"kept as {path}")
