"""Play one episode end to end in this process: an environment, the engine, a verdict.

play   yields the findings: how the episode ended, and how long a step took
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import fmean

from bus.errors import DartError
from bus.messages import ActRequest, Completion
from dart_cli.config.rules import Finding
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import evaluated_tasks
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import Policy
from dart_cli.player.chosen_model import chosen_weights, loaded_model
from dart_cli.player.episodes import (
    PlannedEpisode,
    PlayedEpisode,
    answered_by,
    each_of,
    plan_episodes,
)
from dart_cli.player.episodes import play as play_episodes
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.findings import error, error_of, ok, warning
from dart_cli.runtime.role import limit_threads
from dart_cli.runtime.waits import OpenWaits

LOAD_S = 900.0
"""Seconds in which a model must be loaded."""


def play(config: Config) -> Iterator[Finding]:
    """Play one episode of the first task, and yield findings about it.

    It needs no other process and stores nothing.
    """
    limit_threads(config.rollout.threads)
    began, waits = time.monotonic(), OpenWaits()
    results: list[tuple[PlayedEpisode, str, float]] = []
    try:
        exit_code = run_until_stopped(_play_one(config, results, waits), waits, lambda: None)
    except DartError as fault:
        yield error_of("episode", fault, "correct what it names, then run dart doctor again")
        return
    except TimeoutError:
        yield error(
            "episode",
            f"not over after {time.monotonic() - began:.0f} s",
            "lower rollout.max_tokens, or find out what the engine waits for",
        )
        return
    if exit_code:
        seconds = time.monotonic() - began
        yield error("episode", f"stopped after {seconds:.0f} s", "run dart doctor again")
        raise SystemExit(exit_code)
    yield from episode_findings(*results[0])


async def _play_one(
    config: Config, results: list[tuple[PlayedEpisode, str, float]], waits: OpenWaits
) -> None:
    """Play an episode, and add (episode, its weights in words, seconds of loading the model) to `results`."""
    [episode] = plan_episodes(evaluated_tasks(config)[:1], 1, TRAIN_SEEDS)
    directory, version = chosen_weights(config, None)
    began = time.monotonic()
    weights = "the model's base weights" if directory is None else f"weights v{version}"
    async with loaded_model(config, directory, version, load_s=LOAD_S, waits=waits) as model:
        loaded_s = time.monotonic() - began
        policy_of = answered_by(config, model.responder)

        def in_time(env: AsyncEnv, planned: PlannedEpisode) -> Policy:
            return InTime(policy_of(env, planned), config.rollout.deadline_s)

        # The environment's calls have their own deadlines; their time in a queue has none.
        await play_episodes(
            config,
            each_of([episode]),
            in_time,
            lambda episode: results.append((episode, weights, loaded_s)),
            most=1,
            name="doctor",
            waits=waits,
        )


class InTime:
    """A policy whose answers have a deadline."""

    def __init__(self, policy: Policy, deadline_s: float) -> None:
        self._policy, self._deadline_s = policy, deadline_s

    async def act(self, request: ActRequest) -> Completion:
        """Return the policy's answer. Raises TimeoutError after the deadline."""
        async with asyncio.timeout(self._deadline_s):
            return await self._policy.act(request)


def episode_findings(episode: PlayedEpisode, weights: str, loaded_s: float) -> Iterator[Finding]:
    """Yield findings about an episode.

    A broken environment is an error; a policy that fails the task is not.
    """
    end, records = episode.end, episode.records
    what = f"{episode.task.id}, {weights}"
    if end.outcome == "invalid":
        yield error("episode", f"{what}: invalid: {end.reason}", "fix the environment")
        return
    steps = f"{end.steps} step{'' if end.steps == 1 else 's'}"
    times = (
        f"; a step took {fmean(r.model_s for r in records):.2f} s in the engine, "
        f"{fmean(r.env_s for r in records):.2f} s in the environment"
        if records
        else ""
    )
    yield ok(
        "episode",
        f"{what}: {end.outcome} after {steps} ({end.stop_reason}); loaded in {loaded_s:.1f} s, "
        f"reset in {end.reset_s:.2f} s{times}",
    )
    if records and all(record.action is None for record in records):
        text = " ".join(records[0].text.split())[:80]
        yield warning(
            "episode",
            f"no completion of the model was an action: {text!r}",
            "check policy.action_parser, policy.template and rollout.max_tokens against the model's card",
        )
