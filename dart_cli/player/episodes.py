"""Episodes played in this process, without a bus and without the ledger.

    play             plays a plan, `env.slots` episodes at a time, each with a policy and a sink
    PlannedEpisode   an episode to play
    plan_episodes    spreads episodes over tasks
    PlayedEpisode    an episode that is over
    RandomPolicy     a policy that clicks at random: the baseline of a success rate
    InProcessPolicy  a policy that asks a Responder of this process
    in_slots         runs a function in several environments at once and closes them at the end
    env_of_suite     returns the configuration of a suite's environments without a run

Episodes are played as in `dart env` (play_episode). Each call of an environment has the deadline that [env]
sets (dart_cli.env.async_env.AsyncEnv).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Lease,
    SampledTokens,
    Sampling,
    StepRecord,
    TrajectoryEnd,
)
from bus.packed import int32s
from dart_cli.config.schema import Config, EnvConfig
from dart_cli.env.async_env import AsyncEnv, make_async_env
from dart_cli.env.carriers import stuck
from dart_cli.env.episode import BROKE, Policy, play_episode
from dart_cli.env.step_prompts import ActionSpec, action_spec_of
from dart_cli.runtime.waits import OpenWaits
from envs.contract.actions import Click
from envs.contract.base import Task
from envs.contract.blobs import content_hash
from envs.contract.registry import longest_reset_s
from envs.contract.screenshots import size_of

if TYPE_CHECKING:
    from dart_cli.engines.base import Responder

logger = logging.getLogger(__name__)

_STEP_SEEDS = 4096  # distance between the sampling seeds of two episodes
_ATTEMPT_SEEDS = 2**50  # distance between those of two attempts


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode to play."""

    task: Task
    seed: int
    attempt: int = 0  # number of the attempt at the same task and seed
    name: str = "episode"  # the trajectory's id
    greedy: bool = False
    keep_steps: bool = True


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that is over."""

    planned: PlannedEpisode
    lease: Lease
    end: TrajectoryEnd
    sink: MemorySink
    wall_s: float

    @property
    def task(self) -> Task:
        """The task that was played."""
        return self.planned.task

    @property
    def records(self) -> list[StepRecord]:
        """The steps; empty unless they were kept."""
        return self.sink.records

    @property
    def instruction(self) -> str:
        """The policy's instruction; the text of the task if no step was kept."""
        return self.records[0].instruction if self.records else self.task.instruction


def plan_episodes(tasks: Sequence[Task], episodes: int, first_seed: int) -> list[PlannedEpisode]:
    """Return `episodes` episodes, spread over `tasks`, with seeds from `first_seed` on; [] without a task."""
    if not tasks:
        return []
    return [PlannedEpisode(tasks[i % len(tasks)], first_seed + i) for i in range(episodes)]


# --- policies and sink -----------------------------------------------------------------------


class InProcessPolicy:
    """A policy that asks a Responder of this process."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def act(self, request: ActRequest) -> Completion:
        """Return the policy's completion for one screen. Raises EngineError."""
        images = await self._responder.preload_images(request)  # held until the answer
        completion = await self._responder.answer(request)
        del images
        return completion


class RandomPolicy:
    """A policy that clicks at random pixels; its clicks are the same for the same episode."""

    def __init__(self, action_spec: ActionSpec, episode: PlannedEpisode) -> None:
        self._action_spec = action_spec
        self._rng = player_rng(episode.task, episode.seed, episode.attempt)

    async def act(self, request: ActRequest) -> Completion:
        """Return a click as the action parser writes it, without tokens, since no model sampled it."""
        width, height = request.width, request.height
        coordinates = self._action_spec.coordinate_map_of(width, height)
        return Completion(
            prompt_token_ids=int32s([]),
            sampled=SampledTokens(
                token_ids=[], behaviour_logprobs=[], entropies=[], version_spans=[]
            ),
            text=self._action_spec.action_parser.format(
                random_click(width, height, self._rng), coordinates
            ),
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


def random_click(width: int, height: int, rng: Random) -> Click:
    """Return a click at a random pixel of a screen of this size."""
    return Click(x=rng.randrange(width), y=rng.randrange(height))


def player_rng(task: Task, seed: int, attempt: int = 0) -> Random:
    """Return the generator of random numbers for a random player; it is the same for the same episode."""
    again = f"/{attempt}" if attempt else ""
    return Random(f"{task.id}/{seed}{again}")  # noqa: S311 - repeatable on purpose


@dataclass
class MemorySink:
    """A sink that keeps the steps of one episode in memory; `play_episode` returns the end."""

    keep_steps: bool = True
    records: list[StepRecord] = field(default_factory=list)
    screen: tuple[int, int] | None = None  # (width, height) of the first screen, pixels
    start: str = ""  # digest of the instruction and the first screen
    versions: set[int] = field(default_factory=set)  # versions of the weights that answered

    async def step(self, record: StepRecord) -> Ack:
        """Note one step."""
        self.screen = self.screen or size_of(record.screenshot)
        if not self.start:
            self.start = content_hash(record.instruction.encode() + record.screenshot)
        self.versions |= {span.version for span in record.sampled.version_spans}
        if self.keep_steps:
            self.records.append(record)
        return Ack()

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Log the end."""
        logger.debug("%s: %s, %s", end.trajectory_id, end.outcome, end.reason)
        return Ack()


def lease_of(config: Config, episode: PlannedEpisode) -> Lease:
    """Return a lease for an episode.

    Its sampling seed follows from run.seed, the episode's seed and its attempt.
    """
    seeds = episode.seed * _STEP_SEEDS + episode.attempt * _ATTEMPT_SEEDS
    return Lease(
        trajectory_id=episode.name,
        group_id="eval",
        suite=config.env.suite,
        task_id=episode.task.id,
        task_seed=episode.seed,
        max_steps=episode.task.max_steps,
        sampling=Sampling(
            temperature=0.0 if episode.greedy else config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            seed=(config.run.seed + 1) * 2**40 + seeds,
        ),
    )


# --- playing ---------------------------------------------------------------------------------

NextEpisode = Callable[[], Awaitable[PlannedEpisode | None]]
"""Returns the next episode of a plan, None at its end. It may wait until other episodes are over."""
PolicyOf = Callable[[AsyncEnv, PlannedEpisode], Policy]
"""Returns the policy that plays an episode in an environment."""


async def play(
    config: Config,
    next_episode: NextEpisode,
    policy_of: PolicyOf,
    keep: Callable[[PlayedEpisode], None],
    *,
    most: int,
    name: str = "eval",
    waits: OpenWaits | None = None,
) -> None:
    """Play a plan of at most `most` episodes; call `keep` with each episode as it ends.

    `waits` reports what the episodes wait for. An environment that broke is renewed for the next episode.
    Raises what `next_episode` and `keep` raise, and EnvError if a slot can make no more environments.
    """
    action_spec = action_spec_of(config)

    async def play_some(env: AsyncEnv) -> None:
        while (episode := await next_episode()) is not None:
            lease, sink = lease_of(config, episode), MemorySink(episode.keep_steps)
            policy, began = policy_of(env, episode), time.monotonic()
            env.episode = f"seed {episode.seed}"
            end = await play_episode(env, lease, episode.task, policy, sink, action_spec)
            if end.outcome == "invalid":
                logger.warning("%s is invalid: %s", episode.name, end.reason)
            if end.stop_reason in BROKE:
                await env.renew()
            keep(PlayedEpisode(episode, lease, end, sink, time.monotonic() - began))
            if env.is_stuck:  # all further episodes in it would be invalid
                raise stuck(env.carrier.name)

    await in_slots(config.env, name, min(most, config.env.slots), play_some, waits)


def each_of(episodes: Iterable[PlannedEpisode]) -> NextEpisode:
    """Return a function that returns these episodes in order."""
    remaining = iter(episodes)

    async def next_episode() -> PlannedEpisode | None:
        return next(remaining, None)

    return next_episode


def answered_by(config: Config, responder: Responder | None) -> PolicyOf:
    """Return a function that makes the policy of an episode: `responder`, or random clicks if it is None."""
    action_spec = action_spec_of(config)

    def policy_of(_env: AsyncEnv, episode: PlannedEpisode) -> Policy:
        return InProcessPolicy(responder) if responder else RandomPolicy(action_spec, episode)

    return policy_of


def env_of_suite(suite: str, options: Mapping[str, Any] | None = None) -> EnvConfig:
    """Return the configuration of a suite's environments, with defaults for all but its options.

    The deadline of a reset includes the time that the options allow for it (`longest_reset_s`). Raises
    TaskError for an unknown suite.
    """
    env = EnvConfig(suite=suite, options=dict(options or {}))
    deadline_s = env.reset_deadline_s + longest_reset_s(suite, env.options)
    return env.model_copy(update={"reset_deadline_s": deadline_s})


async def in_slots(
    config: EnvConfig,
    name: str,
    slots: int,
    work: Callable[[AsyncEnv], Awaitable[None]],
    waits: OpenWaits | None = None,
) -> None:
    """Run `work` in `slots` environments at once, and close each environment at the end.

    Errors and `waits` use `name`. Raises the first error that `work` raises, after the other slots are
    cancelled.
    """

    async def run(slot: int) -> None:
        env = make_async_env(config, f"{name}/{slot}", waits)
        try:
            await work(env)
        finally:
            await env.close()

    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(slots):
                group.create_task(run(slot))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
