"""The `dart eval CONFIG` command: evaluates weights on held-out tasks.

    run_eval        plays what is left of an evaluation, prints a table, and writes the result into RUN/eval
    plan_eval       what run_eval would play, for `--dry-run`
    progress_note   the progress of an evaluation in words

Each episode is written when it ends (episodes.py), so that a second start goes on. Episodes are played in
this process or, with --workers, by several processes beside it, each a `dart eval --part I/N` with its own
model and environments. The rollout workers of a run cannot be used, because they take each newer version
while they serve, and an evaluation needs fixed weights. Nothing is stored for training. Seeds from
TRAIN_SEEDS on are never trained on, and are the same for every set of weights.
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
    ChosenWeights,
    Counts,
    EpisodeFolder,
    EpisodeRecord,
    Part,
    Planned,
    attempts_of,
    evaluation_of,
    plan_of,
    step_limit,
)
from dart_cli.evaluation.films import Film, FilmFrame, Films, films_dir, write_shot
from dart_cli.evaluation.results import EpisodeRow, Evaluation, Mode, eval_dir
from dart_cli.evaluation.score_tables import (
    deviation_lines,
    headline,
    pass_at_table,
    score_table,
    summary,
)
from dart_cli.evaluation.settings import dart_version, left_out_of, settings_of
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
"""The file, beside the episodes, with the invalid episodes and their reasons."""
MAX_FILM_BYTES = 64_000_000
"""Bytes of the screenshots of one evaluation, at most."""
LOOK_S = 0.5
"""Seconds between two updates of the bar while other processes play."""

MODES: dict[str, tuple[Mode, ...]] = {
    "sampled": ("sampled",),
    "greedy": ("greedy",),
    "both": ("sampled", "greedy"),
    "random": ("random",),
    "all": ("sampled", "greedy", "random"),
}
"""`--mode` -> the ways of choosing actions that are played, in turn."""

_TIMED = 8  # episodes after which the time left is estimated
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENVIRONMENT = re.compile(r"^eval/\d+: ")  # the environment's name before its error


def run_eval(
    config: Config, options: EvalOptions | None = None, arguments: Sequence[str] = ()
) -> Evaluation | None:
    """Evaluate weights and return the result; None if episodes of other parts are left.

    The options may name the weights; the default is the run's newest, or else the model's own. An evaluation of
    the same name and settings goes on where it was. `arguments` are the command line of the configuration,
    for the workers. Raises UserError, WeightsError, ModelError, TaskError, and EnvError if every episode of
    the first mode was invalid; then there is no result.
    """
    options = options or EvalOptions()
    part = _check_options(config, options)
    plan = plan_of(config, options.tasks or (), MODES[options.mode], options.episodes)
    limit_threads(config.rollout.threads)
    end_with_parent()
    if not options.workers:  # workers share out the GPUs that they inherit
        take_gpus(config, "rollout", f"eval-{part.number - 1}")
    make_private_dir(config.run.dir)
    role = "eval" if part.count == 1 else f"eval-{part.number}-of-{part.count}"
    with logging_to(config.run.dir, role):
        weights = _choose_weights(config, options)
        name = options.keep_as or _default_name(plan.modes, weights)
        settings = settings_of(config, weights.directory, with_model=plan.modes != ("random",))
        own_part = None if options.workers else part
        with EpisodeFolder(
            config.run.dir, name, settings, plan, own_part, fresh=options.fresh
        ) as episodes:
            if episodes.set_aside:
                sys.stderr.write(f"{episodes.set_aside}\n")
            _report_kept(episodes)
            waits = OpenWaits()
            playing = _play(config, options, episodes, weights, arguments, waits)
            if exit_code := run_until_stopped(playing, waits, lambda: _report_stop(episodes)):
                raise SystemExit(exit_code)
            counts = episodes.counts()
            if counts.over < counts.total:
                left = counts.total - counts.over
                sys.stderr.write(
                    f"part {options.part} is over; {left} episodes of other parts are left\n"
                )
                return None
            evaluation = evaluation_of(
                config,
                episodes,
                weights,
                dart=dart_version(),
                left_out=left_out_of(config.env.suite),
            )
            path = _write_result(config.run.dir, evaluation, episodes)
    _print_result(evaluation, path, as_json=options.as_json)
    return evaluation


# --- the plan --------------------------------------------------------------------------------


def plan_eval(config: Config, options: EvalOptions) -> dict[str, str]:
    """Return what `run_eval` would play: subject -> text. Raises the same errors for invalid options."""
    part = _check_options(config, options)
    plan = plan_of(config, options.tasks or (), MODES[options.mode], options.episodes)
    names = [task.id for task in (*plan.trained, *plan.heldout)]
    counts = []
    for mode in plan.modes:
        attempts = attempts_of(config, mode)
        times = f" x {attempts} attempts" if attempts > 1 else ""
        counts.append(f"{plan.count(mode)} episodes{times} {mode}")
    limit = f", at most {steps} steps each" if (steps := step_limit(config)) else ""
    texts = {
        "tasks": f"{len(names)} of {config.env.suite}: {', '.join(names)}",
        "eval": f"{' and '.join(counts)} of each kind of task, seeds from {TRAIN_SEEDS}{limit}",
        "weights": str(_choose_weights(config, options).directory or "the model's own"),
    }
    if options.workers:
        texts["workers"] = f"{options.workers} processes, each with the model and its environments"
    if part.count > 1:
        texts["part"] = f"every {part.count}-th episode, from number {part.number} on"
    return texts


def _check_options(config: Config, options: EvalOptions) -> Part:
    """Return the part that is played. Raises UserError for invalid options."""
    if options.keep_as and not _NAME.fullmatch(options.keep_as):
        raise UserError(
            f"--keep-as {options.keep_as!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )
    number, _, count = (options.part or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 1024):
        raise UserError(f"--part {options.part}: want I/N, e.g. 1/4")
    if options.part and options.workers:
        raise UserError("--part is one process, and --workers starts several: use only one of them")
    if options.workers:
        _refuse_workers(config, options.workers)
    else:
        gpus_of(config, "rollout", f"eval-{int(number) - 1}")
    return Part(int(number), int(count))


def _refuse_workers(config: Config, workers: int) -> None:
    """Raise ConfigError if there are GPUs for only some of the workers."""
    _, gpus = divide_gpus(config, gpus_here())
    per_worker = gpus_per_worker(config)
    if gpus and workers * per_worker > len(gpus):
        possible = len(gpus) // per_worker
        listed = config.up.rollout_gpus
        source = f"up.rollout_gpus = {listed} has" if listed else "beside the trainer's there are"
        raise ConfigError(
            f"--workers {workers}: {source} GPUs for {possible}; name more of them by "
            f"up.rollout_gpus, or use --workers {possible}"
        )
    if workers > 1 and (problem := gpus_problem(gpus[: workers * per_worker])):
        raise ConfigError(f"--workers {workers}: up.rollout_gpus = {gpus} {problem}")


def _choose_weights(config: Config, options: EvalOptions) -> ChosenWeights:
    """Return the weights that the options name, else the run's newest, else the model's own."""
    if options.model:
        return ChosenWeights(directory=None, version=-1)
    directory, version = chosen_weights(config, options.weights)
    return ChosenWeights(directory=directory, version=version)


def _default_name(modes: Sequence[Mode], weights: ChosenWeights) -> str:
    """Return the name of an evaluation that the user does not name."""
    if all(mode == "random" for mode in modes):
        return "random"
    return "base" if weights.version < 0 else f"v{weights.version}"


# --- playing ---------------------------------------------------------------------------------


async def _play(
    config: Config,
    options: EvalOptions,
    episodes: EpisodeFolder,
    weights: ChosenWeights,
    arguments: Sequence[str],
    waits: OpenWaits,
) -> None:
    """Play what is left, mode by mode. Raises EnvError if no episode of the first mode is valid."""
    if options.workers:
        async with _progress_bar(episodes, None) as update:
            await _play_by_workers(config, options, episodes, weights, arguments, update)
        return
    async with contextlib.AsyncExitStack() as stack:
        loaded: list[Model] = []
        for mode in episodes.plan.modes:
            left = [episode for episode in episodes.left if episode.mode == mode]
            if left and mode != "random" and not loaded:  # the model, when a mode first needs it
                model = loaded_model(config, weights.directory, weights.version, waits=waits)
                loaded.append(await stack.enter_async_context(model))
            responder = loaded[0].responder if loaded and mode != "random" else None
            async with _progress_bar(episodes, mode) as update:
                await _play_mode(config, episodes, left, responder, update, waits)
            # An error in every episode would also break other modes.
            _refuse_invalid(config, episodes)


async def _play_mode(
    config: Config,
    episodes: EpisodeFolder,
    left: Sequence[Planned],
    responder: Responder | None,
    update: Callable[[], None],
    waits: OpenWaits,
) -> None:
    """Play the episodes `left` of one mode, and store each when it ends.

    Without a responder, random clicks play them.
    """
    tasks, folder = episodes.plan.by_id, films_dir(config.run.dir, episodes.folder.name)
    folder.mkdir(exist_ok=True)
    by_name = {f"eval-{'-'.join(map(str, episode.key))}": episode for episode in left}

    def planned_episodes() -> Iterator[PlannedEpisode]:
        for name, episode in by_name.items():
            yield PlannedEpisode(
                tasks[episode.task_id],
                episode.seed,
                episode.attempt,
                name,
                greedy=episode.mode == "greedy",
                keep_steps=episode.filmed and episodes.film_bytes() < MAX_FILM_BYTES,
            )

    def keep(episode: PlayedEpisode) -> None:
        film, size = _film(folder, episode) if episode.records else (None, 0)
        row = _row(by_name[episode.planned.name], episode)
        episodes.add(EpisodeRecord(row=row, film=film, film_bytes=size, ended_at=time.time()))
        update()

    policy_of = answered_by(config, responder)
    await play(config, each_of(planned_episodes()), policy_of, keep, most=len(left), waits=waits)


def _row(planned: Planned, episode: PlayedEpisode) -> EpisodeRow:
    """Return a played episode as it is stored."""
    end = episode.end
    return EpisodeRow(
        mode=planned.mode,
        heldout=planned.heldout,
        task_id=planned.task_id,
        seed=planned.seed,
        attempt=planned.attempt,
        outcome=end.outcome,
        reason=end.reason,
        stop_reason=end.stop_reason,
        reward=reward_of(end.outcome, end.reward),
        steps=end.steps,
        wall_s=round(episode.wall_s, 3),
        screen=episode.sink.screen,
        start=episode.sink.start,
        versions=sorted(episode.sink.versions),
    )


def _film(folder: Path, episode: PlayedEpisode) -> tuple[Film, int]:
    """Write the screenshots of an episode into the folder; return its film, and their bytes."""
    shots = [record.screenshot for record in episode.records]
    if episode.end.screenshot is not None:
        shots.append(episode.end.screenshot)
    names = [write_shot(folder, shot) for shot in shots]
    frames = [
        FilmFrame(
            screenshot=name,
            text=record.text,
            action=record.action,
            pointed=record.pointed,
            more_actions=record.more_actions,
        )
        for name, record in zip(names, episode.records, strict=False)
    ]
    film = Film(
        task_id=episode.task.id,
        seed=episode.planned.seed,
        instruction=episode.instruction,
        outcome=episode.end.outcome,
        reason=episode.end.reason,
        frames=frames,
        last=names[-1],
    )
    return film, sum(map(len, shots))


async def _play_by_workers(
    config: Config,
    options: EvalOptions,
    episodes: EpisodeFolder,
    weights: ChosenWeights,
    arguments: Sequence[str],
    update: Callable[[], None],
) -> None:
    """Play what is left by `options.workers` processes. Raises ChildError if one cannot be kept alive."""
    counts = episodes.counts()
    if counts.over < counts.total:
        _report_live_run(config)
        flags = ["--mode", options.mode, "--keep-as", episodes.folder.name]
        flags += [word for pattern in options.tasks or () for word in ("--tasks", pattern)]
        flags += ["--episodes", str(options.episodes)] if options.episodes else []
        if weights.directory is not None:
            flags += ["--weights", str(weights.directory)]
        else:
            flags += ["--model", config.model.path]
        names = [f"eval-{index}" for index in range(options.workers)]
        supervisor = Supervisor(
            {
                name: ["eval", *arguments, *flags, "--part", f"{number}/{options.workers}"]
                for number, name in enumerate(names, start=1)
            },
            leaders=names,
            restarts=RESTARTS,
            follow_s=None,  # one worker may need far longer for its episodes than another
            log_file=log_dir(config.run.dir) / "eval-workers.log",
            notice=lambda line: None if "progress:" in line and WAITED not in line else _say(line),
        )
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(stop))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                update()
                _refuse_invalid(config, episodes)
        finally:
            stop.set()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        update()
    _refuse_invalid(config, episodes)


def _report_stop(episodes: EpisodeFolder) -> None:
    """Print how much is kept of an evaluation that a signal stops."""
    episodes.refresh()
    counts = episodes.counts()
    note = progress_note(episodes.counts_by_part(), 0.0)
    _say(
        f"{counts.over} of {counts.total} episodes are kept in {episodes.folder}"
        f"{note and f': {note}'}; the same command goes on"
    )


def _report_live_run(config: Config) -> None:
    """Print a line if the run is live, because it uses the same GPUs."""
    live = [
        worker.name
        for worker in workers_of(config.run.dir)
        if worker.name.startswith("rollout-") and worker.liveness not in ("gone", "")
    ]
    if live:
        _say(
            f"the run is live ({', '.join(live)}): these weights are evaluated, whatever the run "
            "publishes; its rollout workers and the workers of the evaluation share the GPUs"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.asynccontextmanager
async def _progress_bar(
    episodes: EpisodeFolder, mode: Mode | None
) -> AsyncIterator[Callable[[], None]]:
    """Show a bar of one mode, or of all modes. Yields a function that updates it."""
    counts = episodes.counts(mode)
    start, first, reported = time.monotonic(), counts.over, 0
    with progress(mode or "episodes", counts.total, "episodes") as advance:

        def update() -> None:
            nonlocal reported
            episodes.refresh()
            now = episodes.counts(mode)
            new, reported = now.over - reported, now.over
            number = now.over - first
            episode_s = (time.monotonic() - start) / number if number >= _TIMED else 0.0
            left_s = episode_s * (now.total - now.over)
            advance(new, progress_note(episodes.counts_by_part(mode), left_s))

        if first:
            update()
        yield update


def progress_note(counts: Mapping[tuple[Mode, bool], Counts], left_s: float) -> str:
    """Return the results so far, tasks that are never trained on apart, and about how long the other episodes take."""
    several_modes = len({mode for mode, _ in counts}) > 1
    parts = []
    for (mode, heldout), count in counts.items():
        valid = count.over - count.invalid
        words = [f"{count.passed / valid:.2f} passed"] if valid else []
        words += [f"{count.invalid} invalid"] if count.invalid else []
        if len(counts) > 1 and count.over:
            name = f"{mode} " * several_modes + ("held-out tasks" if heldout else "tasks")
            words.insert(0, f"{name} {count.over}/{count.total}")
        parts += [" ".join(words)] if words else []
    if left_s >= 1:
        parts.append(f"about {minutes(left_s)} left")
    return ", ".join(parts)


def _report_kept(episodes: EpisodeFolder) -> None:
    """Print how many episodes are finished already, if there are any."""
    counts = episodes.counts()
    if counts.over:
        rest = "plays the others" if counts.over < counts.total else "nothing is left to play"
        again = ", --fresh begins anew" if counts.over == counts.total else ""
        sys.stderr.write(
            f"{episodes.folder} has {counts.over} of {counts.total} episodes already; {rest}{again}\n"
        )


def _refuse_invalid(config: Config, episodes: EpisodeFolder) -> None:
    """Raise EnvError with the commonest reason if the first mode is over and all its episodes are invalid."""
    mode = episodes.plan.modes[0]
    counts = episodes.counts(mode)
    if counts.invalid < counts.total:
        return
    rows = episodes.rows(mode)
    _write_invalid(episodes, rows)
    reasons = Counter(_ENVIRONMENT.sub("", row.reason) for row in rows)
    [(reason, count)] = reasons.most_common(1)
    raise EnvError(
        f"all {len(rows)} episodes were invalid and no result is kept; {count} of them: {reason}; fix "
        f"that (`dart env check {config.env.suite}` tries the environment, {episodes.folder / INVALID} "
        f"has the reason of each, {log_dir(config.run.dir) / 'eval.log'} more)"
    )


# --- results ---------------------------------------------------------------------------------


def _write_invalid(episodes: EpisodeFolder, rows: Sequence[EpisodeRow]) -> None:
    """Write the invalid episodes with their reasons into a file; without any, remove the file."""
    keys = {"mode", "task_id", "seed", "attempt", "tries", "reason"}
    invalid = [row.model_dump(include=keys) for row in rows if row.outcome == "invalid"]
    if invalid:
        write_whole(episodes.folder / INVALID, f"{json.dumps(invalid, indent=1)}\n".encode())
    else:
        (episodes.folder / INVALID).unlink(missing_ok=True)


def _write_result(run_dir: Path, evaluation: Evaluation, episodes: EpisodeFolder) -> Path:
    """Write the evaluation and its films, and return the path of the JSON file.

    That file is written last, so that it exists only if everything else does.
    """
    folder = films_dir(run_dir, evaluation.name)
    folder.mkdir(exist_ok=True)
    films = Films(films=episodes.films())
    write_whole(folder / "films.json", films.model_dump_json().encode())
    _write_invalid(episodes, evaluation.episodes)
    path = eval_dir(run_dir) / f"{evaluation.name}.json"
    write_whole(path, evaluation.model_dump_json(indent=1).encode())
    return path


def _print_result(evaluation: Evaluation, path: Path, *, as_json: bool) -> None:
    """Print the scores as tables with notes, or as one line of JSON."""
    if as_json:
        sys.stdout.write(f"{json.dumps(summary(evaluation))}\n")
        return
    console = Console(markup=False, highlight=False)
    console.print(headline(evaluation))
    for mode, score in evaluation.modes.items():
        console.print(score_table(evaluation, mode, score))
        if any(row.k > 1 for row in (*score.pass_at, *score.heldout_pass_at)):
            console.print(pass_at_table(evaluation, mode, score))
    for line in deviation_lines(evaluation):
        console.print(line, soft_wrap=True)
    console.print(f"kept as {path}")
