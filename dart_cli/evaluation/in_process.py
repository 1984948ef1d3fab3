"""Episodes played in this process, without a bus and without the ledger.

    play_all          a list of episodes, many at once: `dart doctor --play`, benchmarks
    play_planned      one of them, by name and attempt
    play_one          one episode with any policy: what `play_all` and demonstrations are made of
    in_slots          environments of a suite, each closed at the end; also for the suite check
    InProcessPolicy   an episode's policy: asks a Responder directly
    MemorySink        an episode's sink: keeps its steps in memory
    lease_of          the lease that `dart data` would give
    loaded_model      the configured engine with the weights to play; chosen_weights
    RandomPolicy      an episode's policy that clicks anywhere: the baseline of a success rate
    random_click      what a random player does in `dart env play` and `dart env check`

Episodes are those of `dart env` (play_episode). Each call of an environment has its deadline of
[env], see dart_cli.env.async_env.AsyncEnv.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bus.errors import UserError
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
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config, EnvConfig
from dart_cli.env.async_env import AsyncEnv, make_async_env
from dart_cli.env.episode import BROKE, ActionSpec, Policy, action_spec_of, play_episode
from envs.actions import Click
from envs.base import Task

if TYPE_CHECKING:
    from dart_cli.engines.base import Model, Responder
    from dart_cli.evaluation.results import Mode

logger = logging.getLogger(__name__)

FILMS_PER_TASK = 3
"""Episodes of each task whose steps `play_all` keeps: the first ones."""

_STEP_SEEDS = 4096  # room between the sampling seeds of two episodes
_ATTEMPT_SEEDS = 2**50  # and of two attempts


@dataclass(frozen=True)
class PlannedEpisode:
    """One episode to play."""

    task: Task
    seed: int
    attempt: int = 0  # of the same task and seed


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode that is over."""

    task: Task
    lease: Lease
    end: TrajectoryEnd
    records: list[StepRecord]  # its steps; empty unless they were kept

    @property
    def instruction(self) -> str:
        """What the policy was asked to do; the task's own text where no step was kept."""
        return self.records[0].instruction if self.records else self.task.instruction


def planned(tasks: Sequence[Task], episodes: int, first_seed: int) -> list[PlannedEpisode]:
    """`episodes` spread over `tasks`, each with a seed of its own; none without a task."""
    if not tasks:
        return []
    return [PlannedEpisode(tasks[i % len(tasks)], first_seed + i) for i in range(episodes)]


# --- one episode -----------------------------------------------------------------------------


class InProcessPolicy:
    """Answers screens through a Responder of this process."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def act(self, request: ActRequest) -> Completion:
        """What the policy says to one screen. Raises EngineError."""
        return await self._responder.answer(request)


class RandomPolicy:
    """Clicks anywhere, whatever is asked; the same clicks for the same episode."""

    def __init__(self, action_spec: ActionSpec, task: Task, seed: int, attempt: int = 0) -> None:
        self._action_spec = action_spec
        self._rng = player_rng(task, seed, attempt)

    async def act(self, request: ActRequest) -> Completion:
        """A click in the policy's own words, without tokens: no model has sampled it."""
        width, height = request.width, request.height
        coordinates = self._action_spec.coordinate_map_of(width, height)
        return Completion(
            prompt_token_ids=int32s([]),
            sampled=SampledTokens(
                token_ids=[], behaviour_logprobs=[], entropies=[], version_spans=[]
            ),
            text=self._action_spec.codec.format(
                random_click(width, height, self._rng), coordinates
            ),
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


class MemorySink:
    """Keeps the steps of one episode; its end is what `play_episode` returns."""

    def __init__(self, *, keep_steps: bool = True) -> None:
        self.records: list[StepRecord] = []
        self._keep_steps = keep_steps

    async def step(self, record: StepRecord) -> Ack:
        """Keep one step, if steps are kept."""
        if self._keep_steps:
            self.records.append(record)
        return Ack()

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Log the end."""
        logger.debug("%s: %s, %s", end.trajectory_id, end.outcome, end.reason)
        return Ack()


def lease_of(
    config: Config,
    task: Task,
    seed: int,
    *,
    trajectory_id: str,
    group_id: str,
    greedy: bool = False,
    attempt: int = 0,
) -> Lease:
    """The lease that `dart data` would give; its sampling seed follows from run.seed, `seed` and `attempt`."""
    return Lease(
        trajectory_id=trajectory_id,
        group_id=group_id,
        suite=config.env.suite,
        task_id=task.id,
        task_seed=seed,
        max_steps=task.max_steps,
        sampling=Sampling(
            temperature=0.0 if greedy else config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            seed=(config.run.seed + 1) * 2**40 + seed * _STEP_SEEDS + attempt * _ATTEMPT_SEEDS,
        ),
        expires_s=config.data.lease_s,
    )


async def play_one(
    env: AsyncEnv,
    task: Task,
    lease: Lease,
    policy: Policy,
    action_spec: ActionSpec,
    *,
    keep_steps: bool = True,
) -> PlayedEpisode:
    """Play one episode; an environment that broke is renewed for the next."""
    sink = MemorySink(keep_steps=keep_steps)
    end = await play_episode(env, lease, task, policy, sink, action_spec)
    if end.stop_reason in BROKE:
        await env.renew()
    return PlayedEpisode(task, lease, end, sink.records)


def random_click(width: int, height: int, rng: Random) -> Click:
    """A click anywhere on a screen of so many pixels."""
    return Click(x=rng.randrange(width), y=rng.randrange(height))


def player_rng(task: Task, seed: int, attempt: int = 0) -> Random:
    """Random numbers of a random player: the same for the same episode."""
    again = f"/{attempt}" if attempt else ""
    return Random(f"{task.id}/{seed}{again}")  # noqa: S311 - repeatable on purpose


# --- many at once ----------------------------------------------------------------------------


def slots_at_once(config: Config) -> int:
    """Environments to play at once: `env.slots`, or as many as fill a batch of the engine."""
    return max(config.env.slots, config.rollout.max_batch)


async def in_slots(
    config: EnvConfig, name: str, slots: int, work: Callable[[AsyncEnv], Awaitable[None]]
) -> None:
    """Run `work` in `slots` environments at once, each closed at the end.

    `name` is in their errors. Raises the first error that `work` raises; the other slots are
    cancelled then.
    """

    async def run(slot: int) -> None:
        env = make_async_env(config, f"{name}/{slot}")
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


async def play_all(
    config: Config,
    responder: Responder | None,
    episodes: Sequence[PlannedEpisode],
    mode: Mode,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> list[PlayedEpisode]:
    """Play the episodes, `slots_at_once` of them at a time, in any order.

    Steps are kept of the first episodes, FILMS_PER_TASK for each task. `advance(1)` is called
    after each episode. `responder` answers in every mode but `random`.
    """
    action_spec = action_spec_of(config)
    waiting = deque(enumerate(episodes))
    filmed = FILMS_PER_TASK * len({episode.task.id for episode in episodes})
    played: list[PlayedEpisode] = []

    async def play_some(env: AsyncEnv) -> None:
        while waiting:
            index, episode = waiting.popleft()
            policy = policy_of(action_spec, responder, episode)
            one = await play_planned(
                env,
                config,
                episode,
                policy,
                action_spec,
                name=f"eval-{mode}-{index}",
                greedy=mode == "greedy",
                keep_steps=index < filmed,
            )
            played.append(one)
            advance(1)

    await in_slots(config.env, "eval", min(len(episodes), slots_at_once(config)), play_some)
    return played


def policy_of(
    action_spec: ActionSpec, responder: Responder | None, episode: PlannedEpisode
) -> Policy:
    """Who answers: the responder, or without one random clicks."""
    if responder is None:
        return RandomPolicy(action_spec, episode.task, episode.seed, episode.attempt)
    return InProcessPolicy(responder)


async def play_planned(
    env: AsyncEnv,
    config: Config,
    episode: PlannedEpisode,
    policy: Policy,
    action_spec: ActionSpec,
    *,
    name: str,
    greedy: bool,
    keep_steps: bool,
) -> PlayedEpisode:
    """Play one of many as `name`; an invalid one is logged."""
    lease = lease_of(
        config,
        episode.task,
        episode.seed,
        trajectory_id=name,
        group_id="eval",
        greedy=greedy,
        attempt=episode.attempt,
    )
    one = await play_one(env, episode.task, lease, policy, action_spec, keep_steps=keep_steps)
    if one.end.outcome == "invalid":
        logger.warning("%s is invalid: %s", name, one.end.reason)
    return one


# --- the engine and its weights --------------------------------------------------------------


@contextlib.asynccontextmanager
async def loaded_model(
    config: Config, directory: Path | None, version: int, *, load_s: float | None = None
) -> AsyncIterator[Model]:
    """The configured engine with the weights in `directory`, or the model's own for None.

    Adapters are served with the settings that are stored with them. The engine is closed at the end. Raises ModelError, WeightsError, MissingPartError, and
    TimeoutError if loading takes longer than `load_s` seconds.
    """
    from dart_cli.rollout.worker import load_model  # late: loads the engine's parts
    from dart_cli.weights.manifest import read_manifest

    if directory is not None and (lora := read_manifest(directory).lora) is not None:
        stored = config.model.model_copy(update={"lora": lora, "adapters": ""})
        config = config.model_copy(update={"model": stored})
    if directory is None and config.model.adapters and config.rollout.engine == "vllm":
        raise UserError(
            'model.adapters are served by rollout.engine = "vllm" from a run\'s first version on; set '
            '"transformers", or merge them into a model folder'
        )
    async with asyncio.timeout(load_s):
        model = await asyncio.to_thread(load_model, config)
    try:
        if directory is not None:
            await model.engine.update_weights(directory, version)
        yield model
    finally:
        await model.engine.close()


def chosen_weights(config: Config, weights: Path | None) -> tuple[Path | None, int]:
    """(directory, version) of the weight set to play; (None, -1) where the run has none yet.

    Raises UserError for a directory that does not exist, WeightsError for one without weights.
    """
    from dart_cli.weights.manifest import newest_version, read_manifest

    if weights is not None:
        found = newest_version(weights)
        if found is not None:
            return found.path, found.policy_version
        if not weights.is_dir():
            raise UserError(f"--weights {weights}: no such directory; a run's are in RUN/weights")
        return weights, read_manifest(weights).policy_version
    found = newest_version(weights_dir(config))
    return (None, -1) if found is None else (found.path, found.policy_version)
