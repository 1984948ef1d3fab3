"""Episodes of a plan, played in this process beside any number of others.

play_mode   claims and plays what is left of one mode, until nothing is
Plan        the tasks of an evaluation and their episodes in order
plan_of     what a configuration asks for
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bus.errors import TaskError
from bus.messages import ActRequest, Completion
from dart_cli.config.schema import Config
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import Policy, action_spec_of
from dart_cli.evaluation.episodes import EpisodeStore, Kept, Planned
from dart_cli.evaluation.films import Film, FilmFrame, films_dir, write_shot
from dart_cli.evaluation.in_process import (
    FILMS_PER_TASK,
    PlannedEpisode,
    PlayedEpisode,
    in_slots,
    planned,
    play_planned,
    policy_of,
    slots_at_once,
)
from dart_cli.evaluation.results import EpisodeRow, Mode
from envs.base import Task, reward_of

if TYPE_CHECKING:
    from dart_cli.engines.base import Responder

logger = logging.getLogger(__name__)

MAX_FILM_BYTES = 64_000_000
"""Screenshots kept of one evaluation, at most."""
LOOK_S = 0.5
"""How often a process without work looks whether another one has ended, or died."""
_TOLD_LOOKS = 120  # looks after which it says whom it waits for; players are named by their pids


@dataclass(frozen=True)
class Plan:
    """What an evaluation plays."""

    trained: list[Task]  # on held-out seeds
    composed: list[Task]  # never trained on
    episodes: list[Planned]

    @property
    def by_id(self) -> dict[str, Task]:
        """The tasks by id, with the steps that the evaluation gives them."""
        return {task.id: task for task in (*self.trained, *self.composed)}


def plan_of(config: Config, tasks: Sequence[str], modes: Sequence[Mode]) -> Plan:
    """The episodes of each mode in turn, attempt by attempt. Raises TaskError where there is none."""
    parts = [
        [_limited(config, task) for task in found]
        for found in (trained_tasks(config, tasks), composed_tasks(config, tasks))
    ]
    asked = config.eval.per_task or config.eval.episodes
    if not asked or not any(parts):
        raise TaskError("nothing to evaluate: set eval.episodes >= 1 and name a task")
    filmed = next((mode for mode in reversed(modes) if mode != "random"), modes[-1])
    episodes = [
        each for mode in modes for each in _of_mode(config, parts, mode, filmed=mode == filmed)
    ]
    return Plan(trained=parts[0], composed=parts[1], episodes=episodes)


def instances(config: Config, mode: Mode, tasks: int) -> int:
    """Instances of one mode over so many tasks."""
    if config.eval.per_task:
        return config.eval.per_task * tasks
    return config.eval.random_episodes if mode == "random" else config.eval.episodes


def attempts_of(config: Config, mode: Mode) -> int:
    """Episodes of each instance; a greedy policy would repeat itself."""
    return 1 if mode == "greedy" else config.eval.attempts


async def play_mode(
    config: Config,
    store: EpisodeStore,
    plan: Plan,
    responder: Responder | None,
    mode: Mode,
    *,
    player: str = "",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Play what is left of a mode, and wait for what others play of it.

    `advance` is called after each episode here, and while this process waits. `player` is in the names
    of the episodes in the log.
    """
    action_spec, tasks = action_spec_of(config), plan.by_id
    folder = films_dir(config.run.dir, store.folder.name)
    folder.mkdir(exist_ok=True)

    async def play_some(env: AsyncEnv) -> None:
        while (claimed := store.claim(mode)) is not None:
            episode = PlannedEpisode(tasks[claimed.task_id], claimed.seed, claimed.attempt)
            watched = _Watched(policy_of(action_spec, responder, episode))
            began = time.monotonic()
            played = await play_planned(
                env,
                config,
                episode,
                watched,
                action_spec,
                name=f"{player or 'eval'}-{mode}-{claimed.task_id}-{claimed.seed}-{claimed.attempt}",
                greedy=mode == "greedy",
                keep_steps=claimed.filmed and store.film_bytes() < MAX_FILM_BYTES,
            )
            row = _row(claimed, played, watched, time.monotonic() - began)
            film, size = _film(folder, played) if played.records else (None, 0)
            store.keep(Kept(row, film, size))
            advance()

    waits = 0
    while (counts := store.counts(mode)).over < counts.total:
        left = counts.total - counts.over - counts.playing
        if left:
            await in_slots(config.env, "eval", min(left, slots_at_once(config)), play_some)
        else:  # the others' episodes end by their own deadlines, or their process does
            await asyncio.sleep(LOOK_S)
            waits += 1
            if waits % _TOLD_LOOKS == 0:
                others = ", ".join(store.others())
                logger.warning("waits for %d episodes that others play: %s", counts.playing, others)
        store.release_dead()
        advance()


class _Watched:
    """A policy, of which is noted what it saw first and which weights answered."""

    def __init__(self, policy: Policy) -> None:
        self.versions: set[int] = set()
        self.screen: tuple[int, int] | None = None
        self._policy = policy

    async def act(self, request: ActRequest) -> Completion:
        """The policy's completion. Raises what it raises."""
        self.screen = self.screen or (request.width, request.height)
        completion = await self._policy.act(request)
        self.versions |= {span.version for span in completion.sampled.version_spans}
        return completion


def _limited(config: Config, task: Task) -> Task:
    """The task with the evaluation's step limit, if that sets one."""
    return replace(task, max_steps=config.eval.max_steps) if config.eval.max_steps else task


def _of_mode(
    config: Config, parts: Sequence[Sequence[Task]], mode: Mode, *, filmed: bool
) -> Iterator[Planned]:
    seed = config.eval.seed
    for attempt in range(attempts_of(config, mode)):
        first = seed
        for composed, tasks in enumerate(parts):
            count = instances(config, mode, len(tasks))
            for index, each in enumerate(planned(tasks, count, first)):
                yield Planned(
                    mode,
                    each.task.id,
                    each.seed,
                    attempt,
                    composed=bool(composed),
                    filmed=filmed and not attempt and index < FILMS_PER_TASK * len(tasks),
                )
            first = seed + (count if config.eval.per_task else config.eval.episodes)


def _row(claimed: Planned, played: PlayedEpisode, watched: _Watched, wall_s: float) -> EpisodeRow:
    end = played.end
    return EpisodeRow(
        mode=claimed.mode,
        composed=claimed.composed,
        task_id=claimed.task_id,
        seed=claimed.seed,
        attempt=claimed.attempt,
        outcome=end.outcome,
        reason=end.reason,
        stop_reason=end.stop_reason,
        reward=reward_of(end.outcome, end.reward),
        steps=end.steps,
        wall_s=round(wall_s, 3),
        screen=watched.screen,
        versions=sorted(watched.versions),
    )


def _film(folder: Path, played: PlayedEpisode) -> tuple[Film, int]:
    """The film of an episode, with its screenshots in the folder, and their bytes."""
    shots = [record.screenshot for record in played.records]
    if played.end.screenshot is not None:
        shots.append(played.end.screenshot)
    names = [write_shot(folder, shot) for shot in shots]
    frames = [
        FilmFrame(screenshot=shot, text=record.text, action=record.action, pointed=record.pointed)
        for shot, record in zip(names, played.records, strict=False)
    ]
    film = Film(
        task_id=played.task.id,
        seed=played.lease.task_seed,
        instruction=played.instruction,
        outcome=played.end.outcome,
        reason=played.end.reason,
        frames=frames,
        last=names[-1],
    )
    return film, sum(map(len, shots))
