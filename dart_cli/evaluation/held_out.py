"""Held-out evaluation in this process: the `dart eval` verb.

    run_eval    loads the model, plays, prints a table, keeps the result in RUN/eval
    plan_eval   what it would play, for `--dry-run`

Episodes are played as in_process.py does; nothing is stored for training. Seeds from `eval.seed` on
are never trained on, and are the same for every set of weights.
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
from collections.abc import Sequence
from math import fsum
from pathlib import Path

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import EnvError, TaskError, UserError
from bus.messages import TrajectoryEnd
from dart_cli.config.schema import Config
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.evaluation.filmstrip import frame
from dart_cli.evaluation.in_process import (
    PlayedEpisode,
    chosen_weights,
    loaded_model,
    planned,
    play_all,
)
from dart_cli.evaluation.results import (
    Evaluation,
    Film,
    Films,
    Mode,
    ModeScore,
    TaskScore,
    eval_dir,
    films_dir,
    score_table,
    summary,
)
from dart_cli.runtime.logs import log_dir, logging_to
from dart_cli.runtime.progress import progress
from dart_cli.runtime.role import end_with_parent, limit_threads
from envs.base import Task, content_hash, image_suffix, reward_of

logger = logging.getLogger(__name__)

MAX_FILM_BYTES = 64_000_000
"""Screenshots kept of one evaluation, at most."""

MODES: dict[str, tuple[Mode, ...]] = {
    "sampled": ("sampled",),
    "greedy": ("greedy",),
    "both": ("sampled", "greedy"),
    "random": ("random",),
    "all": ("sampled", "greedy", "random"),
}
"""`--mode` -> the ways of choosing actions that are played, in turn."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENVIRONMENT = re.compile(r"^eval/\d+: ")  # the environment's name before its error


def run_eval(
    config: Config,
    *,
    weights: Path | None = None,
    as_it_comes: bool = False,
    averaged: bool = False,
    modes: Sequence[Mode] = ("sampled", "greedy"),
    tasks: Sequence[str] = (),
    name: str = "",
    as_json: bool = False,
) -> Evaluation:
    """Evaluate `weights`, else the run's newest, else (or `as_it_comes`) the model's own.

    With `averaged` those of the run's newest checkpoint. `tasks` plays these alone, compositions among
    them or not. The result is kept as `name`, by default the weights' version. Raises UserError,
    WeightsError, ModelError, TaskError, and EnvError where every episode was invalid: nothing is kept
    then.
    """
    _check_name(name)
    limit_threads(config.rollout.threads)
    end_with_parent()
    make_private_dir(config.run.dir)
    make_private_dir(eval_dir(config.run.dir))
    with logging_to(config.run.dir, "eval"):
        evaluation, films = asyncio.run(
            _evaluate(
                config,
                weights,
                as_it_comes=as_it_comes,
                averaged=averaged,
                modes=modes,
                tasks=tasks,
                name=name,
            )
        )
    path = _keep(config.run.dir, evaluation, films)
    if as_json:
        sys.stdout.write(f"{json.dumps(summary(evaluation))}\n")
    else:
        console = Console(markup=False, highlight=False)
        for mode, score in evaluation.modes.items():
            console.print(score_table(evaluation, mode, score))
        console.print(f"kept as {path}")
    return evaluation


# --- what is played --------------------------------------------------------------------------


def plan_eval(
    config: Config,
    *,
    weights: Path | None,
    as_it_comes: bool,
    averaged: bool = False,
    modes: Sequence[Mode],
    tasks: Sequence[str],
    name: str,
) -> dict[str, str]:
    """What `run_eval` would play, as text by subject. Raises what it raises before it plays."""
    _check_name(name)
    chosen = [task.id for part in _chosen(config, tasks) for task in part]
    if averaged:
        played = f"averaged ones of {_newest_checkpoint(config)}"
    else:
        directory, _ = (None, -1) if as_it_comes else chosen_weights(config, weights)
        played = str(directory or "the model's own")
    counts = [f"{_episodes(config, mode)} episodes {mode}" for mode in modes]
    return {
        "tasks": f"{len(chosen)} of {config.env.suite}: {', '.join(chosen)}",
        "eval": f"{' and '.join(counts)} of each kind of task, seeds from {config.eval.seed}",
        "weights": played,
    }


def _check_name(name: str) -> None:
    if name and not _NAME.fullmatch(name):
        raise UserError(
            f"--keep-as {name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )


def _chosen(config: Config, tasks: Sequence[str]) -> tuple[list[Task], list[Task]]:
    """(tasks that were trained on, compositions of them)."""
    trained, composed = trained_tasks(config, tasks), composed_tasks(config, tasks)
    if not config.eval.episodes or not (trained or composed):
        raise TaskError("nothing to evaluate: set eval.episodes >= 1 and name a task")
    return trained, composed


def _episodes(config: Config, mode: Mode) -> int:
    return config.eval.random_episodes if mode == "random" else config.eval.episodes


# --- playing ---------------------------------------------------------------------------------


async def _evaluate(
    config: Config,
    weights: Path | None,
    *,
    as_it_comes: bool,
    averaged: bool,
    modes: Sequence[Mode],
    tasks: Sequence[str],
    name: str,
) -> tuple[Evaluation, list[PlayedEpisode]]:
    trained, composed = _chosen(config, tasks)
    count, seed = config.eval.episodes, config.eval.seed
    updates: int | None = None
    if averaged:
        directory, version, updates = await asyncio.to_thread(_averaged, config)
    else:
        directory, version = (None, -1) if as_it_comes else chosen_weights(config, weights)
    began = time.monotonic()
    scores: dict[Mode, ModeScore] = {}
    kept: list[PlayedEpisode] = []
    async with contextlib.AsyncExitStack() as stack:
        responder = None
        if any(mode != "random" for mode in modes):
            model = await stack.enter_async_context(loaded_model(config, directory, version))
            responder = model.responder
        for mode in modes:
            number = _episodes(config, mode)
            rounds = [planned(trained, number, seed), planned(composed, number, seed + count)]
            player = None if mode == "random" else responder
            with progress(mode, sum(map(len, rounds)), "episodes") as advance:
                parts = [
                    await play_all(config, player, episodes, mode, advance=advance)
                    for episodes in rounds
                ]
            if not scores:  # an error in every episode of one mode would also break the other
                _refuse_invalid(config, [each.end for part in parts for each in part])
            scores[mode] = ModeScore(
                tasks=_scored(trained, parts[0]), compositions=_scored(composed, parts[1])
            )
            # Only one mode's films are kept: greedy, the policy's first choices.
            if mode != "random" or len(modes) == 1:
                kept = [each for part in parts for each in part if each.records]
    evaluation = Evaluation(
        name=name or _name_of(modes, version, updates),
        model=config.model.path,
        weights=str(directory or ""),
        policy_version=version,
        averaged=updates,
        seed=seed,
        wall_s=time.monotonic() - began,
        modes=scores,
    )
    return evaluation, kept


def _averaged(config: Config) -> tuple[Path | None, int, int | None]:
    """(weight set, version, updates) of the averaged weights of the newest checkpoint."""
    from dart_cli.train.checkpoints.saved_weights import averaged_set  # late: loads torch

    path, progress = averaged_set(config)
    return path, progress.policy_version, progress.updates


def _newest_checkpoint(config: Config) -> Path:
    from dart_cli.train.checkpoints.saved_weights import newest_weights

    return newest_weights(config, averaged=True).path


def _name_of(modes: Sequence[Mode], version: int, averaged: int | None) -> str:
    """What an evaluation is kept as where the user names nothing."""
    if all(mode == "random" for mode in modes):
        return "random"
    if averaged is not None:
        return f"averaged-{averaged}"
    return "base" if version < 0 else f"v{version}"


def _refuse_invalid(config: Config, ends: Sequence[TrajectoryEnd]) -> None:
    """Raise EnvError, with the commonest reason, where no episode was judged."""
    if any(end.outcome != "invalid" for end in ends):
        return
    reasons = Counter(_ENVIRONMENT.sub("", end.reason) for end in ends)
    [(reason, count)] = reasons.most_common(1)
    raise EnvError(
        f"all {len(ends)} episodes were invalid and nothing is kept; {count} of them: {reason}; fix "
        f"that (`dart env check {config.env.suite}` tries the environment, "
        f"{log_dir(config.run.dir) / 'eval.log'} names each episode)"
    )


def _scored(tasks: Sequence[Task], played: Sequence[PlayedEpisode]) -> list[TaskScore]:
    scores = []
    for task in tasks:
        ends = [each.end for each in played if each.task.id == task.id]
        judged = [end for end in ends if end.outcome != "invalid"]
        scores.append(
            TaskScore(
                task_id=task.id,
                episodes=len(judged),
                passed=sum(end.outcome == "pass" for end in judged),
                invalid=len(ends) - len(judged),
                steps=sum(end.steps for end in judged),
                rewards=fsum(reward_of(end.outcome, end.reward) or 0.0 for end in judged),
            )
        )
    return scores


# --- keeping ---------------------------------------------------------------------------------


def _keep(run_dir: Path, evaluation: Evaluation, played: Sequence[PlayedEpisode]) -> Path:
    """Write the evaluation and its films; the JSON last: it exists only when everything does."""
    folder = films_dir(run_dir, evaluation.name)
    folder.mkdir(exist_ok=True)
    films: list[Film] = []
    budget = MAX_FILM_BYTES
    for each in played:
        shots = [record.screenshot for record in each.records]
        if each.end.screenshot is not None:
            shots.append(each.end.screenshot)
        budget -= sum(map(len, shots))
        if budget < 0:
            break
        names = [_write_shot(folder, shot) for shot in shots]
        frames = [
            frame(shot, record.text, record.action, record.pointed)
            for shot, record in zip(names, each.records, strict=False)
        ]
        films.append(
            Film(
                task_id=each.task.id,
                seed=each.lease.task_seed,
                instruction=each.instruction,
                outcome=each.end.outcome,
                reason=each.end.reason,
                frames=frames,
                last=names[-1],
            )
        )
    (folder / "films.json").write_text(Films(films=films).model_dump_json(), encoding="utf-8")
    path = eval_dir(run_dir) / f"{evaluation.name}.json"
    partial = path.with_suffix(".tmp")
    partial.write_text(evaluation.model_dump_json(indent=1), encoding="utf-8")
    partial.replace(path)
    return path


def _write_shot(folder: Path, shot: bytes) -> str:
    path = folder / f"{content_hash(shot)}.{image_suffix(shot)}"
    path.write_bytes(shot)
    return path.name
