"""One episode of a player without a policy (a probe, a person, random clicks): no prompt, parser or lease.

Player         a function that returns the next action on a screen; None ends the episode
play_actions   plays one episode and times each call
ActedEpisode   the result of such an episode

The rules for the beginning, the end and the verdict are those of dart_cli.env.episode.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bus.errors import ActionCausedError, EnvError, NoOracleError
from bus.messages import Outcome, StopReason
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import admitted, already_true, stop_reason_after
from envs.contract.actions import Action, Wait
from envs.contract.base import Observation, Task, Verdict
from envs.contract.screenshots import pixels_of

Player = Callable[[Observation], Awaitable[Action | None]]
"""Screen -> the next action, or None to end the episode. Raises NoOracleError, and EnvError if a solution
fails."""
Watcher = Callable[[Action | None, Observation, str], None]
"""Takes (action, screen, instruction) of each screen; the action led there and is None at the beginning."""


@dataclass
class ActedEpisode:
    """The result of an episode of a player without a policy."""

    outcome: Outcome | None = None  # None: it was not played, since there is no solution
    reason: str = ""
    reward: float | None = None  # of the verdict; None for an invalid episode
    true_at_reset: bool = False
    reset_s: float | None = None  # without waits in queues; None if the episode did not begin
    step_s: list[float] = field(default_factory=list)  # seconds of each action but `wait`
    instruction: str = ""
    screenshot: bytes = b""  # of the first screen
    app_log: list[str] = field(default_factory=list)  # what the application reported


Acted = TypeVar("Acted", bound=ActedEpisode)


async def play_actions(
    env: AsyncEnv,
    task: Task,
    seed: int,
    player: Player,
    acted: Acted,
    watch: Watcher = lambda *_: None,
) -> Acted:
    """Play one episode, write its result into `acted` and return that.

    After an error the outcome is `invalid`, and the environment is renewed.
    """
    began = time.monotonic()

    def end_with(verdict: Verdict) -> Acted:
        acted.outcome, acted.reason, acted.reward = verdict.outcome, verdict.reason, verdict.reward
        acted.app_log = env.app_log.lines
        return acted

    try:
        screen, acted.instruction = await env.reset(task, seed)
        pixels_of(screen.screenshot)  # raises if it is broken: a run decodes each screenshot
        acted.reset_s = time.monotonic() - began - env.queued_s
        acted.screenshot = screen.screenshot
        watch(None, screen, acted.instruction)
        if (already := already_true(task, await env.evaluate_start())) is not None:
            acted.true_at_reset = True
            return end_with(Verdict("invalid", already))
        stop: StopReason = "step_limit"
        for _ in range(task.max_steps):
            action = await player(screen)
            if action is None:
                break
            began = time.monotonic()
            stepped = await env.step(action)
            if not isinstance(action, Wait):  # a wait takes as long as it says
                acted.step_s.append(time.monotonic() - began - env.queued_s)
            screen = stepped.observation
            watch(action, screen, acted.instruction)
            if (reason := stop_reason_after(action, stepped)) is not None:
                stop = reason
                break
        return end_with(admitted(task, stop, await env.evaluate()))
    except NoOracleError as error:
        acted.reason = str(error)
        return acted
    except ActionCausedError as error:
        await env.renew()
        return end_with(Verdict("fail", str(error), 0.0))
    except EnvError as error:
        await env.renew()
        return end_with(Verdict("invalid", str(error)))
