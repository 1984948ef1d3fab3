"""Episodes in one process, without the bus: what benchmarks play and how it becomes a batch's steps.

Rounds    a policy for many episodes: asks the engine once all of them wait, as one batch
Player    episodes of dart_cli.env.episode in environments of this process
step_of   a played step as the ledger serves it
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bus.messages import (
    ActRequest,
    Completion,
    Lease,
    Sampling,
    StepRecord,
    TrajectoryEnd,
)
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines.base import Engine
from dart_cli.engines.completions import completion, generate_request
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.env.calls import StepResult
from dart_cli.env.episode import play_episode
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.player.episodes import MemorySink
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import make_renderer
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Task, Verdict
from envs.contract.registry import make_env


@dataclass(frozen=True)
class GroupMember:
    """One episode to play."""

    group: str
    member: int
    task: Task
    task_seed: int
    sampling_seed: int


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode that is over."""

    planned: GroupMember
    end: TrajectoryEnd
    records: list[StepRecord]


class Rounds:
    """A responder that answers episodes in rounds: once all that play wait, their screens are one batch."""

    def __init__(self, policy: LoadedPolicy, engine: Engine, config: Config) -> None:
        self._policy = policy
        self._engine = engine
        self._renderer = make_renderer(policy, config.policy)
        self._waiting: list[tuple[ActRequest, asyncio.Future[Completion]]] = []
        self._playing = 0
        self._round: asyncio.Task[None] | None = None

    def join(self) -> None:
        """Count one more episode that plays at the same time."""
        self._playing += 1

    def leave(self) -> None:
        """Count one episode fewer."""
        self._playing -= 1
        self._begin_if_full()

    async def act(self, request: ActRequest) -> Completion:
        """Return the policy's completion for one screen, once all other episodes have asked too."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._begin_if_full()
        return await answer

    def _begin_if_full(self) -> None:
        if self._waiting and len(self._waiting) == self._playing:
            waiting, self._waiting = self._waiting, []
            self._round = asyncio.create_task(self._answer(waiting))

    async def _answer(self, waiting: list[tuple[ActRequest, asyncio.Future[Completion]]]) -> None:
        try:
            prompts = [
                self._renderer.render(request.instruction, request.turns, request.screenshot)
                for request, _ in waiting
            ]
            requests = [
                generate_request(request, prompt.token_ids, prompt.images)
                for (request, _), prompt in zip(waiting, prompts, strict=True)
            ]
            if isinstance(self._engine, TransformersEngine):
                generations = await self._engine.generate_together(requests)
            else:
                generations = await asyncio.gather(*map(self._engine.generate, requests))
        except Exception as error:  # noqa: BLE001 - it rises in each episode
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), prompt, generation in zip(waiting, prompts, generations, strict=True):
            text = self._policy.decode(generation.sampled.token_ids)
            answer.set_result(completion(prompt.token_ids, generation, text))


class _Direct:
    """An environment called in place: the embedded one never blocks."""

    queued_s = 0.0
    """See AsyncEnv."""

    def __init__(self, env: GuiEnv) -> None:
        self._env = env

    async def reset(self, task: Task, seed: int) -> tuple[Observation, str]:
        """See AsyncEnv."""
        observation, info = self._env.reset(seed=seed, options={"task": task})
        return observation, str(info["instruction"])

    async def evaluate_start(self) -> Verdict | None:
        """See AsyncEnv."""
        return self._env.evaluate()

    async def step(self, action: Action, *, continues: bool = False) -> StepResult:  # noqa: ARG002
        """See AsyncEnv."""
        observation, _, terminated, truncated, _ = self._env.step(action)
        return StepResult(observation, terminated, truncated)

    async def evaluate(self) -> Verdict:
        """See AsyncEnv."""
        return self._env.evaluate()


class Player:
    """A player of episodes, a full engine batch of them at once."""

    def __init__(self, config: Config, policy: LoadedPolicy, engine: Engine) -> None:
        self._config = config
        self._rounds = Rounds(policy, engine, config)
        self._action_spec = action_spec_of(config)
        make = [make_env(config.env.suite, **config.env.options) for _ in range(self._slots)]
        self._envs = [_Direct(env) for env in make]

    @property
    def _slots(self) -> int:
        return self._config.rollout.max_batch

    def take(self, envs: Sequence[GuiEnv]) -> None:
        """Play in these environments from now on, as many as before."""
        self._envs = [_Direct(env) for env in envs]

    async def play(self, planned: Sequence[GroupMember]) -> list[PlayedEpisode]:
        """Play all episodes; return the results in the order of `planned`."""
        waiting = deque(enumerate(planned))
        episodes: dict[int, PlayedEpisode] = {}

        async def play_some(env: _Direct) -> None:
            try:
                while waiting:
                    index, each = waiting.popleft()
                    sink = MemorySink()
                    lease = self._lease(each)
                    end = await play_episode(
                        env, lease, each.task, self._rounds, sink, self._action_spec
                    )
                    episodes[index] = PlayedEpisode(each, end, sink.records)
            finally:
                self._rounds.leave()

        async with asyncio.TaskGroup() as group:
            for env in self._envs[: len(planned)]:
                self._rounds.join()
                group.create_task(play_some(env))
        return [episodes[index] for index in range(len(planned))]

    def _lease(self, planned: GroupMember) -> Lease:
        rollout = self._config.rollout
        return Lease(
            trajectory_id=f"{planned.group}-{planned.member:02d}",
            group_id=planned.group,
            suite=self._config.env.suite,
            task_id=planned.task.id,
            task_seed=planned.task_seed,
            max_steps=planned.task.max_steps,
            sampling=Sampling(
                temperature=rollout.temperature,
                max_tokens=rollout.max_tokens,
                seed=planned.sampling_seed,
            ),
        )


def step_of(
    record: StepRecord,
    advantage: float,
    group: str,
    reward: float | None = None,
    baseline: float | None = None,
) -> BatchStep:
    """Return a played step as the ledger serves it, all of it trained on."""
    return BatchStep(
        group_id=group,
        trajectory_id=record.trajectory_id,
        step=record.step,
        prompt_token_ids=int32s(record.prompt_token_ids),
        token_ids=int32s(record.sampled.token_ids),
        image_hashes=record.image_hashes,
        behaviour_logprobs=float64s(record.sampled.behaviour_logprobs),
        version_spans=record.sampled.version_spans,
        advantage=advantage,
        weight=1.0,
        reward=reward,
        baseline=baseline,
    )


def limit_torch() -> None:
    """Set one thread and deterministic sums, in the same order each time."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
