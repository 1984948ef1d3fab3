"""Held-out evaluation: the `dart eval` verb.

    run_eval      plays what is left of an evaluation, prints a table, keeps the result in RUN/eval
    EvalOptions   what the command line asks for
    plan_eval     what it would play, for `--dry-run`
    run_worker    plays along with an evaluation that another process leads

Each episode is kept as it ends (episodes.py), so that a second start goes on. They are played in this
process (player.py), or by several beside it (workers.py); nothing is stored for training. Seeds from
`eval.seed` on are never trained on, and are the same for every set of weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import EnvError, UserError
from dart_cli.config.schema import Config
from dart_cli.evaluation.episodes import Counts, EpisodeStore, open_episodes
from dart_cli.evaluation.eval_settings import dart_version, left_out_of, settings_of
from dart_cli.evaluation.films import Films, films_dir
from dart_cli.evaluation.in_process import chosen_weights, loaded_model
from dart_cli.evaluation.player import Plan, attempts_of, instances, plan_of, play_mode
from dart_cli.evaluation.report import evaluation_of
from dart_cli.evaluation.results import EpisodeRow, Evaluation, Mode, eval_dir
from dart_cli.evaluation.score_text import (
    deviation_lines,
    pass_at_table,
    score_table,
    summary,
)
from dart_cli.evaluation.workers import play_by_workers, refuse_workers
from dart_cli.runtime.kept_folder import write_whole
from dart_cli.runtime.logs import log_dir, logging_to
from dart_cli.runtime.progress import progress
from dart_cli.runtime.role import end_with_parent, limit_threads, take_gpus
from dart_cli.runtime.tables import minutes

if TYPE_CHECKING:
    from dart_cli.engines.base import Responder

logger = logging.getLogger(__name__)

INVALID = "invalid.json"
"""Beside the episodes: those that are invalid, with their reasons."""

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


@dataclass(frozen=True)
class EvalOptions:
    """What is played, and how it is told."""

    weights: Path | None = None
    as_it_comes: bool = False  # the model without the run's weights
    modes: Sequence[Mode] = ("sampled", "greedy")
    tasks: Sequence[
        str
    ] = ()  # these alone, compositions among them or not; empty for the configured
    name: str = ""  # of the result; empty for the weights' version
    fresh: bool = False  # set an older one of this name aside
    workers: int = 0  # processes that play; 0 for this one
    arguments: Sequence[
        str
    ] = ()  # of the command line, for the workers: CONFIG --set KEY=VALUE ...
    as_json: bool = False


@dataclass(frozen=True)
class Chosen:
    """The weights that are played."""

    directory: Path | None  # None for the model as it comes
    version: int  # -1 likewise


def run_eval(config: Config, options: EvalOptions | None = None) -> Evaluation:
    """Evaluate the chosen weights, else the run's newest, else the model's own.

    An evaluation of the same name and settings goes on where it was. Raises UserError, WeightsError,
    ModelError, TaskError, and EnvError where every episode of the first mode was invalid: no result is kept then.
    """
    options = options or EvalOptions()
    _check_name(options.name)
    refuse_workers(config, options.workers)
    limit_threads(config.rollout.threads)
    end_with_parent()
    make_private_dir(config.run.dir)
    make_private_dir(eval_dir(config.run.dir))
    with logging_to(config.run.dir, "eval"):
        plan = plan_of(config, options.tasks, options.modes)
        chosen = _choose(config, options)
        name = options.name or _name_of(options.modes, chosen)
        with_model = any(mode != "random" for mode in options.modes)
        settings = settings_of(config, chosen.directory, with_model=with_model)
        store, told = open_episodes(config.run.dir, name, settings, fresh=options.fresh)
        if told:
            sys.stderr.write(f"{told}\n")
        with store:
            store.plan(plan.episodes)
            store.save("weights", [str(chosen.directory or ""), chosen.version])
            _tell_kept(store)
            asyncio.run(_play(config, options, store, plan, chosen))
            evaluation = evaluation_of(
                config,
                store,
                plan,
                options.modes,
                name=name,
                weights=str(chosen.directory or ""),
                policy_version=chosen.version,
                dart=dart_version(),
                left_out=left_out_of(config.env.suite),
            )
            path = _keep(config.run.dir, evaluation, store)
    _print(evaluation, path, as_json=options.as_json)
    return evaluation


def run_worker(config: Config, name: str, worker: str) -> None:
    """Play along with the evaluation `name`, with the weights that it names, until nothing is left."""
    limit_threads(config.rollout.threads)
    end_with_parent()
    take_gpus(config, "rollout", worker)
    with logging_to(config.run.dir, worker), EpisodeStore(eval_dir(config.run.dir) / name) as store:
        weights, found = store.value("weights"), store.value("asked")
        if not isinstance(weights, list) or not isinstance(found, dict):
            raise UserError(f"{store.folder} has no evaluation to play along with")
        directory, version = weights
        modes: list[Mode] = found["modes"]
        chosen = Chosen(Path(directory) if directory else None, int(version))
        plan = plan_of(config, found["tasks"], modes)

        async def play() -> None:
            async with _responders(config, store, chosen) as responder_of:
                for mode in modes:
                    responder = await responder_of(mode)
                    await play_mode(config, store, plan, responder, mode, player=worker)

        asyncio.run(play())


# --- what is played --------------------------------------------------------------------------


def plan_eval(config: Config, options: EvalOptions) -> dict[str, str]:
    """What `run_eval` would play, as text by subject. Raises what it raises before it plays."""
    _check_name(options.name)
    refuse_workers(config, options.workers)
    plan = plan_of(config, options.tasks, options.modes)
    names = [task.id for task in (*plan.trained, *plan.composed)]
    directory = _choose(config, options).directory
    counts = [_count_text(config, plan, mode) for mode in options.modes]
    limit = f", at most {config.eval.max_steps} steps each" if config.eval.max_steps else ""
    found = {
        "tasks": f"{len(names)} of {config.env.suite}: {', '.join(names)}",
        "eval": f"{' and '.join(counts)} of each kind of task, seeds from {config.eval.seed}{limit}",
        "weights": str(directory or "the model's own"),
    }
    if options.workers:
        found["workers"] = f"{options.workers} processes, each with the model and its environments"
    return found


def _count_text(config: Config, plan: Plan, mode: Mode) -> str:
    count = instances(config, mode, max(len(plan.trained), len(plan.composed)))
    attempts = attempts_of(config, mode)
    times = f" x {attempts} attempts" if attempts > 1 else ""
    return f"{count} episodes{times} {mode}"


def _check_name(name: str) -> None:
    if name and not _NAME.fullmatch(name):
        raise UserError(
            f"--keep-as {name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )


def _choose(config: Config, options: EvalOptions) -> Chosen:
    if options.as_it_comes:
        return Chosen(None, -1)
    return Chosen(*chosen_weights(config, options.weights))


def _name_of(modes: Sequence[Mode], chosen: Chosen) -> str:
    """What an evaluation is kept as where the user names nothing."""
    if all(mode == "random" for mode in modes):
        return "random"
    return "base" if chosen.version < 0 else f"v{chosen.version}"


# --- playing ---------------------------------------------------------------------------------


async def _play(
    config: Config, options: EvalOptions, store: EpisodeStore, plan: Plan, chosen: Chosen
) -> None:
    """Play what is left, mode by mode; raises EnvError after a first mode without a valid episode."""
    store.save("asked", {"modes": list(options.modes), "tasks": list(options.tasks)})
    store.release_dead()
    if options.workers:
        async with _shown(store, None) as look:
            await play_by_workers(
                config,
                options.arguments,
                store,
                options.workers,
                look,
                lambda: _refuse_invalid(config, store, options.modes[0]),
            )
        return
    async with _responders(config, store, chosen) as responder_of:
        for mode in options.modes:
            responder = await responder_of(mode)
            async with _shown(store, mode) as look:
                await play_mode(config, store, plan, responder, mode, advance=look)
            if mode == options.modes[0]:  # an error in every episode would also break the others
                _refuse_invalid(config, store, mode)


@contextlib.asynccontextmanager
async def _responders(
    config: Config, store: EpisodeStore, chosen: Chosen
) -> AsyncIterator[Callable[[Mode], Awaitable[Responder | None]]]:
    """What answers in a mode: None for random clicks; the model is loaded when a mode first needs it."""
    async with contextlib.AsyncExitStack() as stack:
        loaded: list[Responder] = []

        async def responder_of(mode: Mode) -> Responder | None:
            counts = store.counts(mode)
            if mode == "random" or counts.over == counts.total:
                return None
            if not loaded:
                model = await stack.enter_async_context(
                    loaded_model(config, chosen.directory, chosen.version)
                )
                loaded.append(model.responder)
            return loaded[0]

        yield responder_of


@contextlib.asynccontextmanager
async def _shown(store: EpisodeStore, mode: Mode | None) -> AsyncIterator[Callable[[], None]]:
    """A bar of one mode, or of all; gives a function that looks how far it is."""
    counts = store.counts(mode)
    began, first, done = time.monotonic(), counts.over, 0
    with progress(mode or "episodes", counts.total, "episodes") as advance:

        def look() -> None:
            nonlocal done
            now = store.counts(mode)
            new, done = now.over - done, now.over
            played = now.over - first
            each_s = (time.monotonic() - began) / played if played >= _TIMED else 0.0
            left_s = each_s * (now.total - now.over)
            advance(new, progress_note(store.counts_by_part(mode), left_s))

        if first:
            look()
        yield look


def progress_note(counts: Mapping[tuple[Mode, bool], Counts], left_s: float) -> str:
    """What came of the episodes so far, tasks and compositions apart, and how long the others may take."""
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


def _tell_kept(store: EpisodeStore) -> None:
    counts = store.counts()
    if counts.over:
        rest = "plays the others" if counts.over < counts.total else "nothing is left to play"
        again = ", --fresh begins anew" if counts.over == counts.total else ""
        sys.stderr.write(
            f"{store.folder} has {counts.over} of {counts.total} episodes already; {rest}{again}\n"
        )


def _refuse_invalid(config: Config, store: EpisodeStore, mode: Mode) -> None:
    """Raise EnvError, with the commonest reason, where a mode is over and no episode of it was judged."""
    counts = store.counts(mode)
    if counts.invalid < counts.total:
        return
    rows = store.rows(mode)
    _keep_invalid(store, rows)
    reasons = Counter(_ENVIRONMENT.sub("", row.reason) for row in rows)
    [(reason, count)] = reasons.most_common(1)
    raise EnvError(
        f"all {len(rows)} episodes were invalid and no result is kept; {count} of them: {reason}; fix "
        f"that (`dart env check {config.env.suite}` tries the environment, {store.folder / INVALID} "
        f"has the reason of each, {log_dir(config.run.dir) / 'eval.log'} more)"
    )


# --- keeping ---------------------------------------------------------------------------------


def _keep_invalid(store: EpisodeStore, rows: Sequence[EpisodeRow]) -> None:
    """The invalid episodes with their reasons, for people; none, no file."""
    keys = {"mode", "task_id", "seed", "attempt", "tries", "reason"}
    found = [row.model_dump(include=keys) for row in rows if row.outcome == "invalid"]
    if found:
        write_whole(store.folder / INVALID, f"{json.dumps(found, indent=1)}\n".encode())
    else:
        (store.folder / INVALID).unlink(missing_ok=True)


def _keep(run_dir: Path, evaluation: Evaluation, store: EpisodeStore) -> Path:
    """Write the evaluation and its films; the JSON last: it exists only when everything does."""
    folder = films_dir(run_dir, evaluation.name)
    folder.mkdir(exist_ok=True)
    films = Films(films=store.films())
    write_whole(folder / "films.json", films.model_dump_json().encode())
    _keep_invalid(store, evaluation.episodes)
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
