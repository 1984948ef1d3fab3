"""Held-out evaluation in this process: the `dart eval` verb.

    run_eval       loads the model, plays, prints a table, keeps the result in RUN/eval
    planned        which episodes are played: (task, seed), the same for every set of weights
    play_all       plays them, many at once, so that the engine works on full batches
    take_weights   lets an engine serve a published version
    InProcessPolicy           one episode's policy and sink: answers from the engine, keeps a film

Episodes are those of `dart env` (play_episode); only the policy is asked without a bus and nothing
is filed for training. Seeds from `eval.seed` on are never trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bus.endpoints import make_private_dir
from bus.errors import EnvError, TaskError, UserError
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Lease,
    Sampling,
    StepRecord,
    TrajectoryEnd,
)
from dart_cli.config.schema import Config, weights_dir
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.env.calls import Hosted
from dart_cli.env.episode import conventions_of, play_episode
from dart_cli.env.isolated import hosted
from dart_cli.evaluation.filmstrip import frame
from dart_cli.evaluation.results import (
    Evaluation,
    Film,
    Films,
    Mode,
    ModeScore,
    TaskScore,
    eval_dir,
    films_dir,
)
from dart_cli.runtime.logs import log_dir, logging_to
from dart_cli.runtime.progress import progress
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.status.page import fraction, page_table
from envs.base import Task, content_hash

if TYPE_CHECKING:
    from dart_cli.engines.base import Engine, Responder

logger = logging.getLogger(__name__)

FILMS_PER_TASK = 3
MAX_FILM_BYTES = 64_000_000
"""Screenshots kept of one evaluation, at most."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENVIRONMENT = re.compile(r"^eval/\d+: ")  # its name, in front of why it broke
_STEP_SEEDS = 4096  # room between the sampling seeds of two episodes


@dataclass(frozen=True)
class Planned:
    """One episode to play."""

    task: Task
    seed: int


def run_eval(
    config: Config,
    *,
    weights: Path | None = None,
    as_it_comes: bool = False,
    modes: Sequence[Mode] = ("sampled", "greedy"),
    tasks: Sequence[str] = (),
    name: str = "",
    as_json: bool = False,
) -> Evaluation:
    """Evaluate `weights`, else the run's newest, else (or `as_it_comes`) the model's own.

    `tasks` plays these alone, compositions among them or not. The result is kept as `name`, by
    default the weights' version. Raises UserError, WeightsError, ModelError, TaskError, and EnvError
    where every episode was invalid: nothing is kept then.
    """
    _check_name(name)
    limit_threads(config.rollout.threads)
    end_with_parent()
    make_private_dir(config.run.dir)
    make_private_dir(eval_dir(config.run.dir))
    with logging_to(config.run.dir, "eval"):
        evaluation, films = asyncio.run(
            _evaluate(config, weights, as_it_comes=as_it_comes, modes=modes, tasks=tasks, name=name)
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


# --- what is played -------------------------------------------------------------------------


def plan_eval(
    config: Config,
    *,
    weights: Path | None,
    as_it_comes: bool,
    modes: Sequence[Mode],
    tasks: Sequence[str],
    name: str,
) -> dict[str, str]:
    """What `run_eval` would play, for people, by subject. Raises what it raises before it plays."""
    _check_name(name)
    chosen = [task.id for part in _chosen(config, tasks) for task in part]
    directory, _ = (None, -1) if as_it_comes else chosen_weights(config, weights)
    count = config.eval.episodes
    return {
        "tasks": f"{len(chosen)} of {config.env.suite}: {', '.join(chosen)}",
        "eval": f"{' and '.join(f'{count} episodes {mode}' for mode in modes)} of each kind of task, "
        f"seeds from {config.eval.seed}",
        "weights": str(directory or "the model's own"),
    }


def _check_name(name: str) -> None:
    if name and not _NAME.fullmatch(name):
        raise UserError(
            f"--keep-as {name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )


def _chosen(config: Config, tasks: Sequence[str]) -> tuple[list[Task], list[Task]]:
    """Tasks as they were trained on, and compositions of them."""
    trained, composed = trained_tasks(config, tasks), composed_tasks(config, tasks)
    if not config.eval.episodes or not (trained or composed):
        raise TaskError("nothing to evaluate: set eval.episodes >= 1 and name a task")
    return trained, composed


def planned(tasks: Sequence[Task], episodes: int, first_seed: int) -> list[Planned]:
    """`episodes` spread over `tasks`, each with a seed of its own; no task, no episode."""
    if not tasks:
        return []
    return [Planned(tasks[i % len(tasks)], first_seed + i) for i in range(episodes)]


# --- playing --------------------------------------------------------------------------------


class InProcessPolicy:
    """One episode's policy and sink in one: nothing leaves the process."""

    def __init__(self, answers: Responder, *, filmed: bool) -> None:
        self.instruction = ""
        self.records: list[StepRecord] = []
        self._answers = answers
        self._filmed = filmed

    async def act(self, request: ActRequest) -> Completion:
        """What the policy says to one screen."""
        self.instruction = request.instruction
        return await self._answers.answer(request)

    async def step(self, record: StepRecord) -> Ack:
        """Keep one step where the episode is filmed."""
        if self._filmed:
            self.records.append(record)
        return Ack()

    async def end(self, end: TrajectoryEnd) -> Ack:
        """The end is what `play_episode` returns; only a broken environment is worth a word."""
        if end.outcome == "invalid":
            logger.warning("%s is invalid: %s", end.trajectory_id, end.reason)
        return Ack()


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode that is over."""

    episode: Planned
    end: TrajectoryEnd
    instruction: str
    records: list[StepRecord]  # empty unless filmed


async def play_all(
    config: Config,
    answers: Responder,
    episodes: Sequence[Planned],
    mode: Mode,
    *,
    told: Callable[[], None] = lambda: None,
) -> list[PlayedEpisode]:
    """Play the episodes, `env.slots` or a full engine batch of them at once, in any order.

    The films are those of the first episodes of each task. `told` is called after each episode.
    """
    action_spec = conventions_of(config)
    waiting = deque(enumerate(episodes))
    filmed = FILMS_PER_TASK * len({episode.task.id for episode in episodes})
    played: list[PlayedEpisode] = []

    async def play_some(slot: int) -> None:
        async with environment(config, f"eval/{slot}") as env:
            while waiting:
                index, episode = waiting.popleft()
                seat = InProcessPolicy(answers, filmed=index < filmed)
                lease = _lease(config, episode, index, mode)
                end = await play_episode(env, lease, episode.task, seat, seat, action_spec)
                if end.stop_reason == "environment":
                    await env.renew()
                played.append(PlayedEpisode(episode, end, seat.instruction, seat.records))
                told()

    slots = min(len(episodes), max(config.env.slots, config.rollout.max_batch))
    async with asyncio.TaskGroup() as group:
        for slot in range(slots):
            group.create_task(play_some(slot))
    return played


@contextlib.asynccontextmanager
async def environment(config: Config, name: str) -> AsyncIterator[Hosted]:
    """An environment of the run's suite, closed at the end of the block."""
    env = hosted(config.env, name)
    try:
        yield env
    finally:
        await env.close()


def _lease(config: Config, episode: Planned, index: int, mode: Mode) -> Lease:
    """The lease that `dart data` would give, with sampling as the mode asks."""
    return Lease(
        trajectory_id=f"eval-{mode}-{index}",
        group_id="eval",
        suite=config.env.suite,
        task_id=episode.task.id,
        task_seed=episode.seed,
        max_steps=episode.task.max_steps,
        sampling=Sampling(
            temperature=config.rollout.temperature if mode == "sampled" else 0.0,
            max_tokens=config.rollout.max_tokens,
            seed=(config.run.seed + 1) * 2**40 + episode.seed * _STEP_SEEDS,
        ),
        expires_s=config.data.lease_s,
    )


async def _evaluate(
    config: Config,
    weights: Path | None,
    *,
    as_it_comes: bool,
    modes: Sequence[Mode],
    tasks: Sequence[str],
    name: str,
) -> tuple[Evaluation, list[PlayedEpisode]]:
    from dart_cli.rollout.worker import load_model

    trained, composed = _chosen(config, tasks)
    count, seed = config.eval.episodes, config.eval.seed
    rounds = [planned(trained, count, seed), planned(composed, count, seed + count)]
    directory, version = (None, -1) if as_it_comes else chosen_weights(config, weights)
    began = time.monotonic()
    model = await asyncio.to_thread(load_model, config)
    try:
        if directory is not None:
            await take_weights(model.engine, directory, version)
        scores: dict[Mode, ModeScore] = {}
        kept: list[PlayedEpisode] = []
        for mode in modes:
            with progress(mode, sum(map(len, rounds)), "episodes") as told:
                parts = [
                    await play_all(config, model.responder, episodes, mode, told=lambda: told(1))
                    for episodes in rounds
                ]
            if not scores:  # what broke all of one mode would break the other's
                _refuse_invalid(config, [each.end for part in parts for each in part])
            scores[mode] = ModeScore(
                tasks=_scored(trained, parts[0]), compositions=_scored(composed, parts[1])
            )
            # Greedy films are the policy's first choices; they come last and stay.
            kept = [each for part in parts for each in part if each.records]
    finally:
        await model.engine.close()
    evaluation = Evaluation(
        name=name or ("base" if version < 0 else f"v{version}"),
        model=config.model.path,
        weights=str(directory or ""),
        policy_version=version,
        seed=seed,
        wall_s=time.monotonic() - began,
        modes=scores,
    )
    return evaluation, kept


def _refuse_invalid(config: Config, ends: Sequence[TrajectoryEnd]) -> None:
    """Raise EnvError, with the commonest reason, where no episode was judged."""
    if any(end.outcome != "invalid" for end in ends):
        return
    reasons = Counter(_ENVIRONMENT.sub("", end.reason) for end in ends)
    [(reason, count)] = reasons.most_common(1)
    raise EnvError(
        f"all {len(ends)} episodes were invalid and nothing is kept; {count} of them: {reason}; mend "
        f"that (`dart env check {config.env.suite}` tries the environment, "
        f"{log_dir(config.run.dir) / 'eval.log'} names each episode)"
    )


def chosen_weights(config: Config, weights: Path | None) -> tuple[Path | None, int]:
    """(directory, version) of the weight set to play; (None, -1) where the run has none yet.

    Raises UserError for a directory that is not there, WeightsError for one without weights.
    """
    from dart_cli.weights.delta_chain import newest_version
    from dart_cli.weights.manifest import read_manifest

    if weights is not None:
        found = newest_version(weights)
        if found is not None:
            return found.path, found.policy_version
        if not weights.is_dir():
            raise UserError(f"--weights {weights}: no such directory; a run's are in RUN/weights")
        return weights, read_manifest(weights).policy_version
    found = newest_version(weights_dir(config))
    return (None, -1) if found is None else (found.path, found.policy_version)


async def take_weights(engine: Engine, directory: Path, version: int) -> None:
    """Let the engine serve a published version; one that stands there as deltas is rebuilt first.

    Raises WeightsError if it cannot be had or does not fit.
    """
    from dart_cli.weights.manifest import WEIGHTS
    from dart_cli.weights.mirror import DeltaReceiver

    if (directory / WEIGHTS).exists():
        await engine.update_weights(directory, version)
        return
    with tempfile.TemporaryDirectory(prefix="dart-weights-") as scratch:
        receiver = DeltaReceiver(Path(scratch) / "copy")
        try:
            received = await receiver.receive(directory, version, digest="")
            await engine.update_weights(received.source, version)
        finally:
            receiver.close()


def _scored(tasks: Sequence[Task], played: Sequence[PlayedEpisode]) -> list[TaskScore]:
    scores = []
    for task in tasks:
        ends = [each.end for each in played if each.episode.task.id == task.id]
        judged = [end for end in ends if end.outcome != "invalid"]
        scores.append(
            TaskScore(
                task_id=task.id,
                episodes=len(judged),
                passed=sum(end.outcome == "pass" for end in judged),
                invalid=len(ends) - len(judged),
                steps=sum(end.steps for end in judged),
            )
        )
    return scores


# --- telling and keeping --------------------------------------------------------------------


def _keep(run_dir: Path, evaluation: Evaluation, played: Sequence[PlayedEpisode]) -> Path:
    """Write the evaluation and its films; the JSON last, so that it stands only when all does."""
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
            frame(shot, record.text, record.action)
            for shot, record in zip(names, each.records, strict=False)
        ]
        films.append(
            Film(
                task_id=each.episode.task.id,
                seed=each.episode.seed,
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
    suffix = "png" if shot.startswith(b"\x89PNG") else "jpg"
    path = folder / f"{content_hash(shot)}.{suffix}"
    path.write_bytes(shot)
    return path.name


def score_table(evaluation: Evaluation, mode: Mode, score: ModeScore) -> Table:
    """Success by task with its interval; compositions below."""
    version = "as it comes" if evaluation.policy_version < 0 else f"v{evaluation.policy_version}"
    numbers = ("success", "95 % interval", "episodes", "invalid", "mean steps")
    table = page_table(f"{evaluation.model} {version}, {mode}", "task", *numbers, right=numbers)
    for rows, whole in ((score.tasks, score.overall), (score.compositions, score.composed)):
        if not rows:
            continue
        for row in (*rows, whole):
            low, high = row.interval
            table.add_row(
                row.task_id,
                fraction(row.success),
                f"{low:.2f} - {high:.2f}",
                str(row.episodes),
                str(row.invalid),
                "-" if row.mean_steps is None else f"{row.mean_steps:.1f}",
                style="bold" if row is whole else "",
                end_section=row is whole,
            )
    return table


def summary(evaluation: Evaluation) -> dict[str, object]:
    """The evaluation as one flat JSON object, for `--json`."""
    result: dict[str, object] = {
        "model": evaluation.model,
        "weights": evaluation.weights,
        "policy_version": evaluation.policy_version,
    }
    for mode, score in evaluation.modes.items():
        for name, rows, whole in (
            ("tasks", score.tasks, score.overall),
            ("compositions", score.compositions, score.composed),
        ):
            result[f"{mode}_{name}"] = {
                "success": whole.success,
                "interval": list(whole.interval),
                "episodes": whole.episodes,
                "invalid": whole.invalid,
                "per_task": {row.task_id: row.success for row in rows},
            }
    return result
