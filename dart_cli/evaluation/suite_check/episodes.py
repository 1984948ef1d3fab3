"""The episodes of the probes, played by the rules of `dart env` and timed call by call.

The loop is not `play_episode`: a probe has no policy, codec or lease, each call is timed by itself,
and an oracle that does not exist is no failure. Rules for the beginning, the end and the verdict
are those of dart_cli.env.episode.

Probed       one episode
play_probe   plays one
play_task    all of one task's, in one environment: probe by probe, and within it seed by seed,
             so that other resets come between two resets to the same seed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bus.errors import ActionCausedError, EnvError, NoOracleError
from bus.messages import Outcome, StopReason
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import admitted, already_true, stop_reason_after
from dart_cli.evaluation.in_process import player_rng
from dart_cli.evaluation.suite_check.agents import Probe, act
from envs.actions import Wait
from envs.base import Task
from envs.screenshots import pixels_of


@dataclass(frozen=True)
class Probed:
    """One episode of a probe."""

    probe: Probe
    seed: int
    outcome: Outcome | None  # None: there is no solution, so the oracle did not play
    reason: str
    reward: float | None = None  # the verdict's; None of an invalid episode
    true_at_reset: bool = False
    reset_s: float | None = None  # None where it broke
    step_s: tuple[float, ...] = ()  # of its actions without waits
    instruction: str = ""
    screenshot: bytes = b""  # the first


async def play_probe(env: AsyncEnv, task: Task, seed: int, probe: Probe) -> Probed:
    """Play one episode; after an error its outcome is `invalid`, and the environment is renewed."""
    if probe == "oracle" and not task.feasible:
        return Probed(probe, seed, None, "the task cannot be done")
    rng = player_rng(task, seed)
    step_s: list[float] = []
    began = time.monotonic()
    try:
        screen, instruction = await env.reset(task, seed)
        pixels_of(screen.screenshot)  # a run decodes each for the policy
    except EnvError as error:
        await env.renew()
        return Probed(probe, seed, "invalid", str(error))
    reset_s, first = time.monotonic() - began, screen.screenshot

    def ended(
        outcome: Outcome | None,
        reason: str,
        reward: float | None = None,
        *,
        true_at_reset: bool = False,
    ) -> Probed:
        return Probed(
            *(probe, seed, outcome, reason, reward),
            *(true_at_reset, reset_s, tuple(step_s), instruction, first),
        )

    try:
        if (already := already_true(task, await env.judge_start())) is not None:
            return ended("invalid", already, true_at_reset=True)
        stop: StopReason = "step_limit"
        for _ in range(task.max_steps):
            action = await act(probe, env, screen, rng)
            began = time.monotonic()
            stepped = await env.step(action)
            if not isinstance(action, Wait):  # a wait takes the time it was given
                step_s.append(time.monotonic() - began)
            screen = stepped.observation
            if (reason := stop_reason_after(action, stepped)) is not None:
                stop = reason
                break
        verdict = admitted(task, stop, await env.evaluate())
    except NoOracleError as error:
        return ended(None, str(error))
    except ActionCausedError as error:
        await env.renew()
        return ended("fail", str(error), 0.0)
    except EnvError as error:
        await env.renew()
        return ended("invalid", str(error))
    return ended(verdict.outcome, verdict.reason, verdict.reward)


async def play_task(
    env: AsyncEnv,
    task: Task,
    seeds: Sequence[int],
    probes: Sequence[Probe],
    advance: Callable[[int], None] = lambda _: None,
) -> list[Probed]:
    """All episodes of one task; `advance(1)` is called after each."""
    episodes = []
    for probe, seed in _order(seeds, probes):
        episodes.append(await play_probe(env, task, seed, probe))
        advance(1)
    return episodes


def _order(seeds: Sequence[int], probes: Sequence[Probe]) -> Iterator[tuple[Probe, int]]:
    for probe in probes:
        for seed in seeds:
            yield probe, seed
